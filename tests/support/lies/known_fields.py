"""Every field that a model server's answers have: what its comment forbids beside its type.

A field without a row fails tests/unit/support/test_list_of_lies.py, and so does a row without a
field.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Known:
    """What is known of a field.

    Attributes:
        beyond: Values outside the range that its comment gives, by what is wrong with them.
        unseen: Why nobody but its server can know a wrong value of it; empty if one can be seen.
        unseen_kinds: The kinds of wrong values for which that holds; empty: for all kinds.
    """

    beyond: Mapping[str, Any] = field(default_factory=dict)
    unseen: str = ""
    unseen_kinds: frozenset[str] = frozenset()

    def hides(self, kind: str) -> bool:
        """Whether a wrong value of this kind can be believed, and do harm."""
        return bool(self.unseen) and (not self.unseen_kinds or kind in self.unseen_kinds)


_ANYTHING = Known()
# The fake model's vocabulary: ids below it are plausible.
_OUTSIDE = {"outside the vocabulary": 257}
_TOKEN = Known(
    _OUTSIDE,
    unseen="a target's word is what decides a token",
    unseen_kinds=frozenset({"zero", "one more", "one less", "one", "reversed", "doubled"}),
)
_LOGPROB = Known(
    {"a probability over 1": 0.5},
    unseen="any number that is a log probability may be the right one",
    unseen_kinds=frozenset(
        {"zero", "negative", "denormal", "least", "reversed", "negative infinity"}
    ),
)
_COUNT = Known()
_DIGEST = Known({"not hexadecimal": "z" * 64, "too short": "ab"})
_WHOSE_MODEL = "what a model is, its server says"

KNOWN: Mapping[str, Known] = {
    "GetModelInfoResponse.model_name": _ANYTHING,
    "GetModelInfoResponse.model_revision": _ANYTHING,
    "GetModelInfoResponse.fingerprint": _ANYTHING,
    "GetModelInfoResponse.tokenizer_fingerprint": _DIGEST,
    "GetModelInfoResponse.vocabulary_size": Known(unseen=_WHOSE_MODEL),
    "GetModelInfoResponse.eos_token_ids": Known(_OUTSIDE, unseen=_WHOSE_MODEL),
    "GetModelInfoResponse.context_length": Known(unseen=_WHOSE_MODEL),
    "GetModelInfoResponse.role": _ANYTHING,
    "GetModelInfoResponse.backend": _ANYTHING,
    "GetModelInfoResponse.dtype": _ANYTHING,
    "GetModelInfoResponse.device": _ANYTHING,
    "GetModelInfoResponse.layer_count": _COUNT,
    "GetModelInfoResponse.cancels_between_layers": _ANYTHING,
    "GetModelInfoResponse.session_limit": _COUNT,
    "GetModelInfoResponse.token_budget": _COUNT,
    "GetModelInfoResponse.incarnation": _ANYTHING,
    "GetModelInfoResponse.verification_rules": _ANYTHING,
    "GetModelInfoResponse.forward_latencies": _ANYTHING,
    "GetModelInfoResponse.prefill_ns_per_token": _COUNT,
    "GetModelInfoResponse.prefill_fixed_ns": _COUNT,
    "GetModelInfoResponse.shares_forwards": _ANYTHING,
    "GetModelInfoResponse.tree_token_limit": _COUNT,
    "GetModelInfoResponse.tree_depth_limit": _COUNT,
    "GetModelInfoResponse.is_invariant": _ANYTHING,
    "GetModelInfoResponse.self_draft_depth": _COUNT,
    "GetModelInfoResponse.self_draft_kind": Known({"of no known kind": "crystal ball"}),
    "GetModelInfoResponse.stages": _ANYTHING,
    "GetModelInfoResponse.hardware": _ANYTHING,
    "GetModelInfoResponse.version": _ANYTHING,
    "GetModelInfoResponse.fim_token_ids": Known(_OUTSIDE, unseen=_WHOSE_MODEL),
    "GetModelInfoResponse.exchanges_calls": _ANYTHING,
    "GetModelInfoResponse.sampling_parameters": Known(
        {"no name": "a b", "longer than 64 characters": "n" * 65}
    ),
    "GetModelInfoResponse.grammar_engine": _ANYTHING,
    "GetModelInfoResponse.configuration": _ANYTHING,
    "GetModelInfoResponse.scores_prompts": _ANYTHING,
    "GetModelInfoResponse.sampling_defaults": _ANYTHING,
    "GetModelInfoResponse.lora_adapters": _ANYTHING,
    "LoraAdapter.name": Known({"no name": "a b", "longer than 64 characters": "n" * 65}),
    "LoraAdapter.fingerprint": _ANYTHING,
    "SamplingDefaults.temperature": Known({"above 100": 100.001}),
    "SamplingDefaults.top_k": _COUNT,
    "SamplingDefaults.top_p": Known({"a little over 1": 1.001}),
    "SamplingDefaults.min_p": Known({"a little over 1": 1.001}),
    "SamplingDefaults.repetition_penalty": Known({"below 0.01": 0.001}),
    "Hardware.identity": Known({"longer than 64 characters": "h" * 65}),
    "Hardware.share": Known({"a little over 1": 1.0000001, "twice": 2.0}),
    "Stage.model_name": _ANYTHING,
    "Stage.forward_latencies": _ANYTHING,
    "Stage.verdicts": _ANYTHING,
    "StageVerdicts.judged_count": _COUNT,
    "StageVerdicts.accepted_count": _COUNT,
    "ForwardLatency.rows": _COUNT,
    "ForwardLatency.median_ns": _COUNT,
    "GetTokenizerResponse.tokenizer_fingerprint": _DIGEST,
    "GetTokenizerResponse.total_bytes": _COUNT,
    "GetTokenizerResponse.data": _ANYTHING,
    "GetChatTemplateResponse.chat_template": _ANYTHING,
    "ChatTemplate.fingerprint": _DIGEST,
    "ChatTemplate.source": _ANYTHING,
    "ChatTemplate.named_tokens": _ANYTHING,
    "NamedTokensEntry.key": _ANYTHING,
    "NamedTokensEntry.value": _ANYTHING,
    "ChatTemplate.special_tokens": _ANYTHING,
    "ChatTemplate.added_token_ids": _ANYTHING,
    "AddedTokenIdsEntry.key": _ANYTHING,
    "AddedTokenIdsEntry.value": _ANYTHING,
    "OpenSessionResponse.grant": _ANYTHING,
    "SessionGrant.session_id": _ANYTHING,
    "SessionGrant.lease": _ANYTHING,
    "RenewSessionResponse.lease": _ANYTHING,
    "RenewSessionResponse.live_sequence": _COUNT,
    "Duration.seconds": Known({"longer than a Duration": 315_576_000_001}),
    "Duration.nanos": Known({"a whole second": 1_000_000_000}),
    "DraftResponse.sequence": _COUNT,
    "DraftResponse.start_length": _COUNT,
    "DraftResponse.proposal": _ANYTHING,
    "DraftResponse.timing": _ANYTHING,
    "Proposal.token_ids": Known(_OUTSIDE),
    "Proposal.parents": Known({"itself": 2, "one that comes later": 5000}),
    "Proposal.distributions": _ANYTHING,
    "Proposal.forced": Known({"beyond the proposal": 5000}),
    "SparseDistribution.token_ids": Known(_OUTSIDE),
    "SparseDistribution.probabilities": Known({"a sum over 1": 1.5, "a sum below 1": 0.25}),
    "VerifyResponse.sequence": _COUNT,
    "VerifyResponse.prefix_length": _COUNT,
    "VerifyResponse.accepted_path": Known(
        {"beyond the proposal": 5000},
        unseen="a target's word is what accepts a token",
        unseen_kinds=frozenset(
            {
                "empty",
                "one too few",
                "one too many",
                "of another type",
                # of an empty path
                "zero",
                "one less",
                "reversed",
            }
        ),
    ),
    "VerifyResponse.next_token_id": Known(
        _OUTSIDE,
        unseen=_TOKEN.unseen,
        unseen_kinds=_TOKEN.unseen_kinds | {"missing", "of another type"},
    ),
    "VerifyResponse.logprobs": _LOGPROB,
    "VerifyResponse.held_length": _COUNT,
    "VerifyResponse.timing": _ANYTHING,
    "VerifyResponse.proposal": _ANYTHING,
    "VerifyResponse.top_logprobs": Known(
        unseen=_LOGPROB.unseen, unseen_kinds=frozenset({"reversed"})
    ),
    "DecodeResponse.sequence": _COUNT,
    "DecodeResponse.start_length": _COUNT,
    "DecodeResponse.token_ids": _TOKEN,
    "DecodeResponse.logprobs": _LOGPROB,
    "DecodeResponse.timing": _ANYTHING,
    "DecodeResponse.top_logprobs": Known(
        unseen=_LOGPROB.unseen, unseen_kinds=frozenset({"reversed"})
    ),
    "LikeliestTokens.token_ids": Known(
        _OUTSIDE,
        unseen=_LOGPROB.unseen,
        unseen_kinds=frozenset({"zero", "one", "one more", "one less", "reversed"}),
    ),
    "LikeliestTokens.logprobs": Known(
        _LOGPROB.beyond,
        unseen=_LOGPROB.unseen,
        unseen_kinds=_LOGPROB.unseen_kinds,
    ),
    "LikeliestTokens.token_bytes": _ANYTHING,
    "CallTiming.queue_ns": _COUNT,
    "CallTiming.forward_ns": _COUNT,
    "CallTiming.forward_count": _COUNT,
    "CallTiming.row_count": _COUNT,
    "CallTiming.began_early": _ANYTHING,
    "CallTiming.shared_row_count": _COUNT,
    "CallTiming.shared_call_count": _COUNT,
    "CallTiming.stages": _ANYTHING,
    "CallTiming.reused_token_count": _COUNT,
    "StageTiming.forward_count": _COUNT,
    "StageTiming.forward_ns": _COUNT,
    "HealthCheckResponse.status": _ANYTHING,
}
