"""What another orchestrator says of its demand is checked before it is added up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from paceline.errors import ConnectionLostError
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.discovery import Endpoint, Role
from paceline_orchestrator.scaling.demand import Demand
from paceline_orchestrator.scaling.external_scaler import read_demand
from paceline_orchestrator.scaling.externalscaler.externalscaler_pb2 import GetMetricsResponse
from paceline_orchestrator.scaling.peers import Peers

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


class Addresses:
    """One replica under several addresses, which come one after the other: discovery and channels.

    Attributes:
        words: What it says at each address; None: it does not answer.
    """

    def __init__(self, *addresses):
        self.words = dict.fromkeys(addresses)
        self.all_told = asyncio.Event()

    async def endpoints(self):
        found = [Endpoint(it, it, Role.ORCHESTRATOR) for it in self.words]
        for count in range(1, len(found) + 1):
            yield frozenset(found[:count])
        self.all_told.set()
        await asyncio.Event().wait()

    def channel(self, endpoint):
        async def answered():
            word = self.words[endpoint.address]
            if word is None:
                raise ConnectionLostError("it is gone")
            return answer({**RIGHT, "stream_verifiers": word})

        async def close(_grace):
            pass

        def rpc(*_, **__):
            return lambda _request, *, timeout: answered()

        return SimpleNamespace(unary_unary=rpc, unary_stream=rpc, close=close)


@pytest.mark.parametrize("newer", ["a:1", "b:1"])
async def test_of_what_a_replica_said_at_two_addresses_the_newer_word_counts(newer):
    it = Addresses("a:1", "b:1")
    (older,) = it.words.keys() - {newer}
    async with Peers(it, open_channel=it.channel, replica_id=1) as peers:
        await it.all_told.wait()
        it.words[older] = 5
        assert (await peers.demand()).stream_verifiers == 5
        it.words.update({older: None, newer: 2})
        assert (await peers.demand()).stream_verifiers == 2
