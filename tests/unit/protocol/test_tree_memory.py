"""What a request keeps of its drafts: those that may still become text, however long the text."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import pytest

from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.messages import CapacityChanged
from paceline_protocol.methods import Strategy, create_method
from paceline_protocol.node import Node
from paceline_protocol.task import DecodingTask

_TOKENS = 600
_SERVERS = CapacityChanged(targets=(0, 1, 2, 3), drafters=(0,))


@contextmanager
def no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("strategy", [Strategy.DISTRIBUTED, Strategy.SPECULATIVE])
def test_what_is_over_is_freed_at_once_and_without_a_collection(strategy):
    with no_garbage_collection():
        others = _count_nodes()
        method = _decode(strategy, max_tokens=_TOKENS)
        kept = _count_nodes() - others
    assert method.statistics.branch_drafted > 10 * _TOKENS
    assert kept < _TOKENS


def _decode(strategy, *, max_tokens):
    oracle = AgreementOracle(0.7, seed=1, length=max_tokens + 1)
    task = DecodingTask(
        oracle.prompt(1), max_tokens, lookahead=2, width=4, branches=3, drafts_ahead=True
    )
    method = create_method(strategy, task, capacity=_SERVERS)
    simulate(
        method,
        oracle,
        targets=[ServerLatency(1000, 1000)] * len(_SERVERS.targets),
        drafters=[ServerLatency(100, 100)],
    )
    return method


def _count_nodes():
    return sum(type(each) is Node for each in gc.get_objects())
