"""A host's calls: checks, the tokens that a session holds after a call, and the answers."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from paceline.errors import ModelMismatchError
from paceline_contract.calls import (
    CallTiming,
    DecodeOptions,
    DraftOptions,
    PrefixCall,
    StageTiming,
    VerificationRule,
    VerifyOptions,
)
from paceline_contract.proposal import Proposal
from paceline_engine.scheduling.batching import most_rows
from paceline_engine.terms import validation
from paceline_engine.terms.calls import Decoded, Drafted, Verdict
from paceline_engine.terms.items import Decode, Draft, Judge

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from paceline_contract.proposal import Distribution
    from paceline_engine.scheduling.accounting import HostStatistics
    from paceline_engine.scheduling.jobs import Step
    from paceline_engine.scheduling.latencies import LatencyMeter
    from paceline_engine.sessions.live_calls import LiveCalls
    from paceline_engine.sessions.session import Session
    from paceline_engine.sessions.session_table import SessionTable
    from paceline_engine.terms.backend import Backend
    from paceline_engine.terms.items import Outcome


class HostCalls:
    """Verify, Decode and Draft. Concurrency and cancellation as `ModelHost` has them.

    Args:
        live: The live calls of these sessions.
        meter: Knows how long a forward may take.
        counts: The statistics of calls.
        serving: Returns the model, or raises the error of a call while none is served.
    """

    def __init__(
        self,
        sessions: SessionTable,
        live: LiveCalls,
        *,
        meter: LatencyMeter,
        counts: HostStatistics,
        serving: Callable[[], Backend],
    ) -> None:
        self._sessions = sessions
        self._live = live
        self._meter = meter
        self._counts = counts
        self._serving = serving

    async def verify(
        self, call: PrefixCall, proposal: Proposal, *, options: VerifyOptions
    ) -> Verdict:
        """Judge a proposal: Verify in target_service.proto.

        A call that asks the same as the session's live call takes over its place in the queue, or
        its forward, at the new depth.

        Raises:
            PacelineError: as the proto lists them.
        """
        with self._counts.refusals():
            session = self._find_for(call)
            validation.check_proposal(
                call,
                proposal,
                options=options,
                spec=session.spec,
                model=self._serving().description,
            )
            # The caller's lists may be parts of a message; tuples are quicker and do not change.
            proposal = Proposal(
                tuple(proposal.token_ids),
                () if proposal.is_chain else tuple(proposal.parents),
                tuple(proposal.distributions),
            )
            # Each token of a tree takes memory, though only one path joins the sequence.
            length = call.prefix_length + len(proposal)
            self._make_room(session, length)
            task = Judge(
                proposal,
                logprobs=options.logprobs,
                propose=self._proposes(session, options),
                top_logprobs=options.top_logprobs,
                score=options.score,
            )
            live = self._live.admit(
                session,
                call,
                task,
                depth=options.depth,
                patience_ns=self._patience_ns(length, block_length=len(proposal)),
                goes_on=options.anticipate,
            )
        self._counts.verify_calls += 1
        with self._live.until_left(session, live):
            steps = [step async for step in live.outlet]
            judgement = steps[-1].outcome.judgement
            assert judgement is not None, "then it is done"
            session.hold(call.token_ids)
            session.hold(proposal.along(judgement.accepted_path))
            self._live.answered(session, live)
        accepted_count = len(judgement.accepted_path)
        if not task.score:
            self._counts.judged_tokens += len(proposal)
            self._counts.accepted_tokens += accepted_count
        self._counts.forced_tokens += len(judgement.proposal.forced)
        if task.propose and self._serving().description.self_draft_depth:
            self._counts.count_guesses(steps[-1].outcome, judged_count=len(proposal))
        return Verdict(
            prefix_length=live.prefix_length,
            accepted_path=judgement.accepted_path,
            next_token=judgement.next_token,
            held_length=live.prefix_length + accepted_count,
            logprobs=judgement.logprobs,
            timing=replace(
                _timing(steps, most_rows=length, reusable=session.take_reused()),
                began_early=live.began_early,
            ),
            proposal=judgement.proposal,
            top_logprobs=judgement.top_logprobs,
        )

    async def decode(self, call: PrefixCall, options: DecodeOptions) -> AsyncGenerator[Decoded]:
        """Choose the tokens that follow a prefix: Decode in target_service.proto.

        A generator, to be used as `draft` is.

        Raises:
            PacelineError: as the proto lists them.
        """
        with self._counts.refusals():
            session = self._find_for(call)
            validation.check_decoding(
                call,
                options,
                limit_length=session.spec.longest_length,
                vocabulary_size=self._serving().description.vocabulary_size,
            )
            length = call.prefix_length + options.max_tokens
            self._make_room(session, length)
            live = self._live.admit(
                session,
                call,
                Decode(
                    options.max_tokens,
                    end_token_ids=frozenset(options.end_token_ids),
                    logprobs=options.logprobs,
                    top_logprobs=options.top_logprobs,
                ),
                patience_ns=self._patience_ns(length, block_length=0),
            )
        self._counts.decode_calls += 1
        with self._live.until_left(session, live):
            new_tokens, start_length = call.token_ids, live.prefix_length
            steps: list[Step[Outcome]] = []
            seconds = options.interval_seconds
            async with aclosing(live.outlet.parcels(interval_seconds=seconds)) as parcels:
                async for parcel in parcels:
                    steps += parcel
                    if not any(step.outcome.judgement for step in steps):
                        continue  # so far a part of a long prefix
                    # The session holds the call's own tokens once the model has computed them.
                    session.hold(new_tokens)
                    decoded = _decoded(steps, start_length, reusable=session.take_reused())
                    session.hold(decoded.token_ids)
                    yield decoded
                    new_tokens, steps = (), []
                    start_length += len(decoded.token_ids)

    async def draft(self, call: PrefixCall, options: DraftOptions) -> AsyncGenerator[Drafted]:
        """Draft the tokens that follow a prefix: Draft in drafter_service.proto.

        A generator: nothing happens, the checks included, before its first item is asked for.
        Iterate it inside `contextlib.aclosing`, so that it ends when the caller does.

        Raises:
            PacelineError: as the proto lists them.
        """
        with self._counts.refusals():
            session = self._find_for(call)
            model = self._serving().description
            validation.check_drafting(call, options, spec=session.spec, model=model)
            max_tokens, is_tree = options.max_tokens, options.width > 1
            task = Draft(
                max_tokens,
                chunk_tokens=options.chunk_tokens,
                width=options.width,
                branch_count=options.branch_count if is_tree else 0,
            )
            length = call.prefix_length + max_tokens * (1 + task.branch_count)
            self._make_room(session, length)
            block_length = max_tokens * task.branch_count
            live = self._live.admit(
                session,
                call,
                task,
                patience_ns=self._patience_ns(length, block_length=block_length),
            )
        self._counts.draft_calls += 1
        stage_count = len(model.stage_names)
        with self._live.until_left(session, live):
            new_tokens: Sequence[int] = call.token_ids
            chain = _Chain()
            for start in range(0, max_tokens, options.chunk_tokens):
                count = min(options.chunk_tokens, max_tokens - start)
                steps: list[Step[Outcome]] = []
                while len(chain) < count:
                    step = await anext(live.outlet)
                    steps.append(step)
                    chain.add(step.outcome)
                # A step may have found several tokens, and a newer call have come between them.
                live.outlet.check()
                chunk = chain.take(count)
                # The session holds the call's own tokens once the model has computed them.
                session.hold(new_tokens)
                session.hold(chunk.token_ids)
                new_tokens = ()
                proposal = _found_tree(steps) if is_tree else chunk
                self._counts.draft_tokens += len(proposal)
                self._counts.forced_tokens += len(proposal.forced)
                timing = _timing(steps, stage_count)
                yield Drafted(live.prefix_length + start, proposal, timing)

    def _proposes(self, session: Session, options: VerifyOptions) -> bool:
        """Whether a call gets guesses of the model or of a grammar: only EXACT judges them."""
        has_grammar = session.spec.sampling.grammar is not None
        can = has_grammar or self._serving().description.self_draft_depth > 0
        return options.propose and can and session.spec.rule is VerificationRule.EXACT

    def _patience_ns(self, length: int, *, block_length: int) -> int | None:
        """Return how long a forward of a call may take, given its sequence's final length."""
        rows = most_rows(
            self._meter,
            length=length,
            block_length=block_length,
            cuts_prompts=self._serving().cuts_prompts,
        )
        return self._meter.patience_ns(length, most_rows=rows)

    def _find_for(self, call: PrefixCall) -> Session:
        backend = self._serving()
        session = self._sessions.find(call.session_id, caller=call.caller)
        if call.lora != session.spec.lora:
            raise ModelMismatchError(
                "the session was opened with another LoRA adapter, or with none",
                metadata={"fingerprint": backend.description.fingerprint},
            )
        validation.check_call(
            call,
            limit_length=session.spec.longest_length,
            vocabulary_size=backend.description.vocabulary_size,
        )
        return session

    def _make_room(self, session: Session, length: int) -> None:
        """Reserve a call's tokens, before its fence: a refused call has changed nothing."""
        # A session is also in use if its calls are refused for lack of memory.
        self._sessions.renew(session)
        self._sessions.grow(session, length)


