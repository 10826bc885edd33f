"""The client's messages, turned into plain data, and plain data into messages.

With `admission`, which checks a request before anything is made of it, the only place where a
generation meets protobuf.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from paceline.v1 import model_service_pb2 as model_pb
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.calls import VerificationRule
from paceline_orchestrator.decoding.statistics import EventKind, Fallback
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.words import Word
from paceline_orchestrator.front.order import Options
from paceline_orchestrator.front.request_validation import is_greedy, used_parameters
from paceline_orchestrator.planning.planner import DrafterKind, Wish
from paceline_protocol.draft_shape import Shape
from paceline_protocol.messages import FinishReason
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_contract.calls import LikeliestTokens
    from paceline_orchestrator.decoding.prompt_scoring import ScoredTokens
    from paceline_orchestrator.decoding.statistics import Statistics, TimelineEvent
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.words import Standing
    from paceline_orchestrator.front.order import BytesOf, Order
    from paceline_orchestrator.front.text import Piece

ClientMessage: TypeAlias = pb.GenerateResponse

# What servers say of one call is checked where it is read; the sum of many calls is cut off here.
_MOST_UINT32, _MOST_UINT64 = (1 << 32) - 1, (1 << 64) - 1

_NUMBER_OF_STRATEGY = {it: pb.Strategy.Value(f"STRATEGY_{it.name}") for it in Strategy}
# The other numbers leave the choice to the planner.
_STRATEGIES = {int(number): strategy for strategy, number in _NUMBER_OF_STRATEGY.items()}
_DRAFTERS = {int(pb.DrafterKind.Value(f"DRAFTER_KIND_{it.name}")): it for it in DrafterKind}
_NUMBER_OF_RULE = {
    VerificationRule.EXACT: sampling_pb2.VERIFICATION_RULE_EXACT,
    VerificationRule.REJECTION: sampling_pb2.VERIFICATION_RULE_REJECTION,
}
_NUMBER_OF_REASON = {
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.EOS: pb.FINISH_REASON_EOS,
}
_NUMBER_OF_EVENT = {
    kind: pb.TimelineEventKind.Value(f"TIMELINE_EVENT_KIND_{kind.name}") for kind in EventKind
}
_NUMBER_OF_FALLBACK = {
    kind: pb.FallbackKind.Value(f"FALLBACK_KIND_{kind.name}") for kind in Fallback
}
_NUMBER_OF_ROLE = {
    Role.DRAFTER: model_pb.MODEL_ROLE_DRAFTER,
    Role.TARGET: model_pb.MODEL_ROLE_TARGET,
}

_NUMBER_OF_WORD = {it: pb.ServerStanding.Value(f"SERVER_STANDING_{it.name}") for it in Word}


def read_options(request: pb.GenerateRequest) -> Options:
    """Read how a request that was checked is to be served."""
    is_exact = (
        is_greedy(request)  # for greedy decoding both rules are the same
        or request.verification_rule != sampling_pb2.VERIFICATION_RULE_REJECTION
    )
    rule = VerificationRule.EXACT if is_exact else VerificationRule.REJECTION
    in_blocks = request.dispatch_policy == pb.DISPATCH_POLICY_BLOCKS
    return Options(
        wish=Wish(
            strategy=_STRATEGIES.get(request.strategy),
            lookahead=request.lookahead if request.HasField("lookahead") else None,
            target_count=request.target_count if request.HasField("target_count") else None,
            rule=rule,
            dispatch=DispatchPolicy.BLOCKS if in_blocks else DispatchPolicy.WORK_CONSERVING,
            drafter=_drafter(request),
            has_prediction=bool(request.predicted_text),
            sampling_used=used_parameters(request),
            shape=Shape(request.width, request.branches) if request.HasField("width") else None,
            may_draft_ahead=not in_blocks,
        ),
        drafter_count=max(1, request.drafter_count),
        sampling=request.sampling,
        ignore_eos=request.ignore_eos,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        include_prompt=request.include_prompt,
        include_timeline=request.include_timeline,
        stream_timeline=request.stream_timeline,
    )


def _drafter(request: pb.GenerateRequest) -> DrafterKind | None:
    """Return the drafter kind; a prediction is right more often than any drafter."""
    chosen = _DRAFTERS.get(request.drafter)
    strategy = _STRATEGIES.get(request.strategy)
    is_open = chosen is None and not (strategy and METHODS[strategy].self_drafts)
    return DrafterKind.MAX_GRAM if is_open and request.predicted_text else chosen


def started_message(order: Order, *, target_count: int) -> ClientMessage:
    """Say what a generation will be, with how many targets it begins."""
    started = pb.GenerationStarted(
        request_id=order.request_id,
        seed=order.seed,
        model_fingerprint=order.model.fingerprint,
        strategy=_NUMBER_OF_STRATEGY[order.plan.strategy],
        promise=_NUMBER_OF_RULE[order.options.wish.rule],
        prompt_token_count=len(order.prompt),
        lookahead=order.plan.lookahead,
        target_count=target_count,
        plan_note=order.plan.note,
        width=order.plan.shape.width,
        branches=order.plan.shape.branches,
    )
    return pb.GenerateResponse(started=started)


def chunk_message(piece: Piece, *, position: int, bytes_of: BytesOf | None = None) -> ClientMessage:
    """Send final tokens with their text, the first of them at this position."""
    chunk = pb.GenerationChunk(
        position=position,
        token_ids=[it.token_id for it in piece.tokens],
        text=piece.text,
        logprobs=[it.logprob for it in piece.tokens if it.logprob is not None],
        origins=[
            pb.TOKEN_ORIGIN_ACCEPTED_DRAFT if it.accepted else pb.TOKEN_ORIGIN_TARGET
            for it in piece.tokens
        ],
        top_logprobs=[_likeliest(it.likeliest, bytes_of) for it in piece.tokens if it.likeliest],
        text_lengths=piece.lengths,
        token_bytes=[bytes_of(it.token_id) for it in piece.tokens] if bytes_of else (),
    )
    return pb.GenerateResponse(chunk=chunk)


def prompt_message(scored: ScoredTokens, *, bytes_of: BytesOf | None = None) -> ClientMessage:
    """Tell tokens of the prompt, and how likely they are."""
    chunk = pb.PromptChunk(
        position=scored.position,
        token_ids=scored.token_ids,
        logprobs=scored.logprobs,
        top_logprobs=[_likeliest(it, bytes_of) for it in scored.top_logprobs],
        token_bytes=map(bytes_of, scored.token_ids) if bytes_of else (),
    )
    return pb.GenerateResponse(prompt_chunk=chunk)


def timeline_message(event: TimelineEvent) -> ClientMessage:
    """Show what happened behind the scenes."""
    return pb.GenerateResponse(timeline_event=_event(event))


def finished_message(
    order: Order,
    *,
    reason: FinishReason,
    stop_string: str,
    lookahead: int,
    targets_used: int,
    token_count: int,
    statistics: Statistics,
    timeline: Iterable[TimelineEvent],
) -> ClientMessage:
    """Say how a generation ended, and what it took.

    Args:
        reason: Why its method ended.
        stop_string: The one that was found, if one was: then it is the reason.
        lookahead: The one in use at the end.
        targets_used: The most that verified at the same time.
        token_count: Tokens generated, resumed ones included.
        statistics: What it took.
        timeline: What was remembered.
    """
    finished = pb.GenerationFinished(
        finish_reason=pb.FINISH_REASON_STOP_STRING if stop_string else _NUMBER_OF_REASON[reason],
        stop_string=stop_string,
        promise=_NUMBER_OF_RULE[order.options.wish.rule],
        lookahead=lookahead,
        targets_used=targets_used,
        prompt_token_count=len(order.prompt),
        completion_token_count=token_count,
        cached_prompt_token_count=min(statistics.reused_count, len(order.prompt)),
        statistics=_statistics(statistics),
        timeline=map(_event, timeline),
    )
    return pb.GenerateResponse(finished=finished)


def server_message(server: ModelServer, standing: Standing) -> pb.ServerInfo:
    """Describe a model server, and how it stands."""
    takes_work = standing.word.takes_work
    return pb.ServerInfo(
        name=server.name,
        address=server.endpoint.address,
        role=_NUMBER_OF_ROLE[server.role],
        ready=takes_work,
        status="" if takes_work else server.status or f"{standing.word.name}: {standing.detail}",
        model_fingerprint=server.facts.fingerprint if server.facts else "",
        decode_step_ns=server.latency.step_ns,
        self_draft_kind=server.facts.self_draft_kind if server.facts else "",
        is_invariant=server.facts.is_invariant if server.facts else False,
        standing=_NUMBER_OF_WORD[standing.word],
        standing_detail=standing.detail,
    )


def _likeliest(tokens: LikeliestTokens, bytes_of: BytesOf | None) -> sampling_pb2.LikeliestTokens:
    token_ids = [token_id for token_id, _ in tokens]
    return sampling_pb2.LikeliestTokens(
        token_ids=token_ids,
        logprobs=[each for _, each in tokens],
        token_bytes=map(bytes_of, token_ids) if bytes_of else (),
    )


def _statistics(took: Statistics) -> pb.GenerationStatistics:
    return pb.GenerationStatistics(
        target_forward_count=min(took.target_forward_count, _MOST_UINT32),
        drafter_forward_count=min(took.drafter_forward_count, _MOST_UINT32),
        drafted_token_count=took.drafts.drafted,
        accepted_token_count=took.drafts.accepted,
        rejected_token_count=took.drafts.rejected,
        discarded_token_count=took.drafts.discarded,
        acceptance_rate=took.drafts.acceptance_rate,
        cancelled_rpc_count=min(took.cancelled_count, _MOST_UINT32),
        fallbacks=[
            pb.Fallback(kind=_NUMBER_OF_FALLBACK[kind], count=took.fallbacks[kind])
            for kind in Fallback
            if took.fallbacks[kind]
        ],
        queue_ns=min(took.queue_ns, _MOST_UINT64),
        forward_ns=min(took.forward_ns, _MOST_UINT64),
        network_ns=min(took.network_ns, _MOST_UINT64),
        time_to_first_token_ns=took.time_to_first_token_ns,
        total_ns=took.total_ns,
        corrections_ahead_count=took.drafts.corrections_ahead,
        branch_token_count=took.drafts.branch_judged,
        branch_accepted_count=took.drafts.branch_accepted,
        max_gram_drafted_token_count=took.text.drafted,
        max_gram_accepted_token_count=took.text.accepted,
        drafter_models=[
            pb.ModelForwards(
                model_name=name,
                forward_count=min(ran.forward_count, _MOST_UINT32),
                forward_ns=min(ran.forward_ns, _MOST_UINT64),
            )
            for name, ran in took.drafter_models.items()
        ],
        walltime_improvement=took.walltime_improvement,
        predicted_token_count=took.text.predicted,
        predicted_accepted_token_count=took.text.predicted_accepted,
        forced_drafted_token_count=took.forced_drafted,
        forced_accepted_token_count=took.forced_accepted,
    )


def _event(event: TimelineEvent) -> pb.TimelineEvent:
    return pb.TimelineEvent(
        kind=_NUMBER_OF_EVENT[event.kind],
        server=event.server,
        start_ns=event.start_ns,
        end_ns=event.end_ns,
        position=event.position,
        token_ids=event.token_ids,
        call_id=event.call_id,
        speculation_depth=event.depth,
        branch_token_count=event.branch_count,
        is_branch=event.is_branch,
    )
