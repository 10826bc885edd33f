"""What a model server may say, and what is made of it when it says something else.

A model server is not trusted: it may be of another version, broken, or not ours. So this module
holds an answer against what the protos promise before anything is made of it. A breach is a
`BadAnswerError`: it costs that server a pause, unless it is the request's own fault (see
`decoding/doubts.py`), the request a fallback, and nobody else anything.
What is special to the answers of a session is in `decoding/answers.py`.

Lengths come first: whatever a check looks at one by one is known to be short by then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paceline.errors import TryAgainError
from paceline_contract.limits import (
    LEASE_SECONDS,
    MOST_ADDED_TOKEN_CHARACTERS,
    MOST_ADDED_TOKENS,
    MOST_CHAT_TEMPLATE_BYTES,
    MOST_CONFIGURATION_CHARACTERS,
    MOST_DISTRIBUTION_ENTRIES,
    MOST_END_TOKENS,
    MOST_LORA_ADAPTERS,
    MOST_MODEL_NAME_CHARACTERS,
    SUM_TOLERANCE,
)
from paceline_contract.names import is_name
from paceline_contract.sampling import SAMPLING_INTERVALS, Interval

if TYPE_CHECKING:
    from collections.abc import Sequence, Sized

    from google.protobuf.duration_pb2 import Duration

    from paceline.v1 import model_service_pb2 as pb
    from paceline.v1.proposal_pb2 import Proposal
    from paceline.v1.session_service_pb2 import CallTiming, SessionGrant

# Characters of each text that a server says of its model.
_TEXTS = {
    "model_name": MOST_MODEL_NAME_CHARACTERS,
    "fingerprint": 256,
    "tokenizer_fingerprint": 64,
    "self_draft_kind": 64,
    "incarnation": 64,
    "dtype": 64,
    "version": 64,
    "grammar_engine": 64,
    "configuration": MOST_CONFIGURATION_CHARACTERS,
}
_MOST_VOCABULARY = 1 << 24
_MOST_CONTEXT = 1 << 30
_FIM_TOKENS = 3
_MOST_LATENCIES = 64
_MOST_STAGES = 16
_MOST_RULES = 16
_MOST_PARAMETERS = 64
_MOST_DEPTH = 1024
_MOST_IDENTITY_CHARACTERS = 64
_LONGEST_FORWARD_NS = 3600 * 10**9
_LONGEST_CALL_NS = 24 * 3600 * 10**9
_MOST_FORWARDS = 1 << 20
_MOST_HANDLE_CHARACTERS = 256
_MOST_NAMED_TOKENS = 256
_MOST_SPECIAL_TOKENS = 1 << 16


class BadAnswerError(TryAgainError):
    """A server answered what its contract forbids: ask another one.

    It has no reason on the wire, for no client ever sees it. Its message names the field and the
    rule, and has nothing of what the server said: neither its length nor its words.
    """


def demand(is_so: bool, field: str, rule: str) -> None:
    """Refuse an answer whose field breaks a rule.

    Raises:
        BadAnswerError: It does.
    """
    if not is_so:
        raise BadAnswerError(f"{field} {rule}")


def at_most(field: str, entries: Sized, most: int) -> None:
    """Refuse a list that is too long, whatever is in it.

    Raises:
        BadAnswerError: It has more than so many entries.
    """
    if len(entries) > most:
        raise BadAnswerError(f"{field} has more than {most} entries")


def check_model_info(info: pb.GetModelInfoResponse) -> None:
    """Check what is read of what a server says of its model.

    Raises:
        BadAnswerError: A field is out of its limits.
    """
    for field, most in _TEXTS.items():
        _in_range(f"the length of {field}", len(getattr(info, field)), least=0, most=most)
    demand(bool(info.fingerprint), "fingerprint", "is missing")
    _in_range("vocabulary_size", info.vocabulary_size, least=1, most=_MOST_VOCABULARY)
    _in_range("context_length", info.context_length, least=1, most=_MOST_CONTEXT)
    at_most("eos_token_ids", info.eos_token_ids, MOST_END_TOKENS)
    demand(
        all(it < info.vocabulary_size for it in info.eos_token_ids),
        "eos_token_ids",
        "are not all of the vocabulary",
    )
    demand(len(info.fim_token_ids) in {0, _FIM_TOKENS}, "fim_token_ids", "are not none or three")
    demand(
        all(it < info.vocabulary_size for it in info.fim_token_ids),
        "fim_token_ids",
        "are not all of the vocabulary",
    )
    at_most("verification_rules", info.verification_rules, _MOST_RULES)
    _check_latencies(info.forward_latencies)
    _in_range("prefill_fixed_ns", info.prefill_fixed_ns, least=0, most=_LONGEST_FORWARD_NS)
    _in_range("prefill_ns_per_token", info.prefill_ns_per_token, least=0, most=_LONGEST_FORWARD_NS)
    _in_range("tree_token_limit", info.tree_token_limit, least=0, most=_MOST_CONTEXT)
    _in_range("tree_depth_limit", info.tree_depth_limit, least=0, most=_MOST_CONTEXT)
    _in_range("self_draft_depth", info.self_draft_depth, least=0, most=_MOST_DEPTH)
    at_most("stages", info.stages, _MOST_STAGES)
    for stage in info.stages:
        _in_range(
            "the length of stages.model_name",
            len(stage.model_name),
            least=0,
            most=_TEXTS["model_name"],
        )
    _check_hardware(info.hardware)
    _check_sampling_defaults(info)
    _check_sampling_parameters(info.sampling_parameters)
    _check_lora_adapters(info.lora_adapters)


def _check_lora_adapters(adapters: Sequence[pb.LoraAdapter]) -> None:
    at_most("lora_adapters", adapters, MOST_LORA_ADAPTERS)
    for each in adapters:
        demand(bool(each.name) and is_name(each.name), "lora_adapters.name", "is no name")
        length = len(each.fingerprint)
        most = _TEXTS["fingerprint"]
        _in_range("the length of lora_adapters.fingerprint", length, least=1, most=most)
    names = {each.name for each in adapters}
    demand(len(names) == len(adapters), "lora_adapters.name", "is there twice")


def _check_sampling_defaults(info: pb.GetModelInfoResponse) -> None:
    said = {field.name: value for field, value in info.sampling_defaults.ListFields()}
    limits = {**SAMPLING_INTERVALS, "top_k": Interval(0, info.vocabulary_size)}
    for name, value in said.items():
        demand(value in limits[name], f"sampling_defaults.{name}", f"is not in {limits[name]}")


def _check_sampling_parameters(names: Sequence[str]) -> None:
    at_most("sampling_parameters", names, _MOST_PARAMETERS)
    for each in names:
        demand(bool(each) and is_name(each), "sampling_parameters", "has what is no name")


def check_timing(timing: CallTiming) -> None:
    """Check where a server says that a call's time went.

    Raises:
        BadAnswerError: A field is out of its limits.
    """
    _in_range("timing.queue_ns", timing.queue_ns, least=0, most=_LONGEST_CALL_NS)
    _in_range("timing.forward_ns", timing.forward_ns, least=0, most=_LONGEST_CALL_NS)
    _in_range("timing.forward_count", timing.forward_count, least=0, most=_MOST_FORWARDS)
    _in_range("timing.row_count", timing.row_count, least=0, most=_MOST_CONTEXT)
    _in_range("timing.shared_row_count", timing.shared_row_count, least=0, most=_MOST_CONTEXT)
    _in_range("timing.shared_call_count", timing.shared_call_count, least=0, most=_MOST_CONTEXT)
    _in_range("timing.reused_token_count", timing.reused_token_count, least=0, most=_MOST_CONTEXT)
    if timing.stages:
        at_most("timing.stages", timing.stages, _MOST_STAGES)
        for stage in timing.stages:
            _in_range("timing.stages.forward_ns", stage.forward_ns, least=0, most=_LONGEST_CALL_NS)
            _in_range(
                "timing.stages.forward_count", stage.forward_count, least=0, most=_MOST_FORWARDS
            )


def check_proposal_lengths(proposal: Proposal, *, most: int) -> None:
    """Check how long the lists of a proposal are: of at most so many tokens.

    Raises:
        BadAnswerError: One is longer than it may be.
    """
    at_most("proposal.token_ids", proposal.token_ids, most)
    at_most("proposal.parents", proposal.parents, len(proposal.token_ids))
    at_most("proposal.distributions", proposal.distributions, len(proposal.token_ids))
    at_most("proposal.forced", proposal.forced, len(proposal.token_ids))


def check_distribution(distribution: Any, *, token_id: int, vocabulary_size: int) -> None:
    """Check what a draft token is said to be drawn from, as the target that gets it will.

    Cost: some 0.4 ms for 4096 entries, a few us for 50.

    Raises:
        BadAnswerError: It is no distribution, or the token cannot be drawn from it.
    """
    count = len(distribution.token_ids)
    demand(
        1 <= count == len(distribution.probabilities) <= MOST_DISTRIBUTION_ENTRIES,
        "proposal.distributions",
        f"has other than 1 to {MOST_DISTRIBUTION_ENTRIES} tokens with one probability each",
    )
    # As lists: each look at a message's own fields makes new numbers of all of them.
    ids, probabilities = list(distribution.token_ids), list(distribution.probabilities)
    demand(
        max(ids) < vocabulary_size and len(set(ids)) == len(ids) and token_id in ids,
        "proposal.distributions.token_ids",
        "are not distinct tokens of the vocabulary, the drafted one among them",
    )
    demand(
        # With a NaN or an infinity among them, the sum is one, too.
        min(probabilities) > 0 and abs(sum(probabilities) - 1) <= SUM_TOLERANCE,
        "proposal.distributions.probabilities",
        "are not above 0 with a sum of 1",
    )


def check_grant(grant: SessionGrant) -> None:
    """Check the receipt of an opened session.

    Raises:
        BadAnswerError: A field is out of its limits.
    """
    _in_range(
        "the length of session_id", len(grant.session_id), least=1, most=_MOST_HANDLE_CHARACTERS
    )
    check_lease(grant.lease)


def check_lease(lease: Duration) -> None:
    """Check for how long a session is kept.

    Raises:
        BadAnswerError: It is out of its limits.
    """
    least, most = LEASE_SECONDS
    seconds = lease.seconds + lease.nanos / 1e9
    demand(least <= seconds <= most, "lease", f"is not in [{least}, {most}] seconds")


def check_chat_template(template: pb.ChatTemplate) -> None:
    """Check how a server says that its model wants conversations.

    Raises:
        BadAnswerError: A field is out of its limits.
    """
    _in_range("the length of fingerprint", len(template.fingerprint), least=1, most=64)
    _in_range(
        "the length of source",
        len(template.source.encode()),
        least=1,
        most=MOST_CHAT_TEMPLATE_BYTES,
    )
    at_most("named_tokens", template.named_tokens, _MOST_NAMED_TOKENS)
    at_most("special_tokens", template.special_tokens, _MOST_SPECIAL_TOKENS)
    at_most("added_token_ids", template.added_token_ids, MOST_ADDED_TOKENS)
    for field, texts in (
        ("named_tokens", template.named_tokens),
        ("named_tokens", template.named_tokens.values()),
        ("special_tokens", template.special_tokens),
        ("added_token_ids", template.added_token_ids),
    ):
        longest = max(map(len, texts), default=0)
        _in_range(f"the length of {field}", longest, least=0, most=MOST_ADDED_TOKEN_CHARACTERS)


def _check_latencies(latencies: Sequence[pb.ForwardLatency]) -> None:
    at_most("forward_latencies", latencies, _MOST_LATENCIES)
    before = 0
    for each in latencies:
        demand(each.rows > before, "forward_latencies.rows", "do not ascend from 1 on")
        _in_range("forward_latencies.median_ns", each.median_ns, least=0, most=_LONGEST_FORWARD_NS)
        before = each.rows


def _check_hardware(hardware: pb.Hardware) -> None:
    if not hardware.identity:
        return  # it does not say
    length = len(hardware.identity)
    _in_range("the length of hardware.identity", length, least=1, most=_MOST_IDENTITY_CHARACTERS)
    is_part = math.isfinite(hardware.share) and 0 < hardware.share <= 1
    demand(is_part, "hardware.share", "is not in (0, 1]")


def _in_range(field: str, value: int, *, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadAnswerError(f"{field} is not in [{least}, {most}]")
