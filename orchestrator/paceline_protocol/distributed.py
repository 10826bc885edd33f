"""Distributed speculative inference ("DSI"): drafting and several verifications overlap.

Timor et al. 2024 (arXiv 2405.14105), Algorithm 1, with lookahead and a fixed number of servers.

Design. What is known is a token tree (`tree.py`): what was drafted, and facts about it, which
verdicts are taken apart into. What runs are drafts, each growing the tree at its tip, and
verifications, each of a path in it (`verification.py`). An event only changes what is known or what
runs; `_settle` then derives every command from those two, in the same five steps, whatever the
event was. So there is no case for each interleaving, and servers that are lost, late or new are no
special case either.

Difference: the algorithm starts a thread for each model and token, here each drafter extends one
chain of a token tree. Equal tokens share a node; where drafters disagree the main path follows the
smallest drafter index (the algorithm's j*), and the branches off it are verified by targets that
would otherwise idle.

Difference: a correction that is known before it can be committed, because a later verdict came
first, restarts the drafter at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_protocol.commitment import Commitment, DraftStatistics
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    Event,
    Finish,
    FinishReason,
    PromoteVerify,
    StartDraft,
    StartVerify,
    StopDraft,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.proposal import Proposal
from paceline_protocol.task import SPECULATION_LIMIT, VerificationRule
from paceline_protocol.tree import Node, TokenTree
from paceline_protocol.verification import Verification, due_nodes, frontier_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline_protocol.task import DecodingTask

__all__ = ["DistributedDecoding"]


@dataclass(slots=True, eq=False)
class _Draft:
    """A draft in flight: where its next token goes, and how many of its window are to come.

    While it is cold, its drafter works through the prompt. A restart would begin that anew, so it
    is left alone though the target may be ahead of it by now: else a drafter whose prefill takes
    longer than a target's step would never draft at all.
    """

    draft_id: int
    drafter: int
    tip: Node
    missing: int
    cold: bool
    fruitful: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether its tokens are of no use any more."""
        return not self.tip.alive or (self.tip.next_token is not None and not self.cold)


