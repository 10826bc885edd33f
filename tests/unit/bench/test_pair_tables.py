import json

import pytest

from paceline_bench.pair.acceptance import Block
from paceline_bench.pair.contest import Contestant, Entry, Group, Method, Outcome
from paceline_bench.pair.engine import Latency
from paceline_bench.pair.random_models import RandomModel, Shape
from paceline_bench.pair.results import acceptance_row, model_row, variant_rows


@pytest.fixture(scope="module")
def description():
    return RandomModel(Shape(1, 64), dtype="float32", device="cpu", threads=1).description


def model(description, *, step_ms):
    latency = Latency(first_ms=(4 * step_ms, 6 * step_ms), later_ms=(step_ms,) * 6)
    return model_row(description, latency, {1: step_ms, 5: 2 * step_ms}, context=30)


def entry(group, method, name, *, ms, lookahead=None, targets=None, wrong=0, **fields):
    outcome = Outcome(
        token_ids=(1, 2, 3, 4),
        elapsed_ns=round(4 * ms * 1e6),
        **{"target_forwards": 2, **fields},
    )
    contestant = Contestant(group, method, name, None, lookahead, targets)
    return Entry(contestant, [[outcome, outcome]], wrong=wrong)


@pytest.fixture
def result(alone):
    return {
        **alone,
        "acceptance": acceptance_row([2, 4], [Block(2, 2), Block(2, 0)], tokens=8, lookahead=2),
        "rows": variant_rows(variants()),
        "sharing": [
            {"texts": 1, "forward_ms": 8.0, "tokens_per_second": 100.0},
            {"texts": 2, "forward_ms": 12.0, "tokens_per_second": 130.0},
        ],
        "sharing_strategies": variant_rows(shared_variants()),
    }


def variants():
    services_speculative = {"forward_ns": 12_000_000, "accepted": 3, "rejected": 1}
    return [
        entry(Group.LIBRARY, Method.BARE, "bare loop", ms=10),
        entry(Group.LIBRARY, Method.PLAIN, "generate", ms=12.5),
        entry(Group.LIBRARY, Method.SPECULATIVE, "assisted", ms=8, lookahead=2),
        entry(Group.ENGINE, Method.PLAIN, "non-SI", ms=8, forward_ns=30_000_000),
        entry(Group.SERVICES, Method.PLAIN, "non-SI", ms=16, forward_ns=40_000_000),
        entry(
            *(Group.SERVICES, Method.SPECULATIVE, "SI, lookahead 2"),
            **{"ms": 5, "lookahead": 2, **services_speculative},
        ),
        entry(Group.SERVICES, Method.DISTRIBUTED, "DSI", ms=4, wrong=1),
    ]


def shared_variants():
    return [
        entry(Group.SERVICES, Method.PLAIN, "non-SI", ms=16, targets=1),
        entry(Group.SERVICES, Method.DISTRIBUTED, "DSI on 1 target", ms=8, targets=1),
        entry(Group.SERVICES, Method.DISTRIBUTED, "DSI on 2 targets", ms=20, targets=2),
    ]


@pytest.fixture
def alone(description):
    models = {role: model(description, step_ms=ms) for role, ms in (("target", 8), ("drafter", 2))}
    return {"models": models, "rows": [], "sharing": [], "sharing_strategies": []}


def test_everything_can_be_kept(result):
    more = json.loads(json.dumps(result))
    assert more["acceptance"]["rate_by_common_runs"] == 0.75
    assert more["acceptance"]["accepted_shares"] == [0.5, 0.5]
    assert more["models"]["target"]["rows_ms"] == {"1": 8.0, "5": 16.0}
    assert more["sharing"][1] == {"texts": 2, "forward_ms": 12.0, "tokens_per_second": 130.0}
    assert more["rows"][5]["tokens_per_second"] == 200
    assert [row["targets"] for row in more["sharing_strategies"]] == [1, 1, 2]
    assert [row["speed_up"] for row in more["sharing_strategies"]] == [1, 2, 0.8]
