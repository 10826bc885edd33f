"""The limits of every field that reaches the engine, as the protos state them.

Field names are paths as in the protos. The functions are quick enough for the event loop, except
`check_distributions`, which runs on the worker thread before the forward.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError, ModelMismatchError, UnsupportedError
from paceline_contract.calls import (
    DecodeOptions,
    DraftOptions,
    PrefixCall,
    VerificationRule,
    VerifyOptions,
)
from paceline_contract.limits import (
    LEASE_SECONDS,
    MOST_BIAS,
    MOST_BIASED_TOKENS,
    MOST_BRANCHES,
    MOST_CHUNK_TOKENS,
    MOST_DISTRIBUTION_ENTRIES,
    MOST_END_TOKENS,
    MOST_PROPOSAL_TOKENS,
    MOST_TOP_LOGPROBS,
    MOST_WIDTH,
    SUM_TOLERANCE,
    most_scored_tokens,
)
from paceline_contract.names import NAME_RULE, is_name
from paceline_contract.sampling import SAMPLING_INTERVALS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.proposal import Proposal
    from paceline_contract.sampling import SamplingParameters
    from paceline_engine.terms.calls import ModelDescription, SessionSpec

MOST_TOKENS = MOST_PROPOSAL_TOKENS
"""The most tokens of a proposal, of a draft's window, and of a Decode."""

MOST_TREE_TOKENS = 256
"""The most tokens of a tree: the cost of more rows in a forward hardly ever pays."""

MOST_TREE_DEPTH = 64
"""The most tokens of a tree's path; no block is longer (`MOST_LOOKAHEAD`)."""

MOST_DRAFTED = 8192
"""The most tokens that a draft may find, runners-up included: each step reads all of them."""

MOST_ENTRIES = MOST_DISTRIBUTION_ENTRIES
"""The most tokens that a distribution may name."""

_SEED_LIMIT = 1 << 53
_SEQUENCE_LIMIT = 1 << 64
_DIGEST_BYTES = 16
_MAX_DEPTH = 65535
_LONGEST_INTERVAL_SECONDS = 1


def check_spec(spec: SessionSpec, model: ModelDescription) -> None:
    """Check a session's specification.

    Raises:
        InvalidFieldError: a field is out of its limits.
        UnsupportedError: the model does not know the verification rule or a sampling parameter.
        ModelMismatchError: the model has no such LoRA adapter.
    """
    check_sampling("spec.sampling", spec.sampling, vocabulary_size=model.vocabulary_size)
    _check("spec.seed", spec.seed, low=0, high=_SEED_LIMIT - 1)
    _check("spec.reserve_length", spec.reserve_length, low=1, high=model.context_length)
    _check(
        "spec.limit_length", spec.longest_length, low=spec.reserve_length, high=model.context_length
    )
    shortest, longest = LEASE_SECONDS
    _check("spec.lease", spec.lease_seconds, low=shortest, high=longest, unit=" seconds")
    _check_name("spec.request_id", spec.request_id)
    _check_name("spec.share", spec.share)
    _check("spec.prompt_length", spec.prompt_length, low=0, high=spec.longest_length)
    _check_end_tokens(
        "spec.end_token_ids", spec.end_token_ids, vocabulary_size=model.vocabulary_size
    )
    if spec.lora and spec.lora not in dict(model.lora_fingerprints):
        raise ModelMismatchError(
            f"this server has no LoRA adapter {spec.lora!r}",
            metadata={"fingerprint": model.fingerprint},
        )
    if unknown := spec.sampling.used - model.sampling_parameters:
        raise UnsupportedError(f"spec.sampling.{min(unknown)}: this model does not apply it")
    if spec.sampling.shapes and not spec.prompt_length:
        # A caller that does not know these parameters hands them on without it.
        raise InvalidFieldError.of("spec.prompt_length", "is required with biases or penalties")
    # At temperature 0 every rule is EXACT.
    if spec.rule not in model.verification_rules and spec.sampling.temperature > 0:
        raise UnsupportedError(f"this model has no verification rule {spec.rule.name}")


def check_sampling(field: str, sampling: SamplingParameters, *, vocabulary_size: int) -> None:
    """Check sampling parameters; `field` is the path of their message."""
    for name, interval in SAMPLING_INTERVALS.items():
        if (value := getattr(sampling, name)) not in interval:
            raise InvalidFieldError.of(f"{field}.{name}", f"{value} is not in {interval}")
    _check(f"{field}.top_k", sampling.top_k, low=0, high=vocabulary_size)
    _check_biases(f"{field}.logit_bias", sampling.logit_bias, vocabulary_size=vocabulary_size)


