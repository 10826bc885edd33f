import io
from dataclasses import replace

from rich.console import Console

from paceline import AsyncClient, Strategy
from paceline_cli.comparison import Asked, compare
from support.fake_orchestrator import FakeOrchestrator, serving


async def comparison():
    steps, asked = [], [*map(Asked.to_continue, "xy")]
    async with (
        serving(FakeOrchestrator()) as fake,
        AsyncClient(fake.address) as client,
    ):
        return await compare(client, asked, max_tokens=4, on_run=steps.append), fake, steps


async def test_every_prompt_is_run_with_every_strategy_in_turn():
    _, fake, steps = await comparison()
    assert [(each.text, each.strategy) for each in fake.requests] == [
        (prompt, strategy) for prompt in "xy" for strategy in (2, 3, 4)
    ]
    assert steps[-1] == "prompt 2 of 2, DSI"


async def test_equal_outputs_are_called_identical():
    compared, _, _ = await comparison()
    assert compared.all_identical
    console = Console(file=io.StringIO(), width=120)
    console.print(compared.table())
    assert console.file.getvalue().count("identical") == 3


async def test_acceptance_is_of_the_tokens_that_a_target_judged():
    compared, _, _ = await comparison()
    completions = compared.completions[Strategy.SPECULATIVE]
    for at, (accepted, rejected) in enumerate([(5, 2), (1, 4)]):
        finished = completions[at].finished
        statistics = replace(
            finished.statistics,
            accepted_token_count=accepted,
            rejected_token_count=rejected,
            discarded_token_count=100,
        )
        completions[at] = replace(
            completions[at], finished=replace(finished, statistics=statistics)
        )
    assert compared.acceptance_rate(Strategy.SPECULATIVE) == 0.5


async def test_one_other_token_is_called_different():
    compared, _, _ = await comparison()
    completions = compared.completions[Strategy.SPECULATIVE]
    wrong = replace(completions[1].chunks[-1], token_ids=(99,))
    completions[1] = replace(completions[1], chunks=(*completions[1].chunks[:-1], wrong))
    assert not compared.all_identical
    assert compared.is_identical(Strategy.DISTRIBUTED)
