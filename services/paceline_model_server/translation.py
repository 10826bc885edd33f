"""Between the wire and the host: protobuf messages and `paceline_engine.terms.calls`, both ways.

The host checks limits, under the field names of the protos. This module checks only fields that the
translation loses: the expected model, and enums. Lists stay parts of the message: they are copied
only after the host has found the session and checked their lengths.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, overload

from google.protobuf.duration_pb2 import Duration

from paceline.errors import InvalidFieldError, ModelMismatchError, UnsupportedError
from paceline.v1 import (
    drafter_service_pb2,
    model_service_pb2,
    proposal_pb2,
    sampling_pb2,
    session_service_pb2,
    target_service_pb2,
)
from paceline_contract.calls import (
    CallTiming,
    DecodeOptions,
    DraftOptions,
    Hardware,
    LikeliestTokens,
    PrefixCall,
    VerificationRule,
    VerifyOptions,
)
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import Grammar, GrammarKind, SamplingParameters
from paceline_engine.terms.calls import (
    DEFAULT_LEASE_SECONDS,
    Decoded,
    Drafted,
    ModelDescription,
    SessionGrant,
    SessionSpec,
    Verdict,
)
from paceline_engine.terms.validation import MOST_TREE_DEPTH, MOST_TREE_TOKENS
from paceline_serving.wire_format import unknown_field

if TYPE_CHECKING:
    from paceline_engine.terms.backend import ChatTemplate
    from paceline_engine.terms.latencies import ForwardLatency, ModelLatencies

_RULE_OF_WIRE = {
    sampling_pb2.VERIFICATION_RULE_UNSPECIFIED: VerificationRule.EXACT,
    sampling_pb2.VERIFICATION_RULE_EXACT: VerificationRule.EXACT,
    sampling_pb2.VERIFICATION_RULE_REJECTION: VerificationRule.REJECTION,
}
_WIRE_OF_RULE = {
    VerificationRule.EXACT: sampling_pb2.VERIFICATION_RULE_EXACT,
    VerificationRule.REJECTION: sampling_pb2.VERIFICATION_RULE_REJECTION,
}


class _Distributions(Sequence[SparseDistribution]):
    """A message's distributions, each translated when it is asked for."""

    def __init__(self, messages: Sequence[sampling_pb2.SparseDistribution]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> SparseDistribution: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SparseDistribution]: ...
    def __getitem__(self, index: int | slice) -> SparseDistribution | Sequence[SparseDistribution]:
        if isinstance(index, slice):
            return _Distributions(self._messages[index])
        message = self._messages[index]
        return SparseDistribution(message.token_ids, message.probabilities)


def session_spec(
    message: session_service_pb2.SessionSpec, *, model: ModelDescription, owner: str
) -> SessionSpec:
    """Translate a session's specification, with its defaults and its owner."""
    lora = _expected_lora("spec", message.expected_model_fingerprint, model=model)
    rule = _RULE_OF_WIRE.get(message.verification_rule)
    if rule is None:
        raise InvalidFieldError.of("spec.verification_rule", "is no rule of this version")
    return SessionSpec(
        reserve_length=message.reserve_length,
        sampling=_sampling(message.sampling),
        seed=message.seed,
        rule=rule,
        lease_seconds=(
            _seconds(message.lease) if message.HasField("lease") else DEFAULT_LEASE_SECONDS
        ),
        request_id=message.request_id,
        limit_length=message.limit_length if message.HasField("limit_length") else None,
        share=message.share,
        owner=owner,
        prompt_length=message.prompt_length,
        end_token_ids=tuple(message.end_token_ids),
        lora=lora,
    )


def verify_request(
    message: target_service_pb2.VerifyRequest, *, model: ModelDescription, caller: str
) -> tuple[PrefixCall, Proposal, VerifyOptions]:
    """Translate a verification."""
    call = _prefix_call(message.call, model=model, caller=caller)
    given = message.proposal
    proposal = Proposal(given.token_ids, given.parents, _Distributions(given.distributions))
    options = VerifyOptions(
        depth=message.speculation_depth,
        logprobs=message.logprobs,
        anticipate=message.anticipate,
        propose=message.propose,
        top_logprobs=message.top_logprobs,
        score=message.score,
    )
    return call, proposal, options


