"""What is asked of a model host and what it answers: plain data, between the wire and the model.

Token ids are ints in [0, vocabulary size). Positions count the prompt. Times are in nanoseconds
on the host's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from paceline_engine.terms.proposal import NOTHING, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_LEASE_SECONDS = 15.0
"""How long a session outlives its last call, if its opener does not say."""


LikeliestTokens: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and log probabilities, the likeliest first."""


class VerificationRule(Enum):
    """How draft tokens are accepted; see sampling.proto."""

    EXACT = "exact"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is chosen; limits and meaning as in sampling.proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened for; limits as in session_service.proto.

    Attributes:
        limit_length: Tokens it may grow to; None is what is reserved at once.
        owner: Who opened it; for all others it does not exist. Empty where peers have no names.
    """

    reserve_length: int
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    seed: int = 0
    rule: VerificationRule = VerificationRule.EXACT
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    request_id: str = ""
    limit_length: int | None = None
    share: str = ""
    owner: str = ""

    @property
    def longest_length(self) -> int:
        """Tokens it may grow to."""
        return self.reserve_length if self.limit_length is None else self.limit_length


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The receipt of an opened session."""

    session_id: str
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """Which session, and what it shall hold before the work; see session_service.proto.

    Attributes:
        caller: Who calls; has to be the session's owner.
    """

    session_id: str
    sequence: int
    base_length: int
    base_digest: bytes
    token_ids: Sequence[int]
    caller: str = ""

    @property
    def prefix_length(self) -> int:
        """How many tokens the session shall hold."""
        return self.base_length + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What else a verification is told.

    Attributes:
        anticipate: Whether the model shall go on by itself to the token after a correction.
        propose: Whether to return what the model itself proposes, if it can.
    """

    depth: int = 0
    logprobs: bool = False
    anticipate: bool = False
    propose: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """How far to decode, and what else is told; limits in target_service.proto.

    Attributes:
        interval_seconds: Between two answers so much time passes at least, the last ones excepted.
    """

    max_tokens: int
    end_token_ids: Sequence[int] = ()
    logprobs: bool = False
    interval_seconds: float = 0.0
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """How far to draft, and how wide; limits in drafter_service.proto.

    Attributes:
        max_tokens: Of the chain, at most.
        chunk_tokens: How many of these may travel in one answer.
        width: How many tokens to find at a place; 1: a chain.
        branch_count: How many tokens beside the chain's a forward may follow.
    """

    max_tokens: int
    chunk_tokens: int = 1
    width: int = 1
    branch_count: int = 0


@dataclass(frozen=True, slots=True)
class StageTiming:
    """What one model of a stack ran for a call."""

    forward_count: int = 0
    forward_ns: int = 0


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Where the time of a call went.

    Attributes:
        began_early: Whether the forward had begun before the call came.
        shared_row_count: Rows of its forwards in all, other calls' included.
        shared_call_count: Calls that these were of, itself included, added up over forwards.
        reused_token_count: Of a session's first call, tokens that had been computed before.
        stages: Of a stack what each model ran, largest first.
    """

    queue_ns: int = 0
    forward_ns: int = 0
    forward_count: int = 0
    row_count: int = 0
    began_early: bool = False
    shared_row_count: int = 0
    shared_call_count: int = 0
    reused_token_count: int = 0
    stages: tuple[StageTiming, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target's answer on a proposal; see VerifyResponse in target_service.proto."""

    prefix_length: int
    accepted_path: tuple[int, ...]
    next_token: int
    held_length: int
    logprobs: tuple[float, ...] = ()
    timing: CallTiming = CallTiming()
    proposal: Proposal = NOTHING
    top_logprobs: tuple[LikeliestTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded:
    """The next tokens of the model's own; see DecodeResponse in target_service.proto."""

    start_length: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    timing: CallTiming = CallTiming()
    top_logprobs: tuple[LikeliestTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafted:
    """The next draft tokens; see DraftResponse in drafter_service.proto."""

    start_length: int
    proposal: Proposal
    timing: CallTiming = CallTiming()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a model computes on; see the proto.

    Attributes:
        identity: Its name among all machines.
        share: The part of it that a forward keeps busy, in (0, 1].
    """

    identity: str
    share: float


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a loaded model is; see GetModelInfoResponse.

    Attributes:
        takes_trees: Whether one forward computes a tree; else proposals have to be chains.
        self_draft_depth: How many tokens after its own it can propose; 0: it does not.
        self_draft_kind: With what: see the proto.
        stage_names: Of a stack its models' names, largest first.
        hardware: What computes it; None where nothing does.
        fim_token_ids: Before a prefix, before a suffix, and after both; empty: it has none.
    """

    name: str
    revision: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    backend: str
    dtype: str
    device: str
    layer_count: int
    cancels_between_layers: bool
    shares_forwards: bool
    takes_trees: bool
    is_invariant: bool
    verification_rules: tuple[VerificationRule, ...]
    self_draft_depth: int = 0
    self_draft_kind: str = ""
    stage_names: tuple[str, ...] = ()
    hardware: Hardware | None = None
    fim_token_ids: tuple[int, ...] = ()
