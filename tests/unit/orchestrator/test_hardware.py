"""Servers that share hardware do not compute side by side."""

from __future__ import annotations

import numpy as np
import pytest

from paceline_contract.calls import Hardware
from paceline_orchestrator.fleet.hardware import count_side_by_side

GPUS = [Hardware(f"gpu-{index}", 1.0) for index in range(4)]
HALF = Hardware("two cores", 0.5)
THIRD = Hardware("three cores", float(np.float32(1 / 3)))  # as the wire rounds it


@pytest.mark.parametrize(
    ("drafter", "targets", "count"),
    [
        (None, [None, None], 2),
        (None, [], 0),
        (GPUS[3], GPUS[:3], 3),
        (GPUS[0], GPUS, 3),
        (GPUS[0], [GPUS[0]], 0),
        (GPUS[3], [GPUS[0], GPUS[0], GPUS[1]], 2),
        (None, [HALF] * 3, 2),
        (HALF, [HALF] * 3, 1),
        (HALF, [HALF, GPUS[0], None], 3),
        (Hardware("two cores", 1.0), [HALF, HALF], 0),
        (THIRD, [THIRD] * 3, 2),
    ],
)
def test_targets_count_that_have_hardware_beside_the_drafters_and_each_others(
    drafter, targets, count
):
    assert count_side_by_side(targets, drafter=drafter) == count
