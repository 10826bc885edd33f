"""The decoding methods by name."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from paceline_protocol.autoregressive import AutoregressiveDecoding
from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.speculative import SpeculativeDecoding

if TYPE_CHECKING:
    from paceline_protocol.messages import CapacityChanged
    from paceline_protocol.task import DecodingTask

__all__ = ["AnyMethod", "Strategy", "create_method"]

AnyMethod: TypeAlias = AutoregressiveDecoding | SpeculativeDecoding | DistributedDecoding


class Strategy(Enum):
    """How a request is decoded; see orchestrator_service.proto."""

    AUTOREGRESSIVE = "autoregressive"
    SPECULATIVE = "speculative"
    DISTRIBUTED = "distributed"


def create_method(
    strategy: Strategy, task: DecodingTask, *, capacity: CapacityChanged
) -> AnyMethod:
    """Make the state machine of a strategy, not yet started."""
    method: type[AnyMethod]
    match strategy:
        case Strategy.AUTOREGRESSIVE:
            method = AutoregressiveDecoding
        case Strategy.SPECULATIVE:
            method = SpeculativeDecoding
        case Strategy.DISTRIBUTED:
            method = DistributedDecoding
    return method(task, capacity)
