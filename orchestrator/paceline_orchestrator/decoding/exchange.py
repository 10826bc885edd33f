"""What is asked of a model server in a session, and what it says: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING, Proposal

if TYPE_CHECKING:
    from paceline_contract.calls import CallTiming, LikeliestTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a session is opened for; limits and meaning as in session_service.proto.

    Attributes:
        sampling: As the client sent it: handed on without `sampling_left_out`. None is greedy.
        sampling_used: The names of its fields that may change something.
        sampling_left_out: The names of its fields that the server does not apply.
        end_token_ids: The tokens that `min_tokens` keeps from being chosen.
    """

    fingerprint: str
    reserve_length: int
    limit_length: int | None = None
    sampling: object | None = None
    sampling_used: frozenset[str] = frozenset()
    sampling_left_out: frozenset[str] = frozenset()
    seed: int = 0
    rule: VerificationRule = VerificationRule.EXACT
    request_id: str = ""
    share: str = ""
    prompt_length: int = 0
    end_token_ids: tuple[int, ...] = ()


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
    timing: CallTiming
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
        chain: The indices of its tokens that are the chain's.
        elapsed_ns: Since those before them came, or the call was sent.
    """

    sequence: int
    start_length: int
    proposal: Proposal
    timing: CallTiming
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
    timing: CallTiming
    elapsed_ns: int
    top_logprobs: tuple[LikeliestTokens, ...] = ()
