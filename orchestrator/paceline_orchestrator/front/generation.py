"""One generation: from a request that makes sense to the last message of its stream."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError
from paceline_contract.calls import VerificationRule
from paceline_contract.limits import MOST_PROMPT_CHUNK_TOKENS
from paceline_orchestrator.decoding.assigned_servers import AssignedServers
from paceline_orchestrator.decoding.candidates import Candidates
from paceline_orchestrator.decoding.driver import Driver
from paceline_orchestrator.decoding.prompt_scoring import PromptScoring, ScoredTokens
from paceline_orchestrator.decoding.recorder import Recorder
from paceline_orchestrator.decoding.request_servers import RequestServers
from paceline_orchestrator.decoding.rpcs import one_hot
from paceline_orchestrator.decoding.statistics import Fallback
from paceline_orchestrator.decoding.text_drafter import TextDrafter
from paceline_orchestrator.front.text import FinalToken
from paceline_orchestrator.front.translation import (
    chunk_message,
    finished_message,
    prompt_message,
    started_message,
    timeline_message,
)
from paceline_protocol.messages import FinishReason
from paceline_protocol.methods import create_method

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paceline_contract.calls import LikeliestTokens
    from paceline_contract.max_gram import MaxGramRules
    from paceline_orchestrator.decoding.metrics import RequestMetrics
    from paceline_orchestrator.decoding.session_opener import SessionOpener
    from paceline_orchestrator.decoding.statistics import (
        Statistics,
        TextStatistics,
        TimelineEvent,
    )
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.front.order import Order
    from paceline_orchestrator.front.translation import ClientMessage
    from paceline_orchestrator.planning.planner import Plan
    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.messages import CapacityChanged, EmitTokens
    from paceline_protocol.methods import DecodingMethod, Strategy

# Messages about the prompt that may wait for the stream's reader: they are large.
_MOST_UNREAD = 8


class Generation:
    """Decodes one order; `messages` is the stream that the client gets.

    Tokens wait in an outbox for a client that reads slowly. The outbox holds at most the order's
    max_tokens, and the servers are free as soon as the last token is decoded. The prompt's log
    probabilities are not computed faster than they are read. `close` it in the end, whatever
    happened.

    Args:
        order: What to decode.
        pool: The model servers.
        opener: Opens and closes its sessions.
        metrics: Where it is counted.
        text_rules: What texts propose by.
        charge: Told how many tokens to count against the caller's limits: the prefix first, then
            the text's tokens as they become final. The sum is the usage that the stream reports.

    Raises:
        InvalidFieldError: The resumed tokens are past a stop string.
    """

    def __init__(
        self,
        order: Order,
        *,
        pool: ServerPool,
        opener: SessionOpener,
        metrics: RequestMetrics,
        text_rules: MaxGramRules,
        charge: Callable[[int], None] | None = None,
    ) -> None:
        self._outbox: asyncio.Queue[ClientMessage | Exception | None] = asyncio.Queue()
        self._was_read = asyncio.Event()
        self._charge = charge or (lambda _: None)
        self._text = order.text
        if self._text.token_count < len(order.resumed):
            raise InvalidFieldError.of("resume_token_ids", "must not go on after a stop string")
        if self._text.stop_string or order.was_resumed_to_eos:
            order = replace(order, max_tokens=len(order.resumed))
        self._order = order
        self._wanted = order.plan  # of the running method, or of the one that is to follow it
        self._judged_guesses: DraftStatistics | None = None  # before it left them
        self._plans = [order.plan]  # of every method so far; the running one's is last
        self._position = len(order.prefix)
        self._reconsider: Callable[[], None] = lambda: None
        self._recorder = Recorder(
            arrived_ns=order.arrived_ns,
            waited_ns=order.waited_ns,
            prompt_length=len(order.prefix),
            metrics=metrics,
            keep_timeline=order.options.include_timeline,
            show=self._show if order.options.stream_timeline else None,
        )
        pool.orders.begin(order.plan.note)
        candidates = Candidates(
            pool,
            order.model,
            rule=order.options.wish.rule,
            self_drafting=order.plan.method.self_drafts or order.plan.own_guesses,
            text=pool.familiarity.text(order.prefix, share=f"{order.share} {order.model.lora}"),
            suits=lambda it, role: order.suits(it, role=role, length=self._position),
            share=order.share,
            request_key=order.request_key,
        )
        assigned = AssignedServers(
            candidates,
            pool=pool,
            make_spec=lambda it: order.session_spec(it, length=self._position),
            needs=order.server_needs,
            opener=opener,
            deadline=order.deadline,
            note_fallback=self._recorder.fallback,
        )
        self._servers = RequestServers(assigned, pool=pool, text=_text_drafter(order, text_rules))
        self._driver = Driver(
            self._create_method,
            servers=self._servers,
            pool=pool,
            recorder=self._recorder,
            deadline=order.deadline,
            prompt_length=len(order.prefix),
            logprobs=order.options.logprobs,
            top_logprobs=order.options.top_logprobs,
            deliver=self._deliver,
            conclude=self._conclude,
            scoring=self._prompt_scoring(pool),
            reconsider=lambda: self._reconsider(),
        )

    async def run(self) -> None:
        """Decode to the end. Never fails: a failure goes into the stream, after the tokens."""
        self._charge(len(self._order.prefix))
        try:
            self._send(
                started_message(self._order, target_count=self._servers.assigned.target_count)
            )
            if self._order.options.include_prompt and not self._order.scores_prompt:
                await self._tell_prompt()
            await self._driver.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream's reader gets it
            self.fail(error)
        finally:
            self._outbox.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what was decoded so far."""
        self._outbox.put_nowait(error)

    async def messages(self) -> AsyncIterator[ClientMessage]:
        """Yield the stream's messages.

        Raises:
            Exception: What `run` failed with.
        """
        while (item := await self._outbox.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            self._was_read.set()

    def close(self) -> None:
        """Free what `run` did not come to free."""
        self._servers.close()

    @property
    def targets_used(self) -> int:
        """The most targets that verified at the same time."""
        return self._recorder.targets_used

    @property
    def speed_up(self) -> float | None:
        """How many times as fast it was as plain decoding is expected to be, prefill apart."""
        token_ns, plain_ns = self._recorder.token_ns, self._order.plan.plain_token_ns
        return plain_ns / token_ns if token_ns and plain_ns else None

    @property
    def order(self) -> Order:
        """The order as it was at the beginning."""
        return self._order

    @property
    def length(self) -> int:
        """How long its text is by now, prompt included."""
        return self._position

    @property
    def drafts(self) -> bool:
        """Whether its method, or the one that is to follow, has work for a drafter."""
        return self._wanted.method.drafts

    @property
    def has_outgrown_drafters(self) -> bool:
        """Whether its text is too long for the drafters that it had, and it has no other."""
        return self._servers.assigned.has_outgrown_drafters

    @property
    def verdicts(self) -> DraftStatistics:
        """What became of its draft tokens so far."""
        return self._driver.statistics

    @property
    def text_verdicts(self) -> TextStatistics:
        """What became of the tokens that the text itself drafted."""
        return self._driver.text_statistics

    @property
    def verifier_limit(self) -> int:
        """How many targets it could use now, if there were enough."""
        return self._wanted.target_limit

    @property
    def teaches(self) -> Plan:
        """The plan under which its draft tokens are learnt: the narrowest of those that drafted."""
        drafting = [it for it in self._plans if it.method.drafts]
        return min(drafting, key=lambda it: it.shape.width, default=self._order.plan)

    @property
    def strategy(self) -> Strategy:
        """The strategy with which it began."""
        return self._order.plan.strategy

    def statistics(self) -> Statistics:
        """Return what it took so far."""
        took = self._recorder.statistics(self._driver.statistics)
        return replace(took, text=self._driver.text_statistics)

    def when_judged(self, reconsider: Callable[[], None]) -> None:
        """Have it called whenever tokens are final, before the calls that follow are made."""
        self._reconsider = reconsider

    def pace(self, plan: Plan) -> None:
        """Have SI's blocks be as long as a newer plan for SI says, and nothing else of it.

        Where drafts are more often right, what is drafted stays; where they are wrong, no more is
        drafted than is of use.
        """
        running = self._plans[-1]
        is_settled = self._wanted is running
        if not is_settled or plan.strategy is not running.strategy or running.method.overlaps:
            return
        wanted = replace(running, lookahead=plan.lookahead)
        if plan.lookahead > running.lookahead:
            self._wanted = self._plans[-1] = wanted
            self._driver.lengthen(plan.lookahead)
        elif plan.lookahead < running.lookahead:
            self._change(replace(self._order, plan=wanted))

    def follow(self, plan: Plan) -> bool:
        """Go on as a newer plan says, from the next tokens on, if that is another method.

        If it is the running one, a change that was to come is taken back.

        Returns:
            Whether the method is to change, and there is still something to decode.
        """
        order = replace(self._order, plan=plan)
        if plan.strategy is self._wanted.strategy or not order.follows_load:
            return False
        running = self._plans[-1]
        if plan.strategy is running.strategy:
            return self._stay(running)
        return self._change(order)

    def leave_guesses(self, plan: Plan) -> None:
        """Go on without the target's own guesses, which do not pay, from the next tokens on."""
        judged = replace(self.verdicts)
        if self.follow(plan):
            self._judged_guesses = judged

    @property
    def has_left_guesses(self) -> bool:
        """Whether it goes on without its target's own guesses."""
        return self._judged_guesses is not None

    @property
    def lesson(self) -> DraftStatistics:
        """What became of the draft tokens that are learnt from, under the plan `teaches`."""
        return self.verdicts if self._judged_guesses is None else self._judged_guesses

    def _stay(self, running: Plan) -> bool:
        """Keep the running method, and release the servers that only the wanted one needed."""
        if not self._driver.stay(replace(self._order, plan=running).server_needs):
            return False
        self._wanted = running
        return True

    def _change(self, order: Order) -> bool:
        """Go on by another method, from the next tokens on."""
        plan = order.plan

        def create(emitted: tuple[int, ...], capacity: CapacityChanged) -> DecodingMethod:
            if plan.strategy is not self._plans[-1].strategy:
                self._recorder.fallback(Fallback.LOAD_CHANGED)
            self._plans.append(plan)
            rest = replace(order, resumed=order.resumed + emitted)
            return create_method(plan.strategy, rest.task(is_alone=False), capacity=capacity)

        if not self._driver.change(create, order.server_needs):
            return False
        self._wanted = plan
        return True

    def _create_method(self, capacity: CapacityChanged) -> DecodingMethod:
        order = self._order
        task = order.task(is_alone=self._servers.assigned.is_idle)
        return create_method(order.plan.strategy, task, capacity=capacity)

    def _prompt_scoring(self, pool: ServerPool) -> PromptScoring | None:
        order = self._order
        if order.options.prompt_logprobs is None:
            return None
        return PromptScoring(
            order.prompt,
            top_logprobs=order.options.prompt_logprobs,
            vocabulary_size=order.model.vocabulary_size,
            deliver=self._deliver_scored,
            suspect=pool.suspect,
        )

    async def _tell_prompt(self) -> None:
        """Send the prompt's tokens alone."""
        prompt = self._order.prompt
        await self._deliver_scored(ScoredTokens(0, prompt[:1]))
        for start in range(1, len(prompt), MOST_PROMPT_CHUNK_TOKENS):
            token_ids = prompt[start : start + MOST_PROMPT_CHUNK_TOKENS]
            await self._deliver_scored(ScoredTokens(start, token_ids))

    async def _deliver_scored(self, scored: ScoredTokens) -> None:
        """Send how likely tokens of the prompt are; a reader that is slow is waited for."""
        while self._outbox.qsize() >= _MOST_UNREAD:
            self._was_read.clear()
            await self._was_read.wait()
        self._send(prompt_message(scored, bytes_of=self._order.bytes_of))

    def _deliver(self, emission: EmitTokens, likeliest: tuple[LikeliestTokens, ...]) -> bool:
        """Take final tokens in, send those that can be sent, and tell whether the text ends."""
        before = self._text.token_count
        logprobs = emission.logprobs or (None,) * len(emission.token_ids)
        told = likeliest or ((),) * len(emission.token_ids)
        origin = None
        for token in map(FinalToken, emission.token_ids, emission.accepted, logprobs, told):
            if token.accepted is not origin:
                # A client cannot divide a chunk's text by token, so each chunk has one origin.
                self._send_text()
                origin = token.accepted
            if token.token_id in self._order.eos_ids:
                self._text.push_without_text(token)
            elif self._text.push(token):
                break
        self._charge(self._text.token_count - before)
        self._send_text()
        return bool(self._text.stop_string)

    def _conclude(self, reason: FinishReason) -> None:
        """Send what was held back, and the end: its reader need not wait for what `run` clears."""
        self._text.flush()
        self._send_text()
        self._send(self._finished(reason))
        self._outbox.put_nowait(None)

    def _send_text(self) -> None:
        piece = self._text.take()
        if piece is None:
            return
        bytes_of = self._order.bytes_of
        self._send(chunk_message(piece, position=self._position, bytes_of=bytes_of))
        self._position += len(piece.tokens)

    def _send(self, message: ClientMessage) -> None:
        self._outbox.put_nowait(message)

    def _show(self, event: TimelineEvent) -> None:
        self._send(timeline_message(event))

    def _finished(self, reason: FinishReason) -> ClientMessage:
        order = self._order
        return finished_message(
            order,
            reason=FinishReason.EOS if order.was_resumed_to_eos else reason,
            stop_string=self._text.stop_string,
            lookahead=self._servers.assigned.lookahead or self._plans[-1].lookahead,
            targets_used=self._recorder.targets_used,
            token_count=self._text.token_count,
            statistics=self.statistics(),
            timeline=self._recorder.timeline(),
        )


def _text_drafter(order: Order, rules: MaxGramRules) -> TextDrafter | None:
    if not order.drafts_from_text:
        return None
    is_rejection = order.options.wish.rule is VerificationRule.REJECTION
    return TextDrafter(
        order.prefix,
        proposer=rules.begin(vocabulary_size=order.model.vocabulary_size),
        slot=order.drafter_count,
        is_beside=order.plan.drafter is not None,
        make_distribution=one_hot if is_rejection else None,
        room=rules.room,
        predicted=order.predicted,
        asked=order.prompt,
    )
