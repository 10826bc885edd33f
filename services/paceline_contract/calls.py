"""What an orchestrator asks of a model server in a session, as plain data.

Token ids are ints in [0, vocabulary size). Positions count the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

LikeliestTokens: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and log probabilities, the likeliest first."""


class VerificationRule(Enum):
    """How targets judge draft tokens; see sampling.proto.

    Under EXACT the token after a prefix is a function of the prefix, so every verdict about it is
    the same. Under REJECTION it also depends on which draft token was judged there, if any.
    """

    EXACT = "exact"
    REJECTION = "rejection"


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """Which session, and which tokens it shall hold before the work; see SessionCall.

    Attributes:
        fingerprint: The model that the session is meant to be of.
        lora: The LoRA adapter that the session is meant to have, as the server calls it.
        caller: Who calls, as the server knows it; has to be the session's owner.
    """

    session_id: str
    sequence: int
    base_length: int
    base_digest: bytes
    token_ids: Sequence[int]
    fingerprint: str = ""
    caller: str = ""
    lora: str = ""

    @property
    def prefix_length(self) -> int:
        """How many tokens the session shall hold."""
        return self.base_length + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How a proposal is judged; see VerifyRequest.

    Attributes:
        depth: How many verifications this one runs ahead of.
        anticipate: Whether the model goes on by itself to the token after a correction.
        propose: Whether the answer says what the model itself proposes, if it can.
        top_logprobs: How many of the likeliest tokens to tell at each decided position.
        score: Whether to accept the proposal as it is, and only to tell how likely its tokens are.
    """

    depth: int = 0
    logprobs: bool = False
    anticipate: bool = False
    propose: bool = False
    top_logprobs: int = 0
    score: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How far to draft, and how wide; see DraftRequest.

    Attributes:
        max_tokens: The most tokens of the chain.
        chunk_tokens: How many of these may travel in one answer.
        width: How many tokens to find at a place; 1: a chain.
        branch_count: How many tokens beside the chain's a forward may follow.
    """

    max_tokens: int
    chunk_tokens: int = 1
    width: int = 1
    branch_count: int = 0

    @property
    def most_tokens(self) -> int:
        """The most tokens that are found, beside the chain too."""
        if self.width == 1:
            return self.max_tokens
        return self.max_tokens * self.width * (1 + self.branch_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How far to decode; see DecodeRequest.

    Attributes:
        end_token_ids: No token comes after one of these.
        interval_seconds: The least time between two answers, the last ones excepted.
        top_logprobs: How many of the likeliest tokens to tell at each position.
    """

    max_tokens: int
    end_token_ids: Collection[int] = ()
    logprobs: bool = False
    interval_seconds: float = 0.0
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class StageTiming:
    """What one model of a stack ran for a call."""

    forward_count: int = 0
    forward_ns: int = 0


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Where a call's time went, as the server saw it.

    Attributes:
        began_early: Whether the forward had begun before the call came.
        shared_row_count: All rows of the call's forwards, other calls' included.
        shared_call_count: The calls in each of these forwards, added up.
        reused_token_count: Tokens of the prefix that were computed for an earlier session.
        stages: What each model of a stack ran, largest first; else empty.
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


NO_TIMING = CallTiming()


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a model computes on; see GetModelInfoResponse.

    Attributes:
        identity: Its name among all machines.
        share: The part of it that a forward keeps busy, in (0, 1].
    """

    identity: str
    share: float
