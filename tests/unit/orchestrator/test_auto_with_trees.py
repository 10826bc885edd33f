"""AUTO, request by request: what one has shown of runners-up, the next ones begin with."""

from __future__ import annotations

from paceline_orchestrator.planning import simulated_shapes
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

TOKENS = 60


async def generated(system, **wish):
    """Generate, and let what the plan asked for be simulated."""
    stream = await system.generate(max_tokens=TOKENS, **wish)
    system.planning._planner._shapes.simulate_missing()
    assert stream.token_ids == continuation(PROMPT, TOKENS)
    return stream


@virtually
async def test_auto_begins_with_chains_and_goes_on_with_the_trees_that_pay(monkeypatch):
    monkeypatch.setattr(simulated_shapes, "_REPEATS", 1)
    # Where the drafter's first choice is wrong, its second is right.
    models = [*drafters(1, agrees=lambda position: position % 3 > 0), *targets(1)]
    async with virtual_system(*models) as system:
        chain, *_, tree = [await generated(system) for _ in range(5)]
        assert chain.started.width == 1
        assert tree.started.width > 1
        assert "trees of width" in tree.started.plan_note
        took = tree.finished.statistics
        assert took.corrections_ahead_count > 0
        assert took.total_ns < chain.finished.statistics.total_ns
        (rates,) = system.planning._rates._pairs.values()
        first, second, third, *_ = rates.by_rank
        assert 0.6 < first < 0.7
        assert second > 5 * third