class _Chain:
    """The chain of a draft: tokens that steps found and that no answer has had yet."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._distributions: list[Distribution] = []
        self._are_forced: list[bool] = []

    def __len__(self) -> int:
        return len(self._token_ids)

    def add(self, outcome: Outcome) -> None:
        """Append what a step found."""
        self._token_ids.extend(outcome.chain)
        self._distributions.extend(outcome.drafted.distributions)
        forced = outcome.drafted.forced
        self._are_forced.extend(index in forced for index in range(len(outcome.chain)))

    def take(self, count: int) -> Proposal:
        """Return the first tokens, and remove them."""
        taken = Proposal(
            tuple(self._token_ids[:count]),
            distributions=tuple(self._distributions[:count]),
            forced=tuple(index for index in range(count) if self._are_forced[index]),
        )
        del self._token_ids[:count], self._distributions[:count], self._are_forced[:count]
        return taken


def _found_tree(steps: Sequence[Step[Outcome]]) -> Proposal:
    """Return all tokens of a tree that steps found."""
    found = [step.outcome.drafted for step in steps]
    starts = accumulate(map(len, found), initial=0)
    return Proposal(
        tuple(token for drafted in found for token in drafted.token_ids),
        tuple(parent for drafted in found for parent in drafted.parents),
        forced=tuple(
            start + index
            for start, drafted in zip(starts, found, strict=False)
            for index in drafted.forced
        ),
    )


def _decoded(steps: Sequence[Step[Outcome]], start_length: int, *, reusable: int) -> Decoded:
    """Return the tokens that steps decoded; see `_timing` for `reusable`."""
    judgements = [judged for step in steps if (judged := step.outcome.judgement) is not None]
    most_rows = start_length + len(judgements) - 1
    return Decoded(
        start_length,
        token_ids=tuple(judged.next_token for judged in judgements),
        logprobs=tuple(value for judged in judgements for value in judged.logprobs),
        timing=_timing(steps, most_rows=most_rows, reusable=reusable),
        top_logprobs=tuple(likeliest for judged in judgements for likeliest in judged.top_logprobs),
    )


def _timing(
    steps: Sequence[Step[Outcome]],
    stage_count: int = 0,
    *,
    most_rows: int = 0,
    reusable: int = 0,
) -> CallTiming:
    """Sum up steps.

    Args:
        most_rows: How many rows they would have computed with nothing reused.
        reusable: How many of these a kept sequence had when the call came.
    """
    row_count = sum(step.outcome.row_count for step in steps)
    return CallTiming(
        queue_ns=sum(step.queue_ns for step in steps),
        forward_ns=sum(step.forward_ns for step in steps),
        forward_count=sum(step.outcome.row_count > 0 for step in steps),
        row_count=row_count,
        shared_row_count=sum(step.shared_row_count for step in steps),
        shared_call_count=sum(step.shared_job_count for step in steps),
        reused_token_count=max(0, min(reusable, most_rows - row_count)),
        stages=tuple(_stage_timing(steps, stage) for stage in range(stage_count)),
    )


def _stage_timing(steps: Sequence[Step[Outcome]], stage: int) -> StageTiming:
    ran = [step for step in steps if step.outcome.row_count and step.outcome.stage == stage]
    return StageTiming(len(ran), sum(step.forward_ns for step in ran))
