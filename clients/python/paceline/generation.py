"""A generation's messages as plain data, without protobuf.

Field names, units and meanings are those of orchestrator_service.proto. Positions are absolute:
they count the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

# UNKNOWN, in each enum below, is a value of a newer server that this client does not know.


class ChosenWord(StrEnum):
    """A choice of a request: made from its value or from a short word, as in `Strategy("dsi")`."""

    @classmethod
    def accepted(cls) -> dict[str, Self]:
        """Return each word that a request may say, and what it means."""
        known = [member for member in cls if member.name != "UNKNOWN"]
        return {
            word: member
            for member in known
            for word in (member.value, *_SHORT_WORDS.get(member.value, ()))
        }

    @classmethod
    def told(cls) -> str:
        """List the words, for an error message."""
        own = dict.fromkeys(member.value for member in cls.accepted().values())
        return ", ".join(
            f"{word} ({_SHORT_WORDS[word][0]})" if word in _SHORT_WORDS else word for word in own
        )

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls.accepted().get(value) if isinstance(value, str) else None


# The words of papers and of the command line.
_SHORT_WORDS = {
    "autoregressive": ("non-si",),
    "speculative": ("si",),
    "distributed": ("dsi",),
    "self_speculative": ("self", "self-si"),
    "max_gram": ("max-gram",),
    "server_and_max_gram": ("both",),
}


class Strategy(ChosenWord):
    """How a request is decoded. The output is the same with every strategy."""

    AUTO = "auto"
    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"
    DISTRIBUTED = "distributed"
    SELF_SPECULATIVE = "self_speculative"
    UNKNOWN = "unknown"

    @property
    def abbreviation(self) -> str:
        """Its name in papers and tables: non-SI, SI, DSI or self-SI; AUTO, or "unknown"."""
        return _ABBREVIATIONS.get(self, str(self))


_ABBREVIATIONS = {
    Strategy.AUTO: "AUTO",
    Strategy.AUTOREGRESSIVE: "non-SI",
    Strategy.SPECULATIVE: "SI",
    Strategy.DISTRIBUTED: "DSI",
    Strategy.SELF_SPECULATIVE: "self-SI",
}


class DrafterKind(ChosenWord):
    """The drafter: servers, Max-Gram (the text itself, without a model), or both."""

    SERVER = "server"
    MAX_GRAM = "max_gram"
    SERVER_AND_MAX_GRAM = "server_and_max_gram"
    UNKNOWN = "unknown"


class VerificationRule(ChosenWord):
    """The rule by which draft tokens are accepted; it decides the promise about the output.

    EXACT promises the target's own tokens for the seed, REJECTION the target's distribution.
    """

    EXACT = "exact"
    REJECTION = "rejection"
    UNKNOWN = "unknown"


class DispatchPolicy(ChosenWord):
    """When draft tokens are sent to targets."""

    WORK_CONSERVING = "work_conserving"
    BLOCKS = "blocks"
    UNKNOWN = "unknown"


class FinishReason(StrEnum):
    """Why a generation ended."""

    LENGTH = "length"
    EOS = "eos"
    STOP_STRING = "stop_string"
    UNKNOWN = "unknown"


class TokenOrigin(StrEnum):
    """The origin of a token: an accepted draft token, or the target's own token."""

    ACCEPTED_DRAFT = "accepted_draft"
    TARGET = "target"
    UNKNOWN = "unknown"


