"""Speculative inference ("SI"): draft lookahead tokens, verify them in one forward, repeat.

Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Each verification
yields one token more than it accepts: the correction, or after a block accepted whole the next
one. No target forward is spent on anything else: the prompt's prefill is part of the first.

Design. What was drafted is a token tree (`tree.py`), and the block is the beginning of its main
path. What runs is at most one draft, which adds to the tree (`drafts_in_flight.py`), and one
verification, of the block (`target_schedule.py`). Events change the tree and end the two;
`_proceed` then begins what is due, which follows from the three alone. Whatever goes wrong with
drafting makes the block shorter, down to none, which is plain decoding; whatever goes wrong with
verifying leaves it as it is.

With a width of 2 or more the drafter finds branches beside the main path, and the verification
judges as many as a tree may have, the likeliest first.

Difference: if the task says so, the drafter drafts ahead while the target verifies a block: behind
it, in case all of it is accepted and the target then says what the drafter would have said; and
with branches behind the likeliest corrections. If the verdict's outcome is among those, the next
block is there, or begun. Otherwise the drafter begins anew, as in the papers after every verdict.
The idea is that of speculative speculative decoding (arXiv 2603.03251), which keeps drafted
outcomes in a cache; here they are the tree.

Where targets draft for themselves, their guesses may ride along as in DSI
(`DecodingTask.own_guesses`): the next verification judges them beside its block. Where they lead
the text beyond a block that was drafted ahead, the next one still ends where it would end without
them. Otherwise it would have to wait for more of the draft, and its tokens would come later.

While a block is drafted its target waits, and without drafting ahead the drafter waits while it is
verified: then one device would do for both. So `Invariant.BUSY_FRONTIER` does not hold, and with a
bad drafter SI is slower than plain decoding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_protocol.commitment import Commitment
from paceline_protocol.draft_statistics import DraftCounter, DraftStatistics
from paceline_protocol.drafts import can_grow, ends_text, useful_guesses
from paceline_protocol.drafts_in_flight import DraftsInFlight
from paceline_protocol.messages import (
    BlockVerified,
    CapacityChanged,
    Command,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    LookaheadChanged,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.target_schedule import TargetSchedule
from paceline_protocol.task import SPECULATION_LIMIT
from paceline_protocol.tree import TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.node import Node
    from paceline_protocol.task import DecodingTask
    from paceline_protocol.verification import Verification


class SpeculativeDecoding:
    """Decode with one drafter and one target.

    A round has min(lookahead, tokens still useful) tokens drafted and verified. If the drafter
    fails, is lost or there is none, what there is gets verified: at worst an empty block, which is
    plain decoding. A failed verification is repeated with the same block.

    Invariants:
        With width 1 no token comes later for drafting ahead, given a drafter of its own
        (tests/unit/protocol/test_drafting_ahead.py); nor for targets' own guesses, given free rows
        (tests/unit/protocol/test_riding_guesses.py).
    """

    def __init__(self, task: DecodingTask, capacity: CapacityChanged) -> None:
        self._task = task
        self._commitment = Commitment(task)
        self._capacity = capacity
        self._target: int | None = None
        self._trunk: tuple[Node, ...] = ()  # what is verified, or to be verified again
        counter = DraftCounter(self._commitment.statistics)
        self._drafted = TokenTree(task.prompt[-1], length=len(task.prompt), counter=counter)
        self._drafts = DraftsInFlight(self._drafted, commitment=self._commitment, capacity=capacity)
        self._schedule = TargetSchedule(self._drafted, counter=counter, capacity=capacity)
        # Where the block would begin without the target's guesses.
        self._block_start = self._drafted.root.length
        self._drafter_lost = False  # since something was committed
        self._finished = False

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens."""
        return self._commitment.statistics

    def start(self) -> list[Command]:
        """Begin; see DecodingMethod."""
        return self._proceed()

    def handle(self, event: Event) -> list[Command]:
        """Take in an event; see DecodingMethod."""
        if self._finished:
            return []
        commands: list[Command] = []
        match event:
            case TokensDrafted() | DraftEnded() | DraftFailed() if event.draft_id in self._drafts:
                commands += self._drafts.take(event)
            case BlockVerified(verify_id=verify_id) if verify_id in self._schedule:
                commands.append(self._take_verdict(self._schedule.answered(verify_id), event))
            case VerifyFailed(verify_id=verify_id) if verify_id in self._schedule:
                self._schedule.failed(verify_id)
            case CapacityChanged():
                commands += self._take_capacity(event)
            case LookaheadChanged(lookahead=lookahead):
                self._task = replace(self._task, lookahead=lookahead)
            case _:
                return []
        return commands + self._proceed()

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        return [] if self._finished else self._finish(FinishReason.STOPPED)

    def _proceed(self) -> list[Command]:
        if self._commitment.finish_reason is not None:
            return self._finish(self._commitment.finish_reason)
        commands = self._drafts.stop_stale()
        if not self._schedule and not self._trunk:
            self._trunk = self._next_trunk()
        if not self._schedule and self._trunk and self._capacity.targets:
            commands.append(self._start_verify(self._trunk))
        if not self._drafts:
            commands += self._draft_on()
        return commands

    def _finish(self, reason: FinishReason) -> list[Command]:
        self._finished = True
        commands = self._drafts.stop_all() + self._schedule.abandon_all()
        self._drafted.discard()
        return [*commands, Finish(reason)]

    def _next_trunk(self) -> tuple[Node, ...]:
        """Return the last final token and the block, if that has all it can get; else nothing."""
        path = self._drafted.main_path()
        block = tuple(path[: self._wanted + 1])
        can_be_longer = len(block) <= self._wanted and not ends_text(block[-1], self._commitment)
        return () if can_be_longer and self._can_draft else block

    def _draft_on(self) -> list[Command]:
        """Draft what the block lacks; during a verification, what may follow its verdict."""
        tip = self._drafted.main_path()[-1]
        if not self._can_draft or not can_grow(tip, self._commitment):
            return []
        wanted = 0 if self._trunk else self._wanted
        if self._drafts_ahead:
            wanted = max(wanted, SPECULATION_LIMIT)
        missing = wanted - (tip.length - self._drafted.root.length)
        useful = self._commitment.limit - 1 - tip.length
        window = min(missing, useful, self._task.window)
        if window <= 0:
            return []
        return [
            self._drafts.start(
                self._capacity.drafters[0],
                tip,
                window=window,
                task=self._task,
                # Else the target waits for the last one.
                chunk_tokens=1 if self._drafts_ahead else window,
            )
        ]

    @property
    def _can_draft(self) -> bool:
        rests = self._drafter_lost or self._drafts.came_to_nothing
        return bool(self._capacity.drafters) and not rests

    @property
    def _drafts_ahead(self) -> bool:
        """Whether the drafter goes on while the target verifies; the text needs no time for it."""
        is_text = self._capacity.drafters[:1] == (self._capacity.text,)
        return self._task.drafts_ahead and not is_text

    @property
    def _wanted(self) -> int:
        end = min(self._block_start + self._task.lookahead, self._commitment.limit - 1)
        return end - self._drafted.root.length

    def _start_verify(self, trunk: Sequence[Node]) -> Command:
        if self._target not in self._capacity.targets:
            self._target = self._capacity.targets[0]
        return self._schedule.start(
            trunk,
            prefix=self._commitment.prefix,
            task=self._task,
            target=self._target,
            anticipates=False,  # the next verification asks for what the drafter says there
        )

    def _take_verdict(self, verification: Verification, verdict: BlockVerified) -> EmitTokens:
        tip, path = self._drafted.main_path()[-1], verdict.accepted_path
        node = verification.trunk[0]
        accepted = (each.token_id for each in verification.along(path))
        for token_id in (*accepted, *verification.guessed_along(path), verdict.next_token):
            self._drafted.decide(node, token_id)
            node = node.children[token_id]
        node.dispatch.guesses = useful_guesses(
            verdict.proposal, node, task=self._task, commitment=self._commitment
        )
        self._schedule.learnt(verification, node)
        self._trunk = ()
        self._drafter_lost = False
        passed = self._drafted.advance()
        self._block_start = self._next_block_start(tip, after=verification.trunk[-1].length)
        return self._commitment.commit(
            [token.token_id for token in passed],
            accepted=[token.was_drafted for token in passed],
            logprobs=verdict.logprobs,
        )

    def _next_block_start(self, tip: Node, *, after: int) -> int:
        """Return where the next block begins, if there were no guesses of the target's own.

        Args:
            tip: Where the draft was when the verdict came. If that is contradicted, or the drafter
                rests meanwhile, the block begins anew after the text.
            after: Where the verified block ended.
        """
        length = self._drafted.root.length
        if not (self._drafts_ahead and tip.alive):
            return length
        # Without guesses a block accepted whole is followed by one token of the target's own:
        #
        #     … after │ own │ lookahead tokens │ own │ lookahead tokens │ own │ …
        #             └──┬──┘                  └──┬──┘                  └──┬──┘
        #           first_start         first_start + stride     first_start + 2 strides
        #
        # Guesses may have led the root beyond a start. Then the block that begins there is under
        # way, and what is left of it is the next one.
        first_start = after + 1
        stride = self._task.lookahead + 1
        return length - (length - first_start) % stride

    def _take_capacity(self, capacity: CapacityChanged) -> list[Command]:
        self._capacity = capacity
        stopped = self._drafts.change(capacity)
        self._drafter_lost |= bool(stopped)
        return stopped + self._schedule.change(capacity)
