"""Many streams at once on the same servers: each gets what it gets alone, from shared forwards."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest

from paceline import AsyncClient
from support.equality import check_rarity, compare
from support.oracle import Sampling
from support.waiting import until

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.0, top_p=0.9, seed=2**40),
)
STRATEGIES = ("autoregressive", "speculative", "distributed", "auto")
LENGTHS = (8, 24, 40)
# So long that servers compute it in parts.
LONG_PROMPT = 160
ROUNDS = [(12, 2)]
MANY_ROUNDS = [(4, 12), (16, 13), (64, 15)]
MORE_ROUNDS = [(1, 11), (40, 14), (64, 16)]


@dataclass(frozen=True)
class Request:
    """A stream.

    Attributes:
        options: Of `generate`.
        leaves_after: After how many tokens its reader leaves; None: never.
        follows: Which stream's token it arrives with, and which token; None: at once.
    """

    prompt: str
    sampling: Sampling
    options: dict[str, Any]
    leaves_after: int | None
    follows: tuple[int, int] | None


def requests(count: int, prompts: list[str], *, seed: int) -> list[Request]:
    chance, made = random.Random(seed), []
    for n in range(count):
        prompt = "\n".join(chance.sample(prompts, 4)) if n % 3 == 1 else chance.choice(prompts)
        strategy = STRATEGIES[n % len(STRATEGIES)]
        options: dict[str, Any] = {"strategy": strategy}
        if strategy in ("speculative", "distributed"):
            options["lookahead"] = chance.choice((1, 3, 5))
        if strategy == "distributed":
            options["targets"] = chance.choice((1, 2, 3))
        options["max_tokens"] = chance.choice(LENGTHS)
        leaves = chance.randint(1, options["max_tokens"]) if n % 4 == 3 else None
        follows = (chance.randrange(n), chance.randint(1, 8)) if n > count // 3 else None
        made.append(Request(prompt, chance.choice(SAMPLINGS), options, leaves, follows))
    return made


async def decoded(client: AsyncClient, request: Request, on_token=lambda _: None) -> list[int]:
    """Read a stream for as long as its reader stays."""
    generation = client.generate(
        request.prompt,
        ignore_eos=True,
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        seed=request.sampling.seed,
        **request.options,
    )
    found: list[int] = []
    async with generation, aclosing(aiter(generation)) as chunks:
        async for chunk in chunks:
            found.extend(chunk.token_ids)
            on_token(len(found))
            if request.leaves_after is not None and len(found) >= request.leaves_after:
                break
    return found


async def all_together(client: AsyncClient, wanted: list[Request]) -> list[list[int]]:
    """Decode all, each from the token on that it follows."""
    arrivals = [asyncio.Event() for _ in wanted]

    async def stream(n: int) -> list[int]:
        request = wanted[n]
        if request.follows is not None:
            await arrivals[n].wait()

        def wake(count: float) -> None:
            for event, each in zip(arrivals, wanted, strict=True):
                if each.follows is not None and each.follows[0] == n and each.follows[1] <= count:
                    event.set()

        try:
            return await decoded(client, request, wake)
        finally:
            wake(float("inf"))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(n), name=f"stream {n}") for n in range(len(wanted))]
    return [task.result() for task in tasks]


def seen(system) -> dict[str, float]:
    names = ("forward_calls", "forwards", "prefill_parts")
    return {
        name: sum(server.metric(f"paceline_{name}_total") for server in system.targets)
        for name in names
    }


def calls_live(system) -> float:
    return sum(server.metric("paceline_calls_live") for server in system.targets)


def happened(system, before: dict[str, float]) -> tuple[float, float]:
    """How many calls shared a forward on average, and parts of prompts."""
    gained = {name: value - before[name] for name, value in seen(system).items()}
    return gained["forward_calls"] / gained["forwards"], gained["prefill_parts"]


async def check_round(count, seed, *, bundled, oracle, tokenizer, prompts) -> list[Any]:
    """Decode some streams alone, then together, and compare."""
    wanted = requests(count, prompts, seed=seed)
    ties, before = [], seen(bundled)
    async with AsyncClient(bundled.orchestrators[0].address) as client:
        alone = []
        for request in wanted:
            alone.append(await decoded(client, request))
            # What its reader left is given up behind it.
            await until(lambda: not calls_live(bundled), what="it is alone")
        one_by_one, _ = happened(bundled, before)
        before = seen(bundled)
        together = await all_together(client, wanted)
    shared, parts = happened(bundled, before)
    for request, expected, actual in zip(wanted, alone, together, strict=True):
        length = request.leaves_after or request.options["max_tokens"]
        assert min(len(expected), len(actual)) >= length
        # Who leaves has got what was on the way, which may be more.
        common = min(len(expected), len(actual))
        ties += compare(
            oracle,
            tokenizer.encode(request.prompt).ids,
            request.sampling,
            expected=expected[:common],
            actual=actual[:common],
        )
    assert one_by_one == 1, "a request has one session at a server"
    if count > 8:
        assert shared > 1.1
        assert parts > 0
    return ties


async def run_rounds(rounds, **system) -> None:
    ties: list[Any] = []
    for count, seed in rounds:
        ties += await check_round(count, seed, **system)
    tokens = sum(count for count, _ in rounds) * LENGTHS[1]
    check_rarity(ties, position_count=tokens)


async def test_streams_at_once_are_what_they_are_alone(bundled, oracle, tokenizer, prompts):
    await run_rounds(ROUNDS, bundled=bundled, oracle=oracle, tokenizer=tokenizer, prompts=prompts)


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(MANY_ROUNDS, marks=pytest.mark.long),
        pytest.param(MORE_ROUNDS, marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(600)
async def test_many_streams_at_once_are_what_they_are_alone(
    rounds, bundled, oracle, tokenizer, prompts
):
    await run_rounds(rounds, bundled=bundled, oracle=oracle, tokenizer=tokenizer, prompts=prompts)


def test_prompts_are_long_enough_to_be_computed_in_parts(tokenizer, prompts):
    wanted = requests(30, prompts, seed=1)
    assert sum(len(tokenizer.encode(each.prompt).ids) > LONG_PROMPT for each in wanted) > 5
