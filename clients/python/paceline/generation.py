"""What a client hears of a generation: plain data, without protobuf.

Field names, units and meanings are those of orchestrator_service.proto. Positions are absolute:
they count the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# UNKNOWN, in each enum below, is what a newer server says and this client has no word for.


class Strategy(StrEnum):
    """How a request is decoded. The output is the same with every one."""

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


class DrafterKind(StrEnum):
    """Who drafts: servers, Max-Gram (the text itself, without a model), or both."""

    SERVER = "server"
    MAX_GRAM = "max_gram"
    SERVER_AND_MAX_GRAM = "server_and_max_gram"
    UNKNOWN = "unknown"


class VerificationRule(StrEnum):
    """How draft tokens are accepted, and with it what the output promises.

    EXACT promises the target's own tokens for the seed, REJECTION the target's distribution.
    """

    EXACT = "exact"
    REJECTION = "rejection"
    UNKNOWN = "unknown"


class DispatchPolicy(StrEnum):
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
    """Where a token came from: a drafter's guess, or the target itself."""

    ACCEPTED_DRAFT = "accepted_draft"
    TARGET = "target"
    UNKNOWN = "unknown"


class TimelineEventKind(StrEnum):
    """What a timeline event tells of."""

    DRAFTED = "drafted"
    VERIFYING = "verifying"
    ACCEPTED = "accepted"
    CORRECTED = "corrected"
    DISCARDED = "discarded"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the generation will be; told before any token.

    Attributes:
        seed: The seed in use: with it the same text can be had again.
        strategy: The strategy in use; never AUTO.
        promise: What the output promises.
        plan_note: Why AUTO chose so, in one line; else empty.
        width: How many tokens drafters find at a place; 1: chains.
        branches: How many tokens beside the likeliest ones each drafter forward follows.
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
    """A token, and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Final tokens and their text.

    `origins` and `text_lengths` (the characters of `text` that it adds) have one for each and, if
    asked for, `logprobs` and `top_logprobs`: what was likeliest at its place, the likeliest first.
    """

    position: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    origins: tuple[TokenOrigin, ...]
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    text_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """A draft, a verification, or what became of them, in ns since the request arrived.

    Attributes:
        branch_token_count: Tokens beside the chain that a draft found, or a verification judges.
        is_branch: Whether it is a verification of what is beside the chain.
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
        cached_prompt_token_count: Of the prompt's, those that the target which decided first had
            computed before, for an earlier request of this client.
    """

    prompt_token_count: int
    completion_token_count: int
    cached_prompt_token_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForwards:
    """What a model ran."""

    model_name: str
    forward_count: int
    forward_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What it took. Of a resumed generation: what its last part took.

    Attributes:
        fallbacks: What went otherwise than planned, such as "target_lost", and how often. A kind
            that this client does not know is "fallback 12".
        corrections_ahead_count: Corrections that a drafter had found beside its chain.
        branch_token_count: Tokens beside the chains that targets judged: a row each.
        branch_accepted_count: Those of them that became output.
        max_gram_drafted_token_count: Of the draft tokens, those that Max-Gram found in the text.
        max_gram_accepted_token_count: Of those, how many are what became output.
        drafter_models: The drafters' forwards by model, of a stack the largest model first.
        walltime_improvement: SWI: the new tokens at the mean time of a target's forward, over the
            time in all forwards; 0 where it is not known, since calls were withdrawn.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a generation; `timeline` is there if asked for."""

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
        resumed_token_count: Of a resumed generation: tokens from before its last part.
    """

    started: Started
    chunks: tuple[Chunk, ...]
    finished: Finished
    resumed_token_count: int = 0

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
    """A model server as the orchestrator sees it.

    Attributes:
        role: "drafter" or "target". A role that this client does not know is "role 12".
        ready: Whether new requests may get it.
        status: Why not, in one line.
        self_draft_kind: What it drafts for itself with, such as "medusa"; empty if it does not.
        is_invariant: Whether its choices are the same bit by bit, whatever it computes beside.
        standing: In one word whether it is "used", "resting", or not used and why, such as
            "other_dtype"; a word that this client does not know is "standing 99". Empty: the
            orchestrator is too old to say.
        standing_detail: More on that, for people, mostly about "it"; may be empty.
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
    """What an orchestrator works with.

    Attributes:
        most_request_bytes: The largest request that it takes; 0 where it does not say.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """How a model wants a conversation written as a prompt.

    Generate from the rendered text with `add_special_tokens=False, parse_special_tokens=True`.

    Attributes:
        fingerprint: Names the template; what is made of it can be kept under that.
        source: A Jinja template; a program of the model's author, for a sandbox.
        named_tokens: Texts of tokens by their names in the source, such as "bos_token".
        special_tokens: The texts of all special tokens: one in a message could forge the rest.
    """

    model_fingerprint: str
    fingerprint: str
    source: str
    named_tokens: dict[str, str]
    special_tokens: tuple[str, ...]
