"""The decoding methods, and for each a row with what other code has to know of it.

To add a method: its file, a member and a row here, its forecast in the orchestrator's planning, and
its number in orchestrator_service.proto. docs/methods.md goes through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from paceline_protocol.autoregressive import AutoregressiveDecoding
from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.invariants import Invariant
from paceline_protocol.self_speculative import SelfSpeculativeDecoding
from paceline_protocol.speculative import SpeculativeDecoding

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.messages import CapacityChanged, Command, Event
    from paceline_protocol.task import DecodingTask


class Strategy(Enum):
    """How a request is decoded; see orchestrator_service.proto, which has the same names."""

    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"
    DISTRIBUTED = "distributed"
    SELF_SPECULATIVE = "self_speculative"


class DecodingMethod(Protocol):
    """A decoding method: a deterministic state machine without I/O, clock, tasks or randomness.

    Events about ids that were withdrawn, answered or never issued are ignored, so that late and
    duplicated answers are harmless. README.md says what a driver owes a method.
    """

    @property
    def statistics(self) -> DraftStatistics:
        """What became of the draft tokens so far."""

    def start(self) -> list[Command]:
        """Begin. Called once, first."""

    def handle(self, event: Event) -> list[Command]:
        """Take in what happened, and say what to do."""

    def stop(self) -> list[Command]:
        """End early: withdraw everything, then Finish(STOPPED). Nothing if it has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row: what others have to know of a method.

    Attributes:
        label: What papers, tables and pictures call it.
        create: Makes its state machine, not yet started, for a task and the servers there are.
        drafts: Whether it has work for a drafter.
        overlaps: Whether it has work for several targets at once. Then it also takes those that
            come while it runs, and the lookahead that is told with them.
        self_drafts: Whether it needs a target that drafts for itself. Not every system has one, so
            lists of methods for any system leave it out.
        invariants: Which of them hold for it.
    """

    label: str
    create: Callable[[DecodingTask, CapacityChanged], DecodingMethod]
    drafts: bool
    overlaps: bool
    self_drafts: bool = False
    invariants: frozenset[Invariant] = frozenset(Invariant)


METHODS: dict[Strategy, Method] = {
    Strategy.AUTOREGRESSIVE: Method(
        label="non-SI", create=AutoregressiveDecoding, drafts=False, overlaps=False
    ),
    Strategy.SPECULATIVE: Method(
        label="SI",
        create=SpeculativeDecoding,
        drafts=True,
        overlaps=False,
        # While it drafts, its target waits: that is what DSI is for.
        invariants=frozenset(Invariant) - {Invariant.BUSY_FRONTIER},
    ),
    Strategy.DISTRIBUTED: Method(
        label="DSI", create=DistributedDecoding, drafts=True, overlaps=True
    ),
    Strategy.SELF_SPECULATIVE: Method(
        label="self-SI",
        create=SelfSpeculativeDecoding,
        drafts=False,
        overlaps=False,
        self_drafts=True,
    ),
}
"""Simplest first: of two that promise the same speed, the planner takes the one above."""


def label_of(strategy: Strategy, *, drafts_ahead: bool = False) -> str:
    """Return what tables call a method, or its variant in which the drafter never rests."""
    return METHODS[strategy].label + (" ahead" if drafts_ahead else "")


def create_method(
    strategy: Strategy, task: DecodingTask, *, capacity: CapacityChanged
) -> DecodingMethod:
    """Make the state machine of a strategy, not yet started."""
    return METHODS[strategy].create(task, capacity)