def draft_request(
    message: drafter_service_pb2.DraftRequest, *, model: ModelDescription, caller: str
) -> tuple[PrefixCall, DraftOptions]:
    """Translate a Draft."""
    options = DraftOptions(
        max_tokens=message.max_tokens,
        # 0 means not set: one token in each answer, and a chain.
        chunk_tokens=message.chunk_tokens or 1,
        width=message.width or 1,
        branch_count=message.branch_count,
    )
    return _prefix_call(message.call, model=model, caller=caller), options


def decode_request(
    message: target_service_pb2.DecodeRequest, *, model: ModelDescription, caller: str
) -> tuple[PrefixCall, DecodeOptions]:
    """Translate a Decode."""
    options = DecodeOptions(
        max_tokens=message.max_tokens,
        end_token_ids=message.end_token_ids,
        logprobs=message.logprobs,
        interval_seconds=_seconds(message.message_interval),
        top_logprobs=message.top_logprobs,
    )
    return _prefix_call(message.call, model=model, caller=caller), options


def session_grant(grant: SessionGrant) -> session_service_pb2.SessionGrant:
    """Translate the receipt of an opened session."""
    return session_service_pb2.SessionGrant(
        session_id=grant.session_id,
        lease=duration(grant.lease_seconds),
    )


def verify_response(sequence: int, verdict: Verdict) -> target_service_pb2.VerifyResponse:
    """Translate a verdict, with the sequence that it answers."""
    proposal = verdict.proposal
    return target_service_pb2.VerifyResponse(
        sequence=sequence,
        prefix_length=verdict.prefix_length,
        accepted_path=verdict.accepted_path,
        next_token_id=verdict.next_token,
        logprobs=verdict.logprobs,
        held_length=verdict.held_length,
        timing=_timing(verdict.timing),
        # Without this check an empty message would be present.
        proposal=_proposal(proposal) if len(proposal) else None,
        top_logprobs=map(_likeliest, verdict.top_logprobs),
    )


def decode_response(sequence: int, decoded: Decoded) -> target_service_pb2.DecodeResponse:
    """Translate the next tokens, with the sequence that they answer."""
    return target_service_pb2.DecodeResponse(
        sequence=sequence,
        start_length=decoded.start_length,
        token_ids=decoded.token_ids,
        logprobs=decoded.logprobs,
        timing=_timing(decoded.timing),
        top_logprobs=map(_likeliest, decoded.top_logprobs),
    )


def draft_response(sequence: int, drafted: Drafted) -> drafter_service_pb2.DraftResponse:
    """Translate the next draft tokens, with the sequence that they answer."""
    return drafter_service_pb2.DraftResponse(
        sequence=sequence,
        start_length=drafted.start_length,
        proposal=_proposal(drafted.proposal),
        timing=_timing(drafted.timing),
    )


def model_info(
    model: ModelDescription, *, latencies: ModelLatencies
) -> model_service_pb2.GetModelInfoResponse:
    """Translate a model's description; the server adds role, limits and incarnation."""
    return model_service_pb2.GetModelInfoResponse(
        model_name=model.name,
        model_revision=model.revision,
        fingerprint=model.fingerprint,
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        vocabulary_size=model.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        context_length=model.context_length,
        backend=model.backend,
        dtype=model.dtype,
        device=model.device,
        layer_count=model.layer_count,
        cancels_between_layers=model.cancels_between_layers,
        shares_forwards=model.shares_forwards,
        tree_token_limit=MOST_TREE_TOKENS if model.takes_trees else 0,
        tree_depth_limit=MOST_TREE_DEPTH if model.takes_trees else 0,
        is_invariant=model.is_invariant,
        self_draft_depth=model.self_draft_depth,
        self_draft_kind=model.self_draft_kind,
        verification_rules=[_WIRE_OF_RULE[rule] for rule in model.verification_rules],
        forward_latencies=_forwards(latencies.forwards),
        prefill_fixed_ns=latencies.prefill_fixed_ns or 0,
        prefill_ns_per_token=latencies.prefill_ns_per_token or 0,
        stages=[
            model_service_pb2.Stage(
                model_name=each.model_name,
                forward_latencies=_forwards(each.forwards),
                verdicts=[
                    model_service_pb2.StageVerdicts(judged_count=judged, accepted_count=accepted)
                    for judged, accepted in each.verdicts
                ],
            )
            for each in latencies.stages
        ],
        hardware=_hardware(model.hardware),
        fim_token_ids=model.fim_token_ids,
        sampling_parameters=sorted(model.sampling_parameters),
        grammar_engine=model.grammar_engine,
        scores_prompts=model.scores_prompts,
        sampling_defaults=sampling_pb2.SamplingDefaults(**asdict(model.sampling_defaults)),
        lora_adapters=[
            model_service_pb2.LoraAdapter(name=name, fingerprint=fingerprint)
            for name, fingerprint in model.lora_fingerprints
        ],
        configuration=model.configuration,
    )