class DistributedDecoding:
    """Decode with any number of drafters and targets at once.

    After each event, in this order: commit what is decided; withdraw what that made worthless;
    let idle drafters draft on; see that the frontier (what follows the last committed token) is
    being decided; give free targets the blocks that are due.

    Invariants:
        All of invariants.py (tests/unit/protocol/test_invariants.py).

    Cost:
        O(drafted ahead + targets) for an event, and one copy of the text for a new command.
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._task = task
        self._commitment = Commitment(task)
        self._tree = TokenTree(
            task.prompt[-1], length=len(task.prompt), statistics=self._commitment.statistics
        )
        self._capacity = capacity
        self._drafts: dict[int, _Draft] = {}
        self._verifications: dict[int, Verification] = {}
        self._draft_count = 0
        self._verify_count = 0
        self._tips: dict[int, Node] = {}  # by drafter: the last token it found
        self._warm: set[int] = set()  # drafters that have found a token
        self._resting: dict[int, int] = {}  # by drafter that failed: what was committed then
        self._held: dict[int, Node] = {}  # by target: the end of the text its session holds
        self._finished = False

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens."""
        return self._commitment.statistics

    def start(self) -> list[Command]:
        """Begin; see DecodingMethod."""
        commands: list[Command] = []
        if self._task.broadcast_prefill and self._commitment.finish_reason is None:
            prompt = (self._tree.root,)
            commands += [self._start_verify(prompt, warms_up=True) for _ in self._capacity.targets]
        return commands + self._settle()

    def handle(self, event: Event) -> list[Command]:
        """Take in an event; see DecodingMethod."""
        if self._finished:
            return []
        commands: list[Command] = []
        match event:
            case TokensDrafted(draft_id=draft_id) if draft_id in self._drafts:
                commands += self._take_draft(self._drafts[draft_id], event)
            case DraftEnded(draft_id=draft_id) if draft_id in self._drafts:
                if not self._drafts[draft_id].fruitful:
                    self._rest(draft_id)
                del self._drafts[draft_id]
            case DraftFailed(draft_id=draft_id) if draft_id in self._drafts:
                self._rest(draft_id)
                del self._drafts[draft_id]
            case BlockVerified(verify_id=verify_id) if verify_id in self._verifications:
                self._take_verdict(self._verifications.pop(verify_id), event)
            case VerifyFailed(verify_id=verify_id) if verify_id in self._verifications:
                failed = self._verifications.pop(verify_id)
                failed.release()
                self._held.pop(failed.target, None)
            case CapacityChanged():
                commands += self._take_capacity(event)
            case _:
                return []
        return commands + self._settle()

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        if self._finished:
            return []
        return self._finish(FinishReason.STOPPED)

    # --- what happened ------------------------------------------------------------------------

    def _take_draft(self, draft: _Draft, event: TokensDrafted) -> list[Command]:
        draft.cold = False
        self._warm.add(draft.drafter)
        proposal = event.proposal
        assert proposal.is_chain, "a drafter of one chain was asked"
        for index, token_id in enumerate(proposal.token_ids[: draft.missing]):
            if draft.tip.next_token is not None or not self._can_grow(draft.tip):
                break
            distribution = proposal.distributions[index] if proposal.distributions else None
            draft.tip = self._tree.draft(
                draft.tip, token_id, drafter=draft.drafter, distribution=distribution
            )
            draft.missing -= 1
            draft.fruitful = True
        self._tips[draft.drafter] = draft.tip
        if draft.missing == 0:
            del self._drafts[draft.draft_id]
        elif not self._can_grow(draft.tip):
            return [self._stop_draft(draft)]
        return []

    def _take_verdict(self, verification: Verification, verdict: BlockVerified) -> None:
        nodes, accepted = verification.nodes, len(verdict.accepted_path)
        assert 0 <= accepted < len(nodes), "a verdict accepts at most its block"
        told = [node.token_id for node in nodes[1 : accepted + 1]] + [verdict.next_token]
        logprobs = verdict.logprobs or (None,) * len(told)
        for node, token_id, logprob in zip(nodes, told, logprobs, strict=False):
            if verification.decides(node) and not self._ends(node):
                self._tree.decide(node, token_id, logprob)

    def _take_capacity(self, capacity: CapacityChanged) -> list[Command]:
        self._capacity = capacity
        lost_drafts = [d for d in self._drafts.values() if d.drafter not in capacity.drafters]
        lost = [v for v in self._verifications.values() if not capacity.has(v.target)]
        if capacity.lookahead is not None:
            self._task = replace(self._task, lookahead=capacity.lookahead)
        self._warm.intersection_update(capacity.drafters)
        commands = [self._stop_draft(draft) for draft in lost_drafts]
        commands += [self._abandon(verification) for verification in lost]
        self._held = {t: node for t, node in self._held.items() if t in capacity.targets}
        return commands

    def _rest(self, draft_id: int) -> None:
        # Until something is committed, so that a broken drafter is not asked in a busy loop.
        self._resting[self._drafts[draft_id].drafter] = len(self._commitment.prefix)

    # --- what follows from it -----------------------------------------------------------------

    def _settle(self) -> list[Command]:
        commands = self._commit()
        if self._commitment.finish_reason is not None:
            return commands + self._finish(self._commitment.finish_reason)
        commands += self._prune()
        commands += self._draft_on()
        commands += self._dispatch()
        commands += self._promote()
        return commands

    def _commit(self) -> list[Command]:
        passed = self._tree.advance()
        if not passed:
            return []
        logprobs = [node.logprob for node in passed if node.logprob is not None]
        return [
            self._commitment.commit(
                [node.token_id for node in passed],
                accepted=[node.drafter is not None for node in passed],
                logprobs=logprobs,
            )
        ]

    def _prune(self) -> list[Command]:
        stale = [draft for draft in self._drafts.values() if draft.is_stale]
        worthless = [
            verification
            for verification in self._verifications.values()
            if not verification.is_useful() and not verification.warms_up
        ]
        commands = [self._stop_draft(draft) for draft in stale]
        return commands + [self._abandon(verification) for verification in worthless]

    def _draft_on(self) -> list[Command]:
        commands: list[Command] = []
        committed = len(self._commitment.prefix)
        busy = {draft.drafter for draft in self._drafts.values()}
        for drafter in self._capacity.drafters:
            if drafter in busy or self._resting.get(drafter) == committed:
                continue
            tip = self._tree.surviving(self._tips.get(drafter, self._tree.root))
            useful = self._commitment.limit - 1 - tip.length
            window = min(self._task.draft_window, useful)
            if self._can_grow(tip) and tip.length + window <= committed + SPECULATION_LIMIT:
                commands.append(self._start_draft(drafter, tip, window))
        return commands

    def _dispatch(self) -> list[Command]:
        if not self._capacity.targets:
            return []
        commands: list[Command] = []
        path = self._tree.main_path()
        growing = self._is_growing(path[-1])
        if not any(v.decides(path[0]) for v in self._verifications.values()):
            if not self._free_targets():
                commands.append(self._preempt(self._on_usable_targets()))
            nodes = frontier_nodes(path, task=self._task, growing=growing)
            commands.append(self._start_verify(nodes))
        while nodes := due_nodes(path, task=self._task, growing=growing):
            if not self._free_targets():
                aside = self._verifications_beside(path)
                if not aside:
                    return commands
                commands.append(self._preempt(aside))
            commands.append(self._start_verify(nodes))
        return commands + self._dispatch_branches(path)

    def _dispatch_branches(self, main_path: Sequence[Node]) -> list[Command]:
        commands: list[Command] = []
        for _, tip in sorted(self._tips.items()):
            if not self._free_targets():
                break
            if not tip.alive or tip.length <= main_path[0].length:
                continue
            path = self._tree.path_to(tip)
            shared = sum(a is b for a, b in zip(path, main_path, strict=False))
            # The token that branches off is assumed: to decide for or against it is the main
            # path's business.
            branch, growing = path[shared:], self._is_growing(tip)
            while self._free_targets() and (
                nodes := due_nodes(branch, task=self._task, growing=growing)
            ):
                commands.append(self._start_verify(nodes))
        return commands

    def _promote(self) -> list[Command]:
        commands: list[Command] = []
        for verification in self._verifications.values():
            if verification.depth == 0 or not verification.is_useful():
                continue
            depth = self._depth(verification.nodes[-1])
            if depth < verification.depth:
                verification.depth = depth
                commands.append(PromoteVerify(verification.verify_id, depth))
        return commands

    def _finish(self, reason: FinishReason) -> list[Command]:
        self._finished = True
        commands: list[Command] = [self._stop_draft(d) for d in list(self._drafts.values())]
        commands += [self._abandon(v) for v in list(self._verifications.values())]
        self._tree.discard()
        return [*commands, Finish(reason)]

    # --- questions ----------------------------------------------------------------------------

    def _can_grow(self, tip: Node) -> bool:
        """Whether a draft token after this node could become output."""
        return tip.length < self._commitment.limit - 1 and not self._ends(tip)

    def _ends(self, node: Node) -> bool:
        """Whether the text ends with this node; a prompt never does, whatever its last token."""
        return node.parent is not None and self._commitment.ends_after(
            node.token_id, length=node.length
        )

    def _is_growing(self, tip: Node) -> bool:
        return any(draft.tip is tip for draft in self._drafts.values())

    def _free_targets(self) -> list[int]:
        busy = {verification.target for verification in self._verifications.values()}
        return [target for target in self._capacity.targets if target not in busy]

    def _verifications_beside(self, path: Sequence[Node]) -> list[Verification]:
        """Return those that decide nothing on a path: a block of it may take their place."""
        on_path = set(path)
        return [
            verification
            for verification in self._on_usable_targets()
            if on_path.isdisjoint(verification.nodes) and not verification.warms_up
        ]

    def _on_usable_targets(self) -> list[Verification]:
        """Return those whose place another one could take."""
        return [v for v in self._verifications.values() if v.target in self._capacity.targets]

    def _depth(self, last: Node) -> int:
        """Return how many unfinished verifications end before this node, on its path.

        The copies of a broadcast prefill count as one.
        """
        ends = {verification.nodes[-1] for verification in self._verifications.values()}
        depth = 0
        while last.length > self._tree.root.length and last.parent is not None:
            last = last.parent
            depth += last in ends
        return depth

    # --- commands -----------------------------------------------------------------------------

    def _start_draft(self, drafter: int, tip: Node, window: int) -> Command:
        self._draft_count += 1
        self._drafts[self._draft_count] = _Draft(
            self._draft_count, drafter, tip, missing=window, cold=drafter not in self._warm
        )
        return StartDraft(self._draft_count, drafter, self._text(tip), max_tokens=window)

    def _stop_draft(self, draft: _Draft) -> Command:
        del self._drafts[draft.draft_id]
        return StopDraft(draft.draft_id)

    def _start_verify(self, nodes: Sequence[Node], *, warms_up: bool = False) -> Command:
        """Start a verification on the free target that holds the most of its text."""
        kept = {
            target: self._tree.last_common(held, nodes[-1])
            for target in self._free_targets()
            if (held := self._held.get(target))
        }
        target = max(
            self._free_targets(), key=lambda free: kept[free].length if free in kept else 0
        )
        self._verify_count += 1
        verification = Verification(
            self._verify_count,
            target,
            nodes=tuple(nodes),
            kept=kept.get(target),
            depth=self._depth(nodes[-1]),
            warms_up=warms_up or (self._task.keep_prefill and target not in self._held),
        )
        for node in nodes:
            node.assigned = True
        exact = self._task.rule is VerificationRule.EXACT
        if not exact:
            verification.claim()
        self._verifications[verification.verify_id] = verification
        self._held[target] = nodes[-1]
        return StartVerify(
            verify_id=verification.verify_id,
            target=target,
            prefix=self._text(nodes[0]),
            proposal=Proposal(
                tuple(node.token_id for node in nodes[1:]),
                distributions=() if exact else tuple(node.distribution for node in nodes[1:]),
            ),
            depth=verification.depth,
            # A correction is where both models begin anew.
            anticipate=len(nodes) > 1,
        )

    def _abandon(self, verification: Verification) -> Command:
        del self._verifications[verification.verify_id]
        verification.release()
        if verification.kept is None:
            self._held.pop(verification.target, None)
        else:
            self._held[verification.target] = verification.kept
        return AbandonVerify(verification.verify_id)

    def _preempt(self, candidates: Iterable[Verification]) -> Command:
        """Abandon the deepest verification; a warm-up only if there is nothing else."""
        return self._abandon(
            max(candidates, key=lambda v: (not v.warms_up, v.nodes[0].length, v.verify_id))
        )

    def _text(self, node: Node) -> tuple[int, ...]:
        """Return the whole text that ends with a node."""
        return self._commitment.prefix + tuple(
            passed.token_id for passed in self._tree.path_to(node)[1:]
        )
