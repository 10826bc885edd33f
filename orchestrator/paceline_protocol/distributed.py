"""Distributed speculative inference ("DSI"): drafting and several verifications overlap.

Timor et al. 2024 (arXiv 2405.14105), Algorithm 1, with lookahead and a fixed number of servers.

Design. What is known is a token tree (`tree.py`): what was drafted, and facts about it, which
verdicts are taken apart into. What runs are drafts, each growing the tree at its tip, and
verifications, each of a part of it (`verification.py`) at some target (`verifications.py`). An
event only changes what is known or what runs; `_settle` then derives every command from those two,
in the same five steps, whatever the event was. So there is no case for each interleaving, and
servers that are lost, late or new are no special case either.

Difference: the algorithm starts a thread for each model and token, here each drafter extends one
chain of a token tree. Equal tokens share a node; where drafters disagree the main path follows the
smallest drafter index (the algorithm's j*), and the branches off it are verified by targets that
would otherwise idle.

Difference: a correction that is known before it can be committed, because a later verdict came
first, restarts the drafter at once.

Where targets draft for themselves, their guesses may ride along (`DecodingTask.own_guesses`): after
a verdict the next verification at that place judges them, too, as rows beside its own. They are no
part of the tree, so no block waits for them or differs because of them; a verdict on them is
only more facts. So they take rows, and neither a target nor a place in a drafter's chain.

The text itself may be a drafter (`max_gram.py`), which costs nothing and answers at once. It goes
on where the main path ends, a block at a time, for the frontier and for targets that would idle.
What a model drafts comes first: what the text said beyond it is a branch, and gives way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_protocol.commitment import Commitment, DraftStatistics
from paceline_protocol.drafts import Draft, can_grow, ends_text, useful_guesses
from paceline_protocol.messages import (
    BlockVerified,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    Event,
    Finish,
    FinishReason,
    StartDraft,
    StopDraft,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.task import SPECULATION_LIMIT, VerificationRule
from paceline_protocol.tree import Node, TokenTree
from paceline_protocol.verification import due_nodes, frontier_nodes
from paceline_protocol.verifications import Verifications

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.task import DecodingTask
    from paceline_protocol.verification import Verification

__all__ = ["DistributedDecoding"]


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
        self._task = _with_lookahead_of(capacity, task)
        self._commitment = Commitment(task)
        self._tree = TokenTree(
            task.prompt[-1], length=len(task.prompt), statistics=self._commitment.statistics
        )
        self._capacity = capacity
        self._drafts: dict[int, Draft] = {}
        self._verifications = Verifications(
            self._tree, statistics=self._commitment.statistics, capacity=capacity
        )
        self._draft_count = 0
        self._tips: dict[int, Node] = {}  # by drafter: the last token it found
        self._warm: set[int] = set()  # drafters that have found a token
        self._resting: dict[int, int] = {}  # by drafter that failed: what was committed then
        self._text_ends: Node | None = None  # where the text says nothing
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
                self._take_verdict(self._verifications.answered(verify_id), event)
            case VerifyFailed(verify_id=verify_id) if verify_id in self._verifications:
                self._verifications.failed(verify_id)
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

    def _take_draft(self, draft: Draft, event: TokensDrafted) -> list[Command]:
        self._warm.add(draft.drafter)
        branches = draft.graft(event.proposal, tree=self._tree, commitment=self._commitment)
        self._verifications.waiting.extend(branches)
        self._tips[draft.drafter] = draft.tip
        if draft.missing == 0:
            del self._drafts[draft.draft_id]
        elif not can_grow(draft.tip, self._commitment):
            return [self._stop_draft(draft)]
        return []

    def _take_verdict(self, verification: Verification, verdict: BlockVerified) -> None:
        node = end = verification.trunk[0]
        path = verdict.accepted_path
        logprobs = [*(verdict.logprobs or (None,) * (len(path) + 1))]
        for accepted in verification.along(path):
            self._learn(verification, node, accepted.token_id, logprobs.pop(0))
            node = end = accepted
        for token_id, logprob in zip(
            (*verification.guessed_along(path), verdict.next_token), logprobs, strict=True
        ):
            self._learn(verification, node, token_id, logprob)
            end = node
            if not node.alive or node.next_token != token_id:
                break  # the text is contradicted, or has ended
            node = node.children[token_id]
        else:
            node.guessed = useful_guesses(
                verdict.proposal, node, task=self._task, commitment=self._commitment
            )
        self._verifications.learnt(verification, end)

    def _learn(
        self, verification: Verification, node: Node, token_id: int, logprob: float | None
    ) -> None:
        # Under EXACT a verdict also tells what follows on the target's own guesses.
        is_exact = self._task.rule is VerificationRule.EXACT
        if (is_exact or verification.decides(node)) and not ends_text(node, self._commitment):
            self._tree.decide(node, token_id, logprob)

    def _take_capacity(self, capacity: CapacityChanged) -> list[Command]:
        self._capacity = capacity
        lost_drafts = [d for d in self._drafts.values() if d.drafter not in capacity.drafters]
        self._task = _with_lookahead_of(capacity, self._task)
        self._warm.intersection_update(capacity.drafters)
        commands = [self._stop_draft(draft) for draft in lost_drafts]
        return commands + self._verifications.change(capacity)

    def _rest(self, draft_id: int) -> None:
        # Until something is committed, so that a broken drafter is not asked in a busy loop; the
        # text is asked again for another end.
        draft = self._drafts[draft_id]
        if draft.drafter == self._capacity.text:
            self._text_ends = draft.tip
        else:
            self._resting[draft.drafter] = len(self._commitment.prefix)

    # --- what follows from it -----------------------------------------------------------------

    def _settle(self) -> list[Command]:
        commands = self._commit()
        if self._commitment.finish_reason is not None:
            return commands + self._finish(self._commitment.finish_reason)
        commands += self._prune()
        commands += self._draft_on()
        if not self._decides_frontier():
            commands += self._ask_text()
        if not any(draft.drafter == self._capacity.text for draft in self._drafts.values()):
            commands += self._dispatch()
            if self._verifications.free_targets:
                commands += self._ask_text()
        return commands + self._verifications.promote()

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
        commands = [self._stop_draft(draft) for draft in stale]
        return commands + self._verifications.abandon_worthless()

    def _draft_on(self) -> list[Command]:
        commands: list[Command] = []
        committed = len(self._commitment.prefix)
        busy = {draft.drafter for draft in self._drafts.values()}
        for drafter in self._capacity.drafters:
            if drafter in busy or self._resting.get(drafter) == committed:
                continue
            if drafter == self._capacity.text:
                continue
            tip = self._tree.surviving(self._tips.get(drafter, self._tree.root))
            tip = self._tips[drafter] = self._tree.end_of_chain(tip, drafter=drafter)
            useful = self._commitment.limit - 1 - tip.length
            window = min(self._task.window, useful)
            is_near = tip.length + window <= committed + SPECULATION_LIMIT
            if is_near and can_grow(tip, self._commitment):
                commands.append(self._start_draft(drafter, tip, window))
        return commands

    def _ask_text(self) -> list[Command]:
        """Let the text draft after the main path's end, unless its last draft still waits there."""
        text = self._capacity.text
        if text is None or not self._capacity.targets:
            return []
        tip = self._tree.main_path()[-1]
        window = min(self._task.lookahead, self._commitment.limit - 1 - tip.length)
        waits = tip.drafter == text and not tip.assigned
        ends = tip is self._text_ends or not can_grow(tip, self._commitment)
        is_far = tip.length + window > len(self._commitment.prefix) + SPECULATION_LIMIT
        asked = any(draft.drafter == text for draft in self._drafts.values())
        if waits or ends or is_far or asked:
            return []
        return [self._start_draft(text, tip, min(window, self._task.draft_window))]

    def _dispatch(self) -> list[Command]:
        if not self._capacity.targets:
            return []
        commands: list[Command] = []
        path = self._tree.main_path()
        if not self._decides_frontier():
            if not self._verifications.free_targets:
                commands.append(self._verifications.make_room())
            growing = self._is_growing(path[-1])
            nodes = frontier_nodes(path, task=self._task, growing=growing)
            commands.append(self._start_verify(nodes))
        path = path[: self._drafted_length(path)]
        growing = self._is_growing(path[-1])
        while nodes := due_nodes(path, task=self._task, growing=growing):
            if not self._verifications.free_targets:
                room = self._verifications.make_room_beside(path)
                if not room:
                    return commands
                commands += room
            commands.append(self._start_verify(nodes))
        return commands + self._dispatch_chains(path) + self._dispatch_branches()

    def _dispatch_chains(self, main_path: Sequence[Node]) -> list[Command]:
        commands: list[Command] = []
        for _, tip in sorted(self._tips.items()):
            if not self._verifications.free_targets:
                break
            if not tip.alive or tip.length <= main_path[0].length:
                continue
            path = self._tree.path_to(tip)
            shared = sum(a is b for a, b in zip(path, main_path, strict=False))
            # The token that branches off is assumed: to decide for or against it is the main
            # path's business.
            branch, growing = path[shared:], self._is_growing(tip)
            while self._verifications.free_targets and (
                nodes := due_nodes(branch, task=self._task, growing=growing)
            ):
                commands.append(self._start_verify(nodes))
        return commands

    def _dispatch_branches(self) -> list[Command]:
        """Give targets that would idle the likeliest branches that no verification decides."""
        commands: list[Command] = []
        waiting = self._verifications.waiting
        while self._verifications.free_targets and (best := waiting.pop()) is not None:
            # Siblings go together, but what a chain's token decides is its own block's business.
            assumed = best if best.parent is None or not best.parent.is_branch else best.parent
            commands.append(self._start_verify((assumed,)))
        waiting.forget_what_is_over()
        return commands

    def _finish(self, reason: FinishReason) -> list[Command]:
        self._finished = True
        commands: list[Command] = [self._stop_draft(d) for d in list(self._drafts.values())]
        commands += self._verifications.abandon_all()
        self._tree.discard()
        return [*commands, Finish(reason)]

    # --- questions ----------------------------------------------------------------------------

    def _decides_frontier(self) -> bool:
        return self._verifications.decide(self._tree.root)

    def _drafted_length(self, path: Sequence[Node]) -> int:
        """Return how much of a path is drafted: not what the text said beyond a model at work."""
        tips = {draft.tip for draft in self._drafts.values()}
        if self._capacity.text is not None:
            for length in range(len(path), 0, -1):
                if path[length - 1] in tips:
                    return length
                if path[length - 1].drafter != self._capacity.text:
                    break
        return len(path)

    def _is_growing(self, tip: Node) -> bool:
        return any(draft.tip is tip for draft in self._drafts.values())

    # --- commands -----------------------------------------------------------------------------

    def _start_draft(self, drafter: int, tip: Node, window: int) -> Command:
        self._draft_count += 1
        self._drafts[self._draft_count] = Draft(
            self._draft_count, drafter, tip, missing=window, cold=drafter not in self._warm
        )
        if drafter == self._capacity.text:  # it says one thing, if any
            return StartDraft(self._draft_count, drafter, self._text(tip), max_tokens=window)
        return StartDraft(
            self._draft_count,
            drafter,
            self._text(tip),
            max_tokens=window,
            width=self._task.width,
            branch_count=self._task.branches,
        )

    def _stop_draft(self, draft: Draft) -> Command:
        del self._drafts[draft.draft_id]
        return StopDraft(draft.draft_id)

    def _start_verify(self, trunk: Sequence[Node], *, warms_up: bool = False) -> Command:
        return self._verifications.start(
            trunk, prefix=self._text(trunk[0]), task=self._task, warms_up=warms_up
        )

    def _text(self, node: Node) -> tuple[int, ...]:
        """Return the whole text that ends with a node."""
        return self._commitment.prefix + tuple(
            passed.token_id for passed in self._tree.path_to(node)[1:]
        )


def _with_lookahead_of(capacity: CapacityChanged, task: DecodingTask) -> DecodingTask:
    return task if capacity.lookahead is None else replace(task, lookahead=capacity.lookahead)
