"""The RPCs that a session is made of: plain data into messages, and answers back.

What is sent is sent at once; reading waits. Only here do a request's calls meet protobuf.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

from paceline.v1.drafter_service_pb2 import DraftRequest
from paceline.v1.proposal_pb2 import Proposal as ProposalMessage
from paceline.v1.sampling_pb2 import (
    VERIFICATION_RULE_EXACT,
    VERIFICATION_RULE_REJECTION,
    SparseDistribution,
)
from paceline.v1.session_service_pb2 import (
    CloseSessionRequest,
    OpenSessionRequest,
    RenewSessionRequest,
    SessionCall,
)
from paceline.v1.session_service_pb2 import SessionSpec as SpecMessage
from paceline.v1.target_service_pb2 import DecodeRequest, VerifyRequest
from paceline_contract.calls import VerificationRule
from paceline_contract.limits import MOST_PROPOSAL_TOKENS, MOST_TOP_LOGPROBS
from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.exchange import Decoded, Drafted, Judged
from paceline_orchestrator.fleet.bad_answers import (
    at_most,
    check_grant,
    check_lease,
    check_proposal_lengths,
    demand,
)
from paceline_orchestrator.fleet.wire import answer, answers, read_timing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from paceline.v1.drafter_service_pb2 import DraftResponse
    from paceline.v1.sampling_pb2 import LikeliestTokens as LikeliestMessage
    from paceline.v1.sampling_pb2 import SamplingParameters
    from paceline.v1.target_service_pb2 import DecodeResponse, VerifyResponse
    from paceline_contract.calls import (
        DecodeOptions,
        DraftOptions,
        LikeliestTokens,
        PrefixCall,
        VerifyOptions,
    )
    from paceline_contract.proposal import Distribution
    from paceline_orchestrator.decoding.exchange import SessionSpec
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import UnaryStreamCall

# It takes no forward: a server that takes longer hangs.
_RENEWING_SECONDS = 1.0

_Message = TypeVar("_Message")

_DecodeRpc: TypeAlias = "UnaryStreamCall[DecodeResponse]"
_DraftRpc: TypeAlias = "UnaryStreamCall[DraftResponse]"
_VerifyRpc: TypeAlias = "Awaitable[VerifyResponse]"

_RULES = {
    VerificationRule.EXACT: VERIFICATION_RULE_EXACT,
    VerificationRule.REJECTION: VERIFICATION_RULE_REJECTION,
}


def one_hot(token_id: int) -> Distribution:
    """Return what a token was drawn from that could be no other."""
    return SparseDistribution(token_ids=(token_id,), probabilities=(1.0,))


async def open_session(server: ModelServer, spec: SessionSpec, *, timeout_seconds: float) -> str:
    """Open a session, and return its handle.

    Raises:
        BadAnswerError: It grants what it must not.
        PacelineError: What the server or the transport said.
    """
    message = SpecMessage(
        expected_model_fingerprint=spec.fingerprint,
        sampling=cast("SamplingParameters | None", spec.sampling),
        seed=spec.seed,
        verification_rule=_RULES[spec.rule],
        reserve_length=spec.reserve_length,
        limit_length=spec.limit_length,
        request_id=spec.request_id,
        share=spec.share,
        prompt_length=spec.prompt_length,
        end_token_ids=spec.end_token_ids,
    )
    if message.HasField("sampling"):
        clear = cast("Callable[[str], None]", message.sampling.ClearField)
        for name in spec.sampling_left_out:
            clear(name)
    request = OpenSessionRequest(spec=message)
    response = await answer(server.sessions.OpenSession(request, timeout=timeout_seconds))
    check_grant(response.grant)
    return response.grant.session_id


async def renew_session(server: ModelServer, session_id: str) -> int:
    """Give a session another lease.

    Returns:
        The sequence of its call that the server has in sight; 0 if it has none.

    Raises:
        BadAnswerError: It grants what it must not.
        PacelineError: The session is lost, or the server does not answer.
    """
    request = RenewSessionRequest(session_id=session_id)
    response = await answer(server.sessions.RenewSession(request, timeout=_RENEWING_SECONDS))
    check_lease(response.lease)
    return response.live_sequence


async def close_session(server: ModelServer, session_id: str, *, timeout_seconds: float) -> None:
    """Close a session.

    Raises:
        PacelineError: What the server or the transport said.
    """
    request = CloseSessionRequest(session_id=session_id)
    await answer(server.sessions.CloseSession(request, timeout=timeout_seconds))


def send_verify(
    server: ModelServer,
    call: PrefixCall,
    *,
    proposal: Proposal,
    options: VerifyOptions,
    timeout_seconds: float,
) -> _VerifyRpc:
    """Send a proposal to be judged."""
    request = VerifyRequest(
        call=_call_message(call),
        proposal=ProposalMessage(
            token_ids=proposal.token_ids,
            parents=proposal.parents,
            distributions=cast("Sequence[SparseDistribution]", proposal.distributions),
        ),
        speculation_depth=options.depth,
        logprobs=options.logprobs,
        anticipate=options.anticipate,
        propose=options.propose,
        top_logprobs=options.top_logprobs,
        score=options.score,
    )
    return server.target.Verify(request, timeout=timeout_seconds)


async def read_verdict(rpc: _VerifyRpc, *, sent_ns: int, block_length: int) -> Judged:
    """Wait for the verdict on what was sent at that time (perf_counter_ns).

    Args:
        block_length: How many tokens are judged.

    Raises:
        BadAnswerError: A list is longer than any may be, or the timing is out of its limits.
        PacelineError: What the server or the transport said.
    """
    response = await answer(rpc)
    at_most("accepted_path", response.accepted_path, block_length)
    at_most("logprobs", response.logprobs, block_length + 1)
    check_proposal_lengths(response.proposal, most=MOST_PROPOSAL_TOKENS)
    return Judged(
        sequence=response.sequence,
        prefix_length=response.prefix_length,
        accepted_path=tuple(response.accepted_path),
        next_token=response.next_token_id,
        logprobs=tuple(response.logprobs),
        proposal=_proposal(response.proposal),
        timing=read_timing(response.timing),
        elapsed_ns=time.perf_counter_ns() - sent_ns,
        top_logprobs=_likeliest(response.top_logprobs, most=block_length + 1),
    )


def send_decode(
    server: ModelServer,
    call: PrefixCall,
    *,
    options: DecodeOptions,
    timeout_seconds: float,
) -> _DecodeRpc:
    """Ask for the target's own tokens after a prefix."""
    request = DecodeRequest(
        call=_call_message(call),
        max_tokens=options.max_tokens,
        end_token_ids=options.end_token_ids,
        logprobs=options.logprobs,
        top_logprobs=options.top_logprobs,
    )
    request.message_interval.FromNanoseconds(round(options.interval_seconds * 1e9))
    return server.target.Decode(request, timeout=timeout_seconds)


