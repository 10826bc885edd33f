"""What is asked of a model server in a session, and what it says: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from paceline_contract.proposal import NOTHING, Proposal
from paceline_protocol.task import VerificationRule

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline_orchestrator.fleet.wire import Timing

LikeliestTokens: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and log probabilities, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a session is opened for; limits and meaning as in session_service.proto.

    Attributes:
        sampling: As the client sent it: handed on unread. None is greedy.
    """

    fingerprint: str
    reserve_length: int
    limit_length: int | None = None
    sampling: object | None = None
    seed: int = 0
    rule: VerificationRule = VerificationRule.EXACT
    request_id: str = ""
    share: str = ""


@dataclass(frozen=True, slots=True)
class PrefixCall:
    """Which session, and what it shall hold before the work; see SessionCall."""

    session_id: str
    sequence: int
    base_length: int
    base_digest: bytes
    token_ids: Sequence[int]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How a proposal is to be judged; see VerifyRequest.

    Attributes:
        depth: How far this runs ahead.
        anticipate: Whether the target shall go on by itself after the verdict.
        propose: Whether it shall say what it guesses to follow, if it can.
        top_logprobs: How many of the likeliest tokens it shall tell at each decided place.
    """

    depth: int = 0
    logprobs: bool = False
    anticipate: bool = False
    propose: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How far to draft, and how broadly; see DraftRequest.

    Attributes:
        chunk_tokens: How many of its tokens may travel together.
        width: How many tokens to find at a place.
        branch_count: How many tokens beside the chain's a forward may follow.
    """

    max_tokens: int
    chunk_tokens: int = 1
    width: int = 1
    branch_count: int = 0

    @property
    def most_tokens(self) -> int:
        """The most tokens that are found; see the proto."""
        if self.width == 1:
            return self.max_tokens
        return self.max_tokens * self.width * (1 + self.branch_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """How far to decode; see DecodeRequest.

    Attributes:
        end_ids: No token comes after one of these.
        top_logprobs: How many of the likeliest tokens it shall tell at each place.
        interval_seconds: At least so much time passes between two messages.
    """

    max_tokens: int
    end_ids: Collection[int] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Judged:
    """A target's verdict, and what it took.

    Attributes:
        sequence: The call that it says it answers.
        prefix_length: The length of the prefix that it assumes.
        elapsed_ns: Since the call was sent.
        proposal: What it guesses to follow its next token.
    """

    sequence: int
    prefix_length: int
    accepted_path: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...]
    timing: Timing
    elapsed_ns: int
    proposal: Proposal = NOTHING
    top_logprobs: tuple[LikeliestTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafted:
    """Draft tokens, and what they took.

    Attributes:
        sequence: The call that they say they answer.
        start_length: How many tokens precede them; of a tree, those of its chain.
        proposal: With parents that refer to all that the call has found.
        chain: Those of its tokens that are the chain's.
        elapsed_ns: Since those before them came, or the call was sent.
    """

    sequence: int
    start_length: int
    proposal: Proposal
    timing: Timing
    elapsed_ns: int
    chain: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded:
    """A target's next tokens, and what they took.

    Attributes:
        sequence: The call that they say they answer.
        start_length: How many tokens precede them.
        elapsed_ns: Since those before them came, or the call was sent.
    """

    sequence: int
    start_length: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    timing: Timing
    elapsed_ns: int
    top_logprobs: tuple[LikeliestTokens, ...] = ()
