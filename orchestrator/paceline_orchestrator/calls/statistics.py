"""What a generation takes, as far as it goes: counts, times, and a timeline of what happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto

from paceline_protocol.commitment import DraftStatistics

__all__ = ["EventKind", "Fallback", "Statistics", "TextStatistics", "TimelineEvent"]


class Fallback(Enum):
    """Something that did not go as planned and cost no token; see FallbackKind."""

    SESSION_LOST = "session_lost"
    PREFIX_RESENT = "prefix_resent"
    TARGET_LOST = "target_lost"
    DRAFTER_LOST = "drafter_lost"
    NO_DRAFTER = "no_drafter"
    SESSION_REFUSED = "session_refused"
    DEADLINE = "deadline"


class EventKind(Enum):
    """What a timeline event tells of; see TimelineEventKind."""

    DRAFTED = auto()
    VERIFYING = auto()
    ACCEPTED = auto()
    CORRECTED = auto()
    DISCARDED = auto()
    CANCELLED = auto()


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Something that happened to a request; see the message of this name.

    Attributes:
        start_ns: Since the request's arrival; so is end_ns.
        branch_count: Tokens beside the chain, besides token_ids.
        is_branch: Of a verification: whether it is one of a branch.
    """

    kind: EventKind
    server: str
    start_ns: int
    end_ns: int
    position: int
    token_ids: tuple[int, ...]
    call_id: int = 0
    depth: int = 0
    branch_count: int = 0
    is_branch: bool = False


@dataclass(slots=True)
class TextStatistics:
    """What became of what the text itself drafted.

    Attributes:
        drafted: Its tokens.
        accepted: Those that are what became output there, whoever else drafted the same.
        rejected: Those that are not, after others that are.
    """

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0


@dataclass(slots=True)
class Statistics:
    """What a generation took; see GenerationStatistics.

    Attributes:
        drafts: What became of the draft tokens.
        text: The same of those that the text itself drafted.
        cancelled_count: Calls cancelled because a rejection made them worthless.
    """

    drafts: DraftStatistics = field(default_factory=DraftStatistics)
    text: TextStatistics = field(default_factory=TextStatistics)
    target_forward_count: int = 0
    drafter_forward_count: int = 0
    cancelled_count: int = 0
    queue_ns: int = 0
    forward_ns: int = 0
    network_ns: int = 0
    time_to_first_token_ns: int = 0
    total_ns: int = 0
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
