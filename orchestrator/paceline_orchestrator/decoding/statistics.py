"""What a generation takes, as far as it goes: counts, times, and a timeline of what happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from paceline_contract.calls import StageTiming
from paceline_protocol.draft_statistics import DraftStatistics

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.calls import CallTiming


class Fallback(Enum):
    """Something that did not go as planned and cost no token; see FallbackKind."""

    SESSION_LOST = "session_lost"
    PREFIX_RESENT = "prefix_resent"
    TARGET_LOST = "target_lost"
    DRAFTER_LOST = "drafter_lost"
    NO_DRAFTER = "no_drafter"
    SESSION_REFUSED = "session_refused"
    DEADLINE = "deadline"
    LOAD_CHANGED = "load_changed"


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
        is_branch: Whether it is about a verification of a branch.
    """

    kind: EventKind
    server: str
    _: KW_ONLY
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
        accepted: Tokens that became output at their place, also if a server drafted the same.
        rejected: Tokens at whose place another one became output, after accepted ones.
        predicted: Tokens that the client predicted.
        predicted_accepted: Those accepted that were copied from them.
    """

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    predicted: int = 0
    predicted_accepted: int = 0


@dataclass(slots=True)
class ModelForwards:
    """What a model ran; see the message of this name."""

    forward_count: int = 0
    forward_ns: int = 0


@dataclass(slots=True)
class Statistics:
    """What a generation took; see GenerationStatistics.

    Attributes:
        drafts: What became of the draft tokens.
        text: The same of those that the text itself drafted.
        cancelled_count: Calls cancelled because a rejection made them worthless.
        drafter_models: What the drafters' models ran, by name.
        token_count: New tokens.
        untold_count: Calls that run, or were withdrawn: what they ran nobody has told.
        reused_count: Tokens that the target which answered first had computed before.
        forced_drafted: Draft tokens that a grammar forced, so that no forward found them.
        forced_accepted: How many tokens of the output a grammar had forced, as draft tokens.
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
    drafter_models: dict[str, ModelForwards] = field(default_factory=dict)
    token_count: int = 0
    untold_count: int = 0
    reused_count: int = 0
    forced_drafted: int = 0
    forced_accepted: int = 0

    @property
    def walltime_improvement(self) -> float:
        """SWI, each model's forwards at their measured mean; 0 where it is not known.

        Source: Chen et al. 2023, "Cascade Speculative Drafting" (arXiv 2312.11462), where each
        model's forwards have a fixed cost.
        """
        drafters_ns = sum(it.forward_ns for it in self.drafter_models.values())
        targets_ns = self.forward_ns - drafters_ns
        repairs = self.fallbacks.keys() - {Fallback.LOAD_CHANGED}
        is_told = not (self.untold_count or repairs)
        if not is_told or targets_ns <= 0 or not self.target_forward_count:
            return 0.0
        return self.token_count * targets_ns / self.target_forward_count / self.forward_ns

    def count_models(self, names: Sequence[str], timing: CallTiming) -> None:
        """Count an answer's forwards by model: a stack's, largest first, or the one."""
        stages = timing.stages or (StageTiming(timing.forward_count, timing.forward_ns),)
        for name, stage in zip(names, stages, strict=False):
            ran = self.drafter_models.setdefault(name, ModelForwards())
            ran.forward_count += stage.forward_count
            ran.forward_ns += stage.forward_ns
