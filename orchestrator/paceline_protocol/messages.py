"""The words a decoding method speaks: events in, commands out.

Ids of drafts, verifications and decodes are chosen by the method, count up from 1 and are never
used again. Servers are named by their index in the request's own lists of drafters and targets.
Prefixes are whole: the prompt, what is committed, and what is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from paceline_contract.proposal import NOTHING, Proposal

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokensDrafted:
    """A drafter found the next tokens of a draft.

    Attributes:
        draft_id: The draft they belong to.
        proposal: One token or more. A draft of width 1 brings a chain, after the draft's prefix
            and the tokens it found before. A wider draft brings a piece of its tree, best first,
            with parents that refer to all that the draft has found: i + 1 is its i-th token.
    """

    draft_id: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class DraftEnded:
    """A draft's window is used up; all its tokens have been reported."""

    draft_id: int


@dataclass(frozen=True, slots=True)
class DraftFailed:
    """A draft failed: no more tokens come of it. Those reported so far stay valid."""

    draft_id: int


@dataclass(frozen=True, slots=True)
class BlockVerified:
    """A target's verdict on a proposal.

    Attributes:
        verify_id: The verification it answers.
        accepted_path: Which of the proposal's tokens are accepted: indices, root first. In a chain
            they are the first n.
        next_token: The target's own token after them.
        logprobs: One for each accepted token, then the next token's; empty if not asked for.
        proposal: If asked for, what the target guesses to follow the next token; may be empty.
    """

    verify_id: int
    accepted_path: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...] = ()
    proposal: Proposal = NOTHING


@dataclass(frozen=True, slots=True)
class VerifyFailed:
    """A verification failed: there is no verdict."""

    verify_id: int


@dataclass(frozen=True, slots=True)
class TokensDecoded:
    """A target found the next tokens by itself: they are final.

    Attributes:
        decode_id: The decode they belong to.
        token_ids: One or more, after the prefix and those that it found before.
        logprobs: One for each token; empty if not asked for.
    """

    decode_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodeEnded:
    """A target decodes no further; all that it found has been reported."""

    decode_id: int


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """A decode failed: no more tokens come of it. Those reported so far are final."""

    decode_id: int


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """The servers that can be given work from now on. What runs elsewhere has failed or will.

    Attributes:
        targets: Indices of the usable targets, ascending.
        drafters: Indices of the usable drafters, ascending.
        leaving: Indices of targets that finish what they have.
        lookahead: Draft tokens in a verification from now on, for a method that can change it; None
            leaves it as it is.
        text: Which of the drafters, the last, is the text itself (`max_gram.py`); None: none is.
            Its drafts cost nothing, and are answered before anything else happens.
    """

    targets: tuple[int, ...]
    drafters: tuple[int, ...]
    leaving: tuple[int, ...] = ()
    lookahead: int | None = None
    text: int | None = None

    def has(self, target: int) -> bool:
        """Whether a verification that runs at this target may be answered."""
        return target in self.targets or target in self.leaving


@dataclass(frozen=True, slots=True)
class LookaheadChanged:
    """Drafts turned out to be right more often than expected: SI's blocks are longer from now on.

    Blocks become shorter only with another method, which is told so at its start. Other methods
    than SI take no notice.

    Attributes:
        lookahead: Draft tokens in a verification, 1 or more.
    """

    lookahead: int


Event: TypeAlias = (
    TokensDrafted
    | DraftEnded
    | DraftFailed
    | BlockVerified
    | VerifyFailed
    | TokensDecoded
    | DecodeEnded
    | DecodeFailed
    | CapacityChanged
    | LookaheadChanged
)


# --- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartDraft:
    """Draft up to max_tokens tokens after the prefix, and report each as soon as it is known.

    Attributes:
        draft_id: Its name.
        drafter: The drafter that drafts.
        prefix: The tokens assumed right, one or more.
        max_tokens: The window: of a tree, how long its chain gets.
        chunk_tokens: So many tokens of the chain may be reported together: fewer messages, where
            nothing is done with a single token.
        width: How many tokens to find at a place; with 2 or more it is a tree, whose chain is that
            of width 1: the first child of each token that is the chain's.
        branch_count: How many tokens beside the chain's a forward may follow.
    """

    draft_id: int
    drafter: int
    prefix: tuple[int, ...]
    max_tokens: int
    chunk_tokens: int = 1
    width: int = 1
    branch_count: int = 0


