"""What another orchestrator says of its demand is checked before it is added up."""

from __future__ import annotations

import pytest

from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.scaling.demand import Demand
from paceline_orchestrator.scaling.external_scaler import read_demand
from paceline_orchestrator.scaling.externalscaler.externalscaler_pb2 import GetMetricsResponse

RIGHT = {"replica": 7, "stream_verifiers": 3, "verifications": 2, "active": 1}


def answer(values):
    values = [{"metric_name": name, "metric_value": value} for name, value in values.items()]
    return GetMetricsResponse(metric_values=values)


def test_a_demand_is_read_as_it_is_said():
    assert read_demand(answer(RIGHT)) == (7, Demand(3, 2, is_active=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"stream_verifiers": -1},
        {"stream_verifiers": 2**63 - 1},
        {"verifications": -(2**63)},
        {"verifications": 2**63 - 1},
        {str(number): number for number in range(1000)},
    ],
)
def test_a_demand_that_cannot_be_is_none(wrong):
    with pytest.raises(BadAnswerError):
        read_demand(answer({**RIGHT, **wrong}))


@pytest.mark.parametrize("name", RIGHT)
def test_a_demand_without_one_of_its_parts_is_none(name):
    with pytest.raises(BadAnswerError, match=name):
        read_demand(answer({it: value for it, value in RIGHT.items() if it != name}))
