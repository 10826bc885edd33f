"""Which target judges what, and what its session holds: the verifications in flight.

A target has one verification at a time. The next one goes to the free target whose session holds
the most of its text. The deepest verification makes room; a warm-up does so only as a last resort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_protocol.branches import branches_beside, guesses_beside
from paceline_protocol.depths import Depths
from paceline_protocol.messages import AbandonVerify, PromoteVerify, StartVerify
from paceline_protocol.verification import Verification

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_protocol.branches import BranchQueue
    from paceline_protocol.draft_statistics import DraftCounter
    from paceline_protocol.messages import CapacityChanged, Command
    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask
    from paceline_protocol.tree import TokenTree


class TargetSchedule:
    """The verifications in flight, at most one at each target.

    Args:
        tree: What is drafted, and known.
        counter: Is told of the rows that branches take.
        capacity: The targets there are.
        waiting: Takes branches that none of them judges any more; None if no target would take
            them up.
    """

    def __init__(
        self,
        tree: TokenTree,
        *,
        counter: DraftCounter,
        capacity: CapacityChanged,
        waiting: BranchQueue | None = None,
    ) -> None:
        self._tree = tree
        self._waiting = waiting
        self._counter = counter
        self._capacity = capacity
        self._in_flight: dict[int, Verification] = {}
        self._count = 0
        self._held: dict[int, Node] = {}  # by target: the end of the text its session holds

    def __contains__(self, verify_id: int) -> bool:
        return verify_id in self._in_flight

    def __len__(self) -> int:
        return len(self._in_flight)

    # --- what happened ------------------------------------------------------------------------

    def answered(self, verify_id: int) -> Verification:
        """Take one off the list because its verdict has come; see `learnt`."""
        return self._in_flight.pop(verify_id)

    def learnt(self, verification: Verification, end: Node) -> None:
        """Let the target of an answered one hold what it has accepted."""
        # A target that judges no trees has judged the trunk alone; and one that rejects a token may
        # draw that very one, where rounding leaves it no other: what follows it is open then.
        if verification.branches or verification.guesses or verification.is_useful():
            if verification.target in self._held:
                self._held[verification.target] = end
            self._release(verification)

    def failed(self, verify_id: int) -> None:
        """Take one off the list that came to nothing."""
        failed = self._in_flight.pop(verify_id)
        self._release(failed)
        self._held.pop(failed.target, None)

    def change(self, capacity: CapacityChanged) -> list[Command]:
        """Abandon those at targets that are lost."""
        self._capacity = capacity
        lost = [each for each in self._in_flight.values() if not capacity.has(each.target)]
        commands = [self._abandon(each) for each in lost]
        self._held = {t: node for t, node in self._held.items() if t in capacity.targets}
        return commands

    # --- questions ----------------------------------------------------------------------------

    def decide(self, node: Node) -> bool:
        """Whether one of them will tell what follows a node."""
        return any(each.decides(node) for each in self._in_flight.values())

    @property
    def free_targets(self) -> list[int]:
        """Targets that have none."""
        busy = {each.target for each in self._in_flight.values()}
        return [target for target in self._capacity.targets if target not in busy]

    # --- commands -----------------------------------------------------------------------------

    def start(
        self,
        trunk: Sequence[Node],
        *,
        prefix: tuple[int, ...],
        task: DecodingTask,
        target: int | None = None,
        warms_up: bool = False,
        anticipates: bool = True,
    ) -> Command:
        """Start one on a free target; there has to be one.

        Args:
            trunk: The last token of its prefix, then its block; branches ride along.
            prefix: The whole text that ends with the first of these.
            task: What is asked of the request.
            target: A free one; if None, the free one that holds the most of its text.
            warms_up: Whether it is worth finishing for the session alone.
            anticipates: Whether the next verification would ask for what follows a correction.
        """
        candidates = self.free_targets if target is None else [target]
        kept = {
            free: self._tree.last_common(held, trunk[-1])
            for free in candidates
            if (held := self._held.get(free))
        }
        target = max(candidates, key=lambda free: kept[free].length if free in kept else 0)
        self._count += 1
        is_kept = task.keep_prefill and target not in self._held and not trunk[0].draft.is_branch
        branches = branches_beside(trunk, task=task)
        verification = Verification(
            self._count,
            target,
            trunk=tuple(trunk),
            kept=kept.get(target),
            depth=self._depths().of(trunk[-1]),
            warms_up=warms_up or is_kept,
            branches=branches,
            guesses=guesses_beside(trunk, branches, task=task),
            is_guess=trunk[0].draft.is_branch and not trunk[0].dispatch.assigned,
        )
        verification.claim(rule=task.rule)
        self._in_flight[verification.verify_id] = verification
        self._held[target] = trunk[-1]
        self._counter.branches_judged(sum(node.draft.is_branch for node in verification.nodes[1:]))
        return StartVerify(
            verify_id=verification.verify_id,
            target=target,
            prefix=prefix,
            proposal=verification.proposal(rule=task.rule),
            depth=verification.depth,
            # A correction is where both models begin anew; with guesses not from the text alone.
            anticipate=anticipates and len(verification.nodes) > 1 and not task.own_guesses,
            propose=task.own_guesses,
            is_branch=trunk[0].draft.is_branch,
        )

    def abandon_worthless(self) -> list[Command]:
        """Withdraw those that can tell nothing new."""
        worthless = [
            each for each in self._in_flight.values() if not each.is_useful() and not each.warms_up
        ]
        return [self._abandon(each) for each in worthless]

    def abandon_all(self) -> list[Command]:
        """Withdraw what is left."""
        return [self._abandon(each) for each in list(self._in_flight.values())]

    def make_room(self) -> Command:
        """Withdraw one for the frontier: a branch's rather than the main path's."""
        usable = self._on_usable_targets()
        return self._preempt([each for each in usable if each.trunk[0].draft.is_branch] or usable)

    def make_room_beside(self, path: Sequence[Node]) -> list[Command]:
        """Withdraw one that decides nothing on a path, if there is one."""
        on_path = set(path)
        aside = [
            each
            for each in self._on_usable_targets()
            if on_path.isdisjoint(each.nodes) and not each.warms_up
        ]
        return [self._preempt(aside)] if aside else []

    def promote(self) -> list[Command]:
        """Tell of those that have come closer to the front."""
        commands: list[Command] = []
        depths = self._depths()
        for each in self._in_flight.values():
            if each.depth == 0 or not each.is_useful():
                continue
            depth = depths.of(each.end)
            if depth < each.depth:
                each.depth = depth
                commands.append(PromoteVerify(each.verify_id, depth))
        return commands

    def _depths(self) -> Depths:
        ends = {each.end for each in self._in_flight.values()}
        return Depths(ends, root_length=self._tree.root.length)

    def _on_usable_targets(self) -> list[Verification]:
        """Return the verifications that could make room for another one."""
        return [v for v in self._in_flight.values() if v.target in self._capacity.targets]

    def _preempt(self, candidates: Iterable[Verification]) -> Command:
        """Abandon the deepest; a warm-up only if there is nothing else."""
        return self._abandon(
            max(candidates, key=lambda v: (not v.warms_up, v.trunk[0].length, v.verify_id))
        )

    def _abandon(self, verification: Verification) -> Command:
        del self._in_flight[verification.verify_id]
        self._release(verification)
        if verification.kept is None:
            self._held.pop(verification.target, None)
        else:
            self._held[verification.target] = verification.kept
        return AbandonVerify(verification.verify_id)

    def _release(self, verification: Verification) -> None:
        verification.release()
        if self._waiting is not None:
            self._waiting.extend((verification.trunk[0], *verification.branches))