def _check_biases(field: str, biases: Sequence[tuple[int, float]], *, vocabulary_size: int) -> None:
    if len(biases) > MOST_BIASED_TOKENS:
        raise InvalidFieldError.of(
            field, f"has {len(biases)} tokens, at most {MOST_BIASED_TOKENS} are allowed"
        )
    for token, bias in biases:
        _check(f"{field}[{token}]", token, low=0, high=vocabulary_size - 1)
        _check(f"{field}[{token}]", bias, low=-MOST_BIAS, high=MOST_BIAS)


def _check_end_tokens(field: str, token_ids: Sequence[int], *, vocabulary_size: int) -> None:
    if len(token_ids) > MOST_END_TOKENS:
        raise InvalidFieldError.of(
            field, f"has {len(token_ids)} tokens, at most {MOST_END_TOKENS} are allowed"
        )
    _check_token_ids(field, token_ids, vocabulary_size=vocabulary_size)


def check_call(call: PrefixCall, *, limit_length: int, vocabulary_size: int) -> None:
    """Check the part that Decode, Draft and Verify share."""
    _check("call.sequence", call.sequence, low=1, high=_SEQUENCE_LIMIT - 1)
    _check("call.base_length", call.base_length, low=0, high=limit_length)
    if len(call.base_digest) != _DIGEST_BYTES and (call.base_digest or call.base_length):
        raise InvalidFieldError.of(
            "call.base_digest", f"has {len(call.base_digest)} bytes, not {_DIGEST_BYTES}"
        )
    if call.prefix_length < 1:
        raise InvalidFieldError.of("call.token_ids", "the prefix is empty")
    # Lengths come first, because to check every token of a far too long list takes long.
    _check_fits("call.token_ids", call.prefix_length, limit_length)
    _check_token_ids("call.token_ids", call.token_ids, vocabulary_size=vocabulary_size)


def check_proposal(
    call: PrefixCall,
    proposal: Proposal,
    *,
    options: VerifyOptions,
    spec: SessionSpec,
    model: ModelDescription,
) -> None:
    """Check the fields of Verify, except the contents of distributions.

    Raises:
        InvalidFieldError: a field is out of its limits.
        UnsupportedError: it is a tree, and the rule or the model judges chains only.
    """
    token_count = len(proposal)
    if options.score:
        _check_scoring(proposal, model=model)
    if token_count > MOST_TOKENS:
        raise InvalidFieldError.of(
            "proposal.token_ids",
            f"has {token_count} tokens, at most {MOST_TOKENS} are allowed",
        )
    _check_parents(proposal)
    _check_fits("proposal.token_ids", call.prefix_length + proposal.depth, spec.longest_length)
    _check_token_ids(
        "proposal.token_ids", proposal.token_ids, vocabulary_size=model.vocabulary_size
    )
    _check("speculation_depth", options.depth, low=0, high=_MAX_DEPTH)
    _check("top_logprobs", options.top_logprobs, low=0, high=MOST_TOP_LOGPROBS)
    is_judged = spec.rule is VerificationRule.REJECTION and not options.score
    needed = token_count if is_judged else 0
    if len(proposal.distributions) != needed:
        raise InvalidFieldError.of(
            "proposal.distributions",
            f"has {len(proposal.distributions)} entries, {needed} are needed"
            + (" with score" if options.score else f" under {spec.rule.name}"),
        )
    if not proposal.is_chain:
        _check_tree(proposal)
        if spec.rule is VerificationRule.REJECTION:
            raise UnsupportedError("proposal.parents: under REJECTION only chains are judged")
        if not model.takes_trees:
            raise UnsupportedError("proposal.parents: this model judges chains only")


def _check_scoring(proposal: Proposal, *, model: ModelDescription) -> None:
    if not model.scores_prompts:
        raise UnsupportedError("score: this model has no log probabilities of given tokens")
    most = most_scored_tokens(model.vocabulary_size)
    if not 1 <= len(proposal) <= most:
        raise InvalidFieldError.of(
            "proposal.token_ids", f"has {len(proposal)} tokens, with score 1 to {most} are allowed"
        )
    if not proposal.is_chain:
        raise InvalidFieldError.of("proposal.parents", "must make a chain with score")


def _check_parents(proposal: Proposal) -> None:
    if proposal.parents and len(proposal.parents) != len(proposal):
        raise InvalidFieldError.of(
            "proposal.parents",
            f"has {len(proposal.parents)} entries, as many as tokens are needed: {len(proposal)}",
        )
    for place, parent in enumerate(proposal.parents):
        # The i-th token's number is i + 1, so a parent is at most the token before.
        _check(f"proposal.parents[{place}]", parent, low=0, high=place)


def _check_tree(tree: Proposal) -> None:
    if len(tree) > MOST_TREE_TOKENS:
        raise InvalidFieldError.of(
            "proposal.token_ids",
            f"has {len(tree)} tokens, a tree may have {MOST_TREE_TOKENS}",
        )
    if tree.depth > MOST_TREE_DEPTH:
        raise InvalidFieldError.of(
            "proposal.parents",
            f"make a path of {tree.depth} tokens, a tree's may have {MOST_TREE_DEPTH}",
        )
    seen: set[tuple[int, int]] = set()
    for place, child in enumerate(zip(tree.parents, tree.token_ids, strict=True)):
        if child in seen:
            raise InvalidFieldError.of(
                f"proposal.token_ids[{place}]", f"{child[1]} follows the same token twice"
            )
        seen.add(child)