def _hardware(hardware: Hardware | None) -> model_service_pb2.Hardware | None:
    if hardware is None:
        return None
    return model_service_pb2.Hardware(identity=hardware.identity, share=hardware.share)


def _forwards(forwards: Sequence[ForwardLatency]) -> list[model_service_pb2.ForwardLatency]:
    return [
        model_service_pb2.ForwardLatency(rows=each.rows, median_ns=each.median_ns)
        for each in forwards
    ]


def chat_template(template: ChatTemplate) -> model_service_pb2.ChatTemplate:
    """Translate a chat template."""
    return model_service_pb2.ChatTemplate(
        fingerprint=template.fingerprint,
        source=template.source,
        named_tokens=template.named_tokens,
        special_tokens=template.special_tokens,
        added_token_ids=template.added_token_ids,
    )


def duration(seconds: float) -> Duration:
    """Translate seconds."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def _seconds(message: Duration) -> float:
    return message.seconds + message.nanos / 1e9


def _expected_lora(path: str, fingerprint: str, *, model: ModelDescription) -> str:
    """Return the LoRA adapter with which the model has a fingerprint; empty: with none."""
    if not fingerprint:
        raise InvalidFieldError.of(f"{path}.expected_model_fingerprint", "is required")
    try:
        return model.lora_of(fingerprint)
    except KeyError:
        raise ModelMismatchError(
            "this server has another model", metadata={"fingerprint": model.fingerprint}
        ) from None


def _sampling(message: sampling_pb2.SamplingParameters) -> SamplingParameters:
    if unknown := unknown_field(message):  # left out, it would make another text
        raise UnsupportedError(f"spec.sampling: this server does not know {unknown}")
    given = {field.name: value for field, value in message.ListFields()}
    given["logit_bias"] = tuple(sorted(message.logit_bias.items()))
    given["grammar"] = _grammar(message.grammar) if message.HasField("grammar") else None
    return SamplingParameters(**given)


def _grammar(message: sampling_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("definition")
    if kind is None:
        raise InvalidFieldError.of("spec.sampling.grammar", "has no definition of this version")
    if kind == "choices":
        if not message.choices.texts:
            raise InvalidFieldError.of("spec.sampling.grammar.choices", "must be one text or more")
        return Grammar(
            GrammarKind.CHOICES, json.dumps([*message.choices.texts], ensure_ascii=False)
        )
    return Grammar(GrammarKind(kind), getattr(message, kind))


def _prefix_call(
    message: session_service_pb2.SessionCall, *, model: ModelDescription, caller: str
) -> PrefixCall:
    lora = _expected_lora("call", message.expected_model_fingerprint, model=model)
    return PrefixCall(
        session_id=message.session_id,
        sequence=message.sequence,
        base_length=message.base_length,
        base_digest=message.base_digest,
        token_ids=message.token_ids,
        caller=caller,
        lora=lora,
    )


def _likeliest(tokens: LikeliestTokens) -> sampling_pb2.LikeliestTokens:
    return sampling_pb2.LikeliestTokens(
        token_ids=[token_id for token_id, _ in tokens], logprobs=[each for _, each in tokens]
    )


def _proposal(proposal: Proposal) -> proposal_pb2.Proposal:
    return proposal_pb2.Proposal(
        token_ids=proposal.token_ids,
        parents=proposal.parents,
        distributions=(
            sampling_pb2.SparseDistribution(
                token_ids=each.token_ids, probabilities=each.probabilities
            )
            for each in proposal.distributions
        ),
        forced=proposal.forced,
    )


def _timing(timing: CallTiming) -> session_service_pb2.CallTiming:
    return session_service_pb2.CallTiming(
        queue_ns=timing.queue_ns,
        forward_ns=timing.forward_ns,
        began_early=timing.began_early,
        forward_count=timing.forward_count,
        row_count=timing.row_count,
        shared_row_count=timing.shared_row_count,
        shared_call_count=timing.shared_call_count,
        reused_token_count=timing.reused_token_count,
        stages=[
            session_service_pb2.StageTiming(
                forward_count=each.forward_count, forward_ns=each.forward_ns
            )
            for each in timing.stages
        ],
    )