@dataclass(frozen=True, slots=True)
class StopDraft:
    """Withdraw a draft: nothing more of it is wanted.

    Attributes:
        draft_id: Its name.
        by_rejection: Whether because it follows what was rejected, where the text goes on.
    """

    draft_id: int
    by_rejection: bool = True


@dataclass(frozen=True, slots=True)
class StartVerify:
    """Judge a proposal after the prefix, and choose the token after the accepted ones.

    Attributes:
        verify_id: Its name.
        target: The target that verifies it.
        prefix: The tokens assumed right, one or more.
        proposal: The draft tokens to judge; may be empty.
        depth: 0 if it decides the first open position; else how many verifications are before it.
        anticipate: Whether the target shall go on by itself after a correction, because the next
            verification will ask for the token after it.
        propose: Whether the target shall say what it guesses to follow, if it can.
        is_branch: Whether its prefix ends beside the main path: it is for a target that would idle.
    """

    verify_id: int
    target: int
    prefix: tuple[int, ...]
    proposal: Proposal
    depth: int
    anticipate: bool = False
    propose: bool = False
    is_branch: bool = False


@dataclass(frozen=True, slots=True)
class PromoteVerify:
    """A verification that may still wait in a server's queue has come closer to the front."""

    verify_id: int
    depth: int


@dataclass(frozen=True, slots=True)
class AbandonVerify:
    """Withdraw a verification: its verdict is worthless.

    Attributes:
        verify_id: Its name.
        by_rejection: Whether because it follows what was rejected, where the text goes on.
    """

    verify_id: int
    by_rejection: bool = True


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Choose up to max_tokens tokens after the prefix with a target alone, and report them.

    Attributes:
        decode_id: Its name.
        target: The target that decodes.
        prefix: The tokens that are final, one or more.
        end_ids: No token comes after one of these.
    """

    decode_id: int
    target: int
    prefix: tuple[int, ...]
    max_tokens: int
    end_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class StopDecode:
    """Withdraw a decode: nothing more of it is wanted."""

    decode_id: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """Tokens that are final.

    Attributes:
        token_ids: One or more, in order.
        accepted: For each whether it was an accepted draft token (else the target's own).
        logprobs: One for each, if asked for; else empty.
    """

    token_ids: tuple[int, ...]
    accepted: tuple[bool, ...]
    logprobs: tuple[float, ...] = ()


class FinishReason(Enum):
    """Why a method ended."""

    LENGTH = "length"
    EOS = "eos"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Finish:
    """The last command. Nothing is in flight any more."""

    reason: FinishReason


Command: TypeAlias = (
    StartDraft
    | StopDraft
    | StartVerify
    | PromoteVerify
    | AbandonVerify
    | StartDecode
    | StopDecode
    | EmitTokens
    | Finish
)

StartCall: TypeAlias = StartDraft | StartVerify | StartDecode
StopCall: TypeAlias = StopDraft | AbandonVerify | StopDecode


def failure_of(call: StartCall) -> VerifyFailed | DecodeFailed | DraftFailed:
    """Return the event by which a method hears that a call has failed."""
    match call:
        case StartVerify():
            return VerifyFailed(call.verify_id)
        case StartDecode():
            return DecodeFailed(call.decode_id)
        case StartDraft():
            return DraftFailed(call.draft_id)


def call_name(message: StartCall | PromoteVerify | StopCall) -> str:
    """Name the call that a command is about: calls of each kind have numbers of their own."""
    match message:
        case StartVerify() | PromoteVerify() | AbandonVerify():
            return f"verify {message.verify_id}"
        case StartDraft() | StopDraft():
            return f"draft {message.draft_id}"
        case StartDecode() | StopDecode():
            return f"decode {message.decode_id}"