def check_distributions(proposal: Proposal, *, vocabulary_size: int) -> None:
    """Check the distributions that draft tokens were drawn from, one for each.

    Cost: about 0.1 ms for each 2000 entries.
    """
    drawn = zip(proposal.token_ids, proposal.distributions, strict=True)
    for index, (token, drawn_from) in enumerate(drawn):
        field = f"proposal.distributions[{index}]"
        ids, probabilities = drawn_from.token_ids, drawn_from.probabilities
        if not 1 <= len(ids) <= MOST_ENTRIES or len(ids) != len(probabilities):
            raise InvalidFieldError.of(
                field,
                f"has {len(ids)} token_ids and {len(probabilities)} probabilities, must have as "
                f"many of both, 1 to {MOST_ENTRIES}",
            )
        _check_token_ids(f"{field}.token_ids", ids, vocabulary_size=vocabulary_size)
        if len(set(ids)) != len(ids):
            raise InvalidFieldError.of(f"{field}.token_ids", "must be distinct")
        total = math.fsum(probabilities) if all(map(math.isfinite, probabilities)) else math.nan
        if not (min(probabilities) > 0 and abs(total - 1) <= SUM_TOLERANCE):
            raise InvalidFieldError.of(
                f"{field}.probabilities",
                f"must be above 0 and sum to 1 within {SUM_TOLERANCE}, not to {total}",
            )
        if token not in ids:
            raise InvalidFieldError.of(
                f"{field}.token_ids", "must contain the draft token, which was drawn from it"
            )


def check_decoding(
    call: PrefixCall, options: DecodeOptions, *, limit_length: int, vocabulary_size: int
) -> None:
    """Check the fields of Decode."""
    _check("max_tokens", options.max_tokens, low=1, high=MOST_TOKENS)
    _check_fits("max_tokens", call.prefix_length + options.max_tokens, limit_length)
    _check_end_tokens("end_token_ids", [*options.end_token_ids], vocabulary_size=vocabulary_size)
    _check("top_logprobs", options.top_logprobs, low=0, high=MOST_TOP_LOGPROBS)
    _check(
        "message_interval",
        options.interval_seconds,
        low=0,
        high=_LONGEST_INTERVAL_SECONDS,
        unit=" seconds",
    )


def check_drafting(
    call: PrefixCall, options: DraftOptions, *, spec: SessionSpec, model: ModelDescription
) -> None:
    """Check the fields of Draft.

    Raises:
        InvalidFieldError: a field is out of its limits.
        UnsupportedError: it is a tree, and the rule or the model drafts chains only.
    """
    _check("max_tokens", options.max_tokens, low=1, high=MOST_TOKENS)
    _check("chunk_tokens", options.chunk_tokens, low=1, high=MOST_CHUNK_TOKENS)
    _check_fits("max_tokens", call.prefix_length + options.max_tokens, spec.longest_length)
    _check("width", options.width, low=1, high=MOST_WIDTH)
    _check("branch_count", options.branch_count, low=0, high=MOST_BRANCHES)
    if options.width == 1:
        return
    token_count = options.max_tokens * options.width * (1 + options.branch_count)
    if token_count > MOST_DRAFTED:
        raise InvalidFieldError.of(
            "width", f"would make up to {token_count} tokens, a draft may find {MOST_DRAFTED}"
        )
    if spec.rule is VerificationRule.REJECTION:
        raise UnsupportedError("width: under REJECTION only chains are drafted")
    if not model.takes_trees:
        raise UnsupportedError("width: this model drafts chains only")


def _check(field: str, value: float, *, low: float, high: float, unit: str = "") -> None:
    # Written so that NaN, which compares false, is refused.
    if not low <= value <= high:
        raise InvalidFieldError.of(field, f"{value} is not in [{low}, {high}]{unit}")


def _check_name(field: str, name: str) -> None:
    if not is_name(name):
        raise InvalidFieldError.of(field, f"must be {NAME_RULE}")


def _check_token_ids(field: str, token_ids: Sequence[int], *, vocabulary_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
        index, token = next(
            (index, token)
            for index, token in enumerate(token_ids)
            if not 0 <= token < vocabulary_size
        )
        raise InvalidFieldError.of(
            f"{field}[{index}]", f"{token} is not in [0, {vocabulary_size - 1}]"
        )


def _check_fits(field: str, length: int, limit_length: int) -> None:
    if length > limit_length:
        raise InvalidFieldError.of(
            field, f"would make {length} tokens, the session may have {limit_length}"
        )