async def read_decoded(
    rpc: _DecodeRpc, *, sent_ns: int, max_tokens: int
) -> AsyncGenerator[Decoded]:
    """Wait for what a target decodes, message by message.

    Args:
        max_tokens: How many tokens were asked for.

    Raises:
        BadAnswerError: A list is longer than any may be, or the timing is out of its limits.
        PacelineError: What the server or the transport said.
    """
    async with aclosing(_timed(rpc, sent_ns=sent_ns)) as messages:
        async for message, elapsed_ns in messages:
            at_most("token_ids", message.token_ids, max_tokens)
            at_most("logprobs", message.logprobs, max_tokens)
            yield Decoded(
                sequence=message.sequence,
                start_length=message.start_length,
                token_ids=tuple(message.token_ids),
                logprobs=tuple(message.logprobs),
                timing=read_timing(message.timing),
                elapsed_ns=elapsed_ns,
                top_logprobs=_likeliest(message.top_logprobs, most=max_tokens),
            )


def send_draft(
    server: ModelServer,
    call: PrefixCall,
    *,
    options: DraftOptions,
    timeout_seconds: float,
) -> _DraftRpc:
    """Ask for the tokens that follow a prefix."""
    request = DraftRequest(
        call=_call_message(call),
        max_tokens=options.max_tokens,
        chunk_tokens=options.chunk_tokens,
        width=options.width,
        branch_count=options.branch_count,
    )
    return server.drafter.Draft(request, timeout=timeout_seconds)


async def read_drafts(
    rpc: _DraftRpc, options: DraftOptions, *, sent_ns: int
) -> AsyncGenerator[Drafted]:
    """Wait for what is drafted, message by message.

    Args:
        options: What was asked for.

    Raises:
        BadAnswerError: A list is longer than any may be, or the timing is out of its limits.
        PacelineError: What the server or the transport said.
    """
    most = options.most_tokens
    async with aclosing(_timed(rpc, sent_ns=sent_ns)) as messages:
        async for message, elapsed_ns in messages:
            check_proposal_lengths(message.proposal, most=most)
            yield _drafted(message, elapsed_ns=elapsed_ns)


async def _timed(
    rpc: UnaryStreamCall[_Message], *, sent_ns: int
) -> AsyncGenerator[tuple[_Message, int]]:
    """Yield each message of a stream, and the ns since the one before, or since it was sent."""
    last_ns = sent_ns
    async with aclosing(answers(rpc)) as messages:
        async for message in messages:
            now_ns = time.perf_counter_ns()
            yield message, now_ns - last_ns
            last_ns = now_ns


def _drafted(message: DraftResponse, *, elapsed_ns: int) -> Drafted:
    return Drafted(
        sequence=message.sequence,
        start_length=message.start_length,
        proposal=_proposal(message.proposal),
        timing=read_timing(message.timing),
        elapsed_ns=elapsed_ns,
    )


def _proposal(message: ProposalMessage) -> Proposal:
    return Proposal(
        tuple(message.token_ids),
        parents=tuple(message.parents),
        distributions=tuple(message.distributions),
        forced=tuple(message.forced),
    )


def _likeliest(messages: Sequence[LikeliestMessage], *, most: int) -> tuple[LikeliestTokens, ...]:
    at_most("top_logprobs", messages, most)
    return tuple(_likeliest_at(message) for message in messages)


def _likeliest_at(message: LikeliestMessage) -> LikeliestTokens:
    count = len(message.token_ids)
    demand(
        count == len(message.logprobs) <= MOST_TOP_LOGPROBS,
        "top_logprobs",
        f"has other than 0 to {MOST_TOP_LOGPROBS} tokens with one log probability each",
    )
    return tuple(zip(message.token_ids, message.logprobs, strict=True))


def _call_message(call: PrefixCall) -> SessionCall:
    return SessionCall(
        session_id=call.session_id,
        sequence=call.sequence,
        base_length=call.base_length,
        base_digest=call.base_digest,
        token_ids=call.token_ids,
        expected_model_fingerprint=call.fingerprint,
    )
