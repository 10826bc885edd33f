"""AUTO, request by request: what one has shown of runners-up, the next ones begin with."""

from __future__ import annotations

from paceline_orchestrator.planning import simulated_shapes
from paceline_orchestrator.planning.planner import Planner, Wish
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import drafters, targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually

TOKENS = 60


async def generated(system, shapes, **wish):
    """Generate, and let what the plan asked for be simulated."""
    stream = await system.generate(max_tokens=TOKENS, **wish)
    shapes.simulate_missing()
    assert stream.token_ids == continuation(PROMPT, TOKENS)
    return stream


@virtually
async def test_auto_begins_with_chains_and_goes_on_with_the_trees_that_pay(monkeypatch):
    monkeypatch.setattr(simulated_shapes, "_REPEATS", 1)
    # Where the drafter's first choice is wrong, its second is right.
    models = [*drafters(1, agrees=lambda position: position % 3 > 0), *targets(1)]
    shapes = simulated_shapes.SimulatedShapes()
    async with virtual_system(*models, planner=Planner(shapes=shapes)) as system:
        chain, *_, tree = [await generated(system, shapes) for _ in range(5)]
        assert chain.started.width == 1
        assert tree.started.width > 1
        assert "trees of width" in tree.started.plan_note
        took = tree.finished.statistics
        assert took.corrections_ahead_count > 0
        assert took.total_ns < chain.finished.statistics.total_ns
        plan = system.planning.plan(Wish(), system.pool.last_model(), prompt_length=len(PROMPT))
        first, second, third, *_ = plan.hit_rates
        assert 0.6 < first < 0.7
        assert second > 5 * third
