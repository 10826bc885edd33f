"""Distributed speculative inference ("DSI"): drafting and several verifications overlap.

Timor et al. 2024 (arXiv 2405.14105), Algorithm 1, with lookahead and a fixed number of servers.

Design. The method keeps what it knows apart from what runs.

- It knows a token tree (`tree.py`): the drafted tokens, and facts about them. Each verdict is taken
  apart into facts.
- Drafts run, each of which grows the tree at its tip (`drafts_in_flight.py`), and verifications,
  each of which judges a part of the tree (`verification.py`) at a target (`target_schedule.py`).

An event changes only what is known or what runs. `_settle` then derives every command from the two,
in the same five steps, whatever the event was. So no interleaving of events has code of its own,
and neither has a server that is lost, late or new.

Difference: the algorithm starts a thread for each model and token. Here each drafter extends one
chain of a token tree, and equal tokens share a node. Where drafters disagree, the main path follows
the smallest drafter index (the algorithm's j*), and targets that would otherwise idle verify the
other branches.

Difference: a later verdict can come first, and show a correction before it can be committed. Such a
correction restarts the drafter at once.

The guesses of a target that drafts for itself may ride along (`DecodingTask.own_guesses`). After a
verdict, the next verification at that place judges the guesses, too, as rows beside its own.
Guesses are no part of the tree: no block waits for them or changes because of them, and a verdict
on them only adds facts. So guesses cost rows, but neither a target nor a place in a drafter's
chain.

The text itself may be a drafter (`max_gram.py`), which costs nothing and answers at once. It goes
on where the main path ends, a block at a time, for the frontier and for targets that would idle.
A model's draft comes first: then the tokens that the text proposed instead are a branch, and give
way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_protocol.branches import BranchQueue
from paceline_protocol.commitment import Commitment
from paceline_protocol.draft_statistics import DraftCounter, DraftStatistics
from paceline_protocol.drafts import ends_text, useful_guesses
from paceline_protocol.drafts_in_flight import DraftsInFlight
from paceline_protocol.messages import (
    BlockVerified,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    Event,
    Finish,
    FinishReason,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.target_schedule import TargetSchedule
from paceline_protocol.tree import TokenTree
from paceline_protocol.verification import due_nodes, frontier_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask
    from paceline_protocol.verification import Verification


class DistributedDecoding:
    """Decode with any number of drafters and targets at once.

    After each event, in this order: commit what is decided; withdraw what that made worthless;
    let idle drafters draft on; see that the frontier (what follows the last committed token) is
    being decided; give free targets the blocks that are due.

    Attributes:
        tree: What is drafted and known; for drawings, and not to be changed from outside.

    Invariants:
        All of invariants.py (tests/unit/protocol/test_invariants.py).

    Cost:
        O(drafted ahead + targets) for an event, and one copy of the text for a new command.
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._task = _with_lookahead_of(capacity, task)
        self._commitment = Commitment(task)
        counter = DraftCounter(self._commitment.statistics)
        self.tree = TokenTree(task.prompt[-1], length=len(task.prompt), counter=counter)
        self._capacity = capacity
        self._waiting = BranchQueue()  # what no verification judges
        self._schedule = TargetSchedule(
            self.tree, counter=counter, capacity=capacity, waiting=self._waiting
        )
        self._drafts = DraftsInFlight(
            self.tree, commitment=self._commitment, capacity=capacity, waiting=self._waiting
        )
        self._finished = False

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens."""
        return self._commitment.statistics

    def start(self) -> list[Command]:
        """Begin; see DecodingMethod."""
        commands: list[Command] = []
        if self._task.broadcast_prefill and self._commitment.finish_reason is None:
            prompt = (self.tree.root,)
            commands += [self._start_verify(prompt, warms_up=True) for _ in self._capacity.targets]
        return commands + self._settle()

    def handle(self, event: Event) -> list[Command]:
        """Take in an event; see DecodingMethod."""
        if self._finished:
            return []
        commands: list[Command] = []
        match event:
            case TokensDrafted() | DraftEnded() | DraftFailed() if event.draft_id in self._drafts:
                commands += self._drafts.take(event)
            case BlockVerified(verify_id=verify_id) if verify_id in self._schedule:
                self._take_verdict(self._schedule.answered(verify_id), event)
            case VerifyFailed(verify_id=verify_id) if verify_id in self._schedule:
                self._schedule.failed(verify_id)
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

    def _take_verdict(self, verification: Verification, verdict: BlockVerified) -> None:
        #     trunk[0] ── drafted … drafted ── guessed … guessed ── next_token
        #                 └───────── accepted_path ────────────┘
        #                 0 …                     logprobs …        len(accepted_path)
        path = verdict.accepted_path
        logprobs = verdict.logprobs or (None,) * (len(path) + 1)
        drafted = list(verification.along(path))
        node = verification.trunk[0]
        for accepted, logprob in zip(drafted, logprobs, strict=False):
            self._learn(verification, node, token_id=accepted.token_id, logprob=logprob)
            node = accepted
        # The target's own tokens are in the tree only where they are learnt:
        #
        #     node ── guessed … guessed ── next_token        reached: all of these, or fewer if a
        #     └──── reached[:len(own)] ──┘                   fact contradicts one, or ends the text
        own = (*verification.guessed_along(path), verdict.next_token)
        reached = [node]
        for token_id, logprob in zip(own, logprobs[len(drafted) :], strict=True):
            self._learn(verification, reached[-1], token_id=token_id, logprob=logprob)
            follows = reached[-1].decided_child() if reached[-1].alive else None
            if follows is None or follows.token_id != token_id:
                break
            reached.append(follows)
        if len(reached) > len(own):
            reached[-1].dispatch.guesses = useful_guesses(
                verdict.proposal, reached[-1], task=self._task, commitment=self._commitment
            )
        self._schedule.learnt(verification, reached[: len(own)][-1])

    def _learn(
        self, verification: Verification, node: Node, *, token_id: int, logprob: float | None
    ) -> None:
        # Under EXACT a verdict also tells what follows on the target's own guesses.
        is_exact = self._task.rule is VerificationRule.EXACT
        if (is_exact or verification.decides(node)) and not ends_text(node, self._commitment):
            self.tree.decide(node, token_id, logprob=logprob)

    def _take_capacity(self, capacity: CapacityChanged) -> list[Command]:
        self._capacity = capacity
        self._task = _with_lookahead_of(capacity, self._task)
        return self._drafts.change(capacity) + self._schedule.change(capacity)

    # --- what follows from it -----------------------------------------------------------------

    def _settle(self) -> list[Command]:
        commands = self._commit()
        if self._commitment.finish_reason is not None:
            return commands + self._finish(self._commitment.finish_reason)
        commands += self._drafts.stop_stale()
        commands += self._schedule.abandon_worthless()
        commands += self._drafts.draft_on(self._task)
        if not self._decides_frontier():
            commands += self._drafts.ask_text(self._task)
        if not self._drafts.awaits_text:
            commands += self._dispatch()
            if self._schedule.free_targets:
                commands += self._drafts.ask_text(self._task)
        return commands + self._schedule.promote()

    def _commit(self) -> list[Command]:
        passed = self.tree.advance()
        if not passed:
            return []
        logprobs = [token.logprob for token in passed if token.logprob is not None]
        return [
            self._commitment.commit(
                [token.token_id for token in passed],
                accepted=[token.was_drafted for token in passed],
                logprobs=logprobs,
            )
        ]

    def _dispatch(self) -> list[Command]:
        if not self._capacity.targets:
            return []
        commands: list[Command] = []
        path = self.tree.main_path()
        if not self._decides_frontier():
            if not self._schedule.free_targets:
                commands.append(self._schedule.make_room())
            growing = self._drafts.grows_at(path[-1])
            nodes = frontier_nodes(path, task=self._task, growing=growing)
            commands.append(self._start_verify(nodes))
        path = path[: self._drafts.drafted_length(path)]
        growing = self._drafts.grows_at(path[-1])
        while nodes := due_nodes(path, task=self._task, growing=growing):
            if not self._schedule.free_targets:
                room = self._schedule.make_room_beside(path)
                if not room:
                    return commands
                commands += room
            commands.append(self._start_verify(nodes))
        return commands + self._dispatch_chains(path) + self._dispatch_branches()

    def _dispatch_chains(self, main_path: Sequence[Node]) -> list[Command]:
        commands: list[Command] = []
        for _, tip in sorted(self._drafts.tips.items()):
            if not self._schedule.free_targets:
                break
            if not tip.alive or tip.length <= main_path[0].length:
                continue
            path = self.tree.path_to(tip)
            # main_path   root ── a ── b ── c
            # path        root ── a ── x ── y ── tip
            #             └ shared ┘   └── beside ──┘
            # The token x is assumed, not judged: the main path's verifications decide on it.
            shared_count = sum(a is b for a, b in zip(path, main_path, strict=False))
            beside, growing = path[shared_count:], self._drafts.grows_at(tip)
            if not beside:
                continue
            assumed = beside[0].dispatch
            is_judged = assumed.assigned
            while self._schedule.free_targets and (
                nodes := due_nodes(beside, task=self._task, growing=growing)
            ):
                commands.append(self._start_verify(nodes))
            # If the main path takes this token over, one of its verifications has to judge it.
            assumed.assigned = is_judged
        return commands

    def _dispatch_branches(self) -> list[Command]:
        """Give targets that would idle the likeliest branches that no verification decides."""
        commands: list[Command] = []
        while self._schedule.free_targets and (best := self._waiting.pop()) is not None:
            # parent ──┬── best        Siblings are judged in one call, after their parent. If the
            #          └── sibling     parent is on a drafter's chain, its own block decides among
            #                          them: then the call assumes best, and asks what follows it.
            parent = best.parent
            assumed = parent if parent is not None and parent.draft.is_branch else best
            commands.append(self._start_verify((assumed,)))
        self._waiting.forget_what_is_over()
        return commands

    def _finish(self, reason: FinishReason) -> list[Command]:
        self._finished = True
        commands = self._drafts.stop_all() + self._schedule.abandon_all()
        self.tree.discard()
        return [*commands, Finish(reason)]

    def _decides_frontier(self) -> bool:
        return self._schedule.decide(self.tree.root)

    def _start_verify(self, trunk: Sequence[Node], *, warms_up: bool = False) -> Command:
        prefix = self._commitment.prefix + self.tree.token_ids_to(trunk[0])
        return self._schedule.start(trunk, prefix=prefix, task=self._task, warms_up=warms_up)


def _with_lookahead_of(capacity: CapacityChanged, task: DecodingTask) -> DecodingTask:
    return task if capacity.lookahead is None else replace(task, lookahead=capacity.lookahead)