class TimelineEventKind(StrEnum):
    """The kind of a timeline event."""

    DRAFTED = "drafted"
    VERIFYING = "verifying"
    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first message of a generation, before any token.

    Attributes:
        seed: The seed in use; the same seed gives the same text again.
        strategy: The strategy in use; never AUTO.
        promise: The promise about the output.
        plan_note: The reason for AUTO's choice, in one line; empty without AUTO.
        width: Number of tokens that drafters find at a position; 1: chains.
        branches: Number of runners-up that each drafter forward also extends.
    """

    request_id: str
    seed: int
    model_fingerprint: str
    strategy: Strategy
    promise: VerificationRule
    prompt_token_count: int
    lookahead: int
    target_count: int
    plan_note: str
    width: int = 1
    branches: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and if requested its bytes."""

    token_id: int
    logprob: float
    token_bytes: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """Tokens of the prompt, and if requested how likely the target thinks each of them.

    `logprobs`, `top_logprobs` and `token_bytes` have one entry for each token, if they were
    requested. The prompt's first token comes in a chunk of its own, without the first two.
    """

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    token_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Final tokens and their text.

    `origins` and `text_lengths` (the characters that the token adds to `text`) have one entry for
    each token. So have, if requested, `token_bytes`, `logprobs` and `top_logprobs`: the likeliest
    tokens at the position, the likeliest first.
    """

    position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    origins: tuple[TokenOrigin, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    text_lengths: tuple[int, ...] = ()
    token_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """A draft, a verification or its result; times are ns since the request arrived.

    Attributes:
        branch_token_count: Tokens beside the chain in a draft or a verification.
        is_branch: Whether the event is a verification of tokens beside the chain.
    """

    kind: TimelineEventKind
    server: str
    start_ns: int
    end_ns: int
    position: int
    token_ids: tuple[int, ...]
    call_id: int
    speculation_depth: int
    branch_token_count: int = 0
    is_branch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens in the prompt, and tokens generated, resumed ones included.

    Attributes:
        cached_prompt_token_count: Prompt tokens that the first target had computed before, for an
            earlier request of this client.
    """

    prompt_token_count: int
    completion_token_count: int
    cached_prompt_token_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForwards:
    """The forwards of one model."""

    model_name: str
    forward_count: int
    forward_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Times and counts of a generation; of a resumed generation, of its last part.

    Attributes:
        fallbacks: Deviations from the plan, such as "target_lost", with their counts. A kind
            that this client does not know is "fallback 12".
        corrections_ahead_count: Corrections that were among the tokens beside a drafter's chain.
        branch_token_count: Judged tokens beside the chains: one row of a forward each.
        branch_accepted_count: Tokens beside the chains that became output.
        max_gram_drafted_token_count: Draft tokens that Max-Gram found in the text.
        max_gram_accepted_token_count: Max-Gram's draft tokens that became output.
        drafter_models: The drafters' forwards by model; a stack's largest model comes first.
        predicted_token_count: Tokens of `predicted_text`.
        predicted_accepted_token_count: Tokens of the answer that were drafted from it.
        forced_drafted_token_count: Draft tokens that a grammar forced, without a forward.
        forced_accepted_token_count: Tokens of the answer that a grammar had forced.
        walltime_improvement: SWI: the new tokens at the mean time of a target's forward, over the
            time in all forwards; 0 if calls were withdrawn, so that it is not known.
    """

    target_forward_count: int
    drafter_forward_count: int
    drafted_token_count: int
    accepted_token_count: int
    rejected_token_count: int
    discarded_token_count: int
    acceptance_rate: float
    cancelled_rpc_count: int
    fallbacks: dict[str, int]
    queue_ns: int
    forward_ns: int
    network_ns: int
    time_to_first_token_ns: int
    total_ns: int
    corrections_ahead_count: int = 0
    branch_token_count: int = 0
    branch_accepted_count: int = 0
    max_gram_drafted_token_count: int = 0
    max_gram_accepted_token_count: int = 0
    drafter_models: tuple[ModelForwards, ...] = ()
    walltime_improvement: float = 0.0
    predicted_token_count: int = 0
    predicted_accepted_token_count: int = 0
    forced_drafted_token_count: int = 0
    forced_accepted_token_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a generation; `timeline` is empty unless it was requested."""

    finish_reason: FinishReason
    stop_string: str
    promise: VerificationRule
    lookahead: int
    targets_used: int
    usage: Usage
    statistics: Statistics
    timeline: tuple[TimelineEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation.

    Attributes:
        resumed_token_count: Tokens from before the last part of a resumed generation.
        prompt_chunks: The prompt's tokens, if `prompt_logprobs` or `include_prompt` was set.
    """

    started: Started
    chunks: tuple[Chunk, ...]
    finished: Finished
    resumed_token_count: int = 0
    prompt_chunks: tuple[PromptChunk, ...] = ()

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A model server, as the orchestrator describes it.

    Attributes:
        role: "drafter" or "target". A role that this client does not know is "role 12".
        ready: Whether the server may get new requests.
        status: Why it may not, in one line.
        self_draft_kind: The kind of adapter with which it drafts for itself, such as "medusa".
        is_invariant: Whether its logits for a sequence depend on this sequence alone, bit by bit.
        standing: "used", "resting", or in one word why the server is not used, such as
            "other_dtype". A word that this client does not know is "standing 99". Empty: the
            orchestrator is older than this field.
        standing_detail: The rest of a sentence that begins with the server's name; may be empty.
    """

    name: str
    address: str
    role: str
    ready: bool
    status: str
    model_fingerprint: str
    decode_step_ns: int
    self_draft_kind: str = ""
    is_invariant: bool = False
    standing: str = ""
    standing_detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemInfo:
    """The models and servers of an orchestrator.

    Attributes:
        most_request_bytes: The largest request that it takes; 0: not known.
        sampling_defaults: What the model's authors want for options of the same names.
        lora_adapters: The LoRA adapters that can be asked for (`lora`): the model's fingerprint
            with each, by the adapter's name.
    """

    version: str
    model_name: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    context_length: int
    servers: tuple[ServerInfo, ...]
    running_request_count: int
    most_request_bytes: int = 0
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    lora_adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """The tokens of a text, and if requested the bytes of each."""

    token_ids: tuple[int, ...]
    token_bytes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """The template by which a model wants a conversation written as a prompt.

    Generate from the rendered text with `add_special_tokens=False, parse_special_tokens=True`.

    Attributes:
        fingerprint: Identifies the template, for example as a key in a cache.
        source: A Jinja template. It is a program of the model's author: run it in a sandbox.
        named_tokens: Texts of tokens by their names in the source, such as "bos_token".
        special_tokens: The texts of all special tokens. A message with one could forge the rest.
        added_token_ids: The ids of the tokens that are found in a text as a whole, by their texts;
            empty from an older server.
    """

    model_fingerprint: str
    fingerprint: str
    source: str
    named_tokens: dict[str, str]
    special_tokens: tuple[str, ...]
    added_token_ids: dict[str, int] = field(default_factory=dict)
