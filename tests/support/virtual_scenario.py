"""Scenarios: who is there, what is asked, what goes wrong when; played on virtual time.

That gives a history: every call, as its client and its server saw it, and every token with its
moment; see `virtual_history`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from paceline import errors
from support.fake_text import EOS, next_token
from support.orchestrating import PROMPT
from support.virtual_history import History
from support.virtual_servers import drafters, targets
from support.virtual_system import Stream, now, virtual_system

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.virtual_servers import VirtualServer
    from support.virtual_system import VirtualSystem

WORK = ("Verify", "Decode", "Draft")
STEP_SECONDS, DRAFTER_STEP_SECONDS = 0.03, 0.005


@dataclass(frozen=True)
class Fault:
    """What goes wrong, at which server, when and for how long. Some take but a moment."""

    kind: str
    server: str
    at: float
    seconds: float = 1.0


@dataclass(frozen=True)
class Wish:
    """A request: when it comes, how it is to be decoded, and when its client leaves.

    With a lookahead of 0, and a target count of 0, it leaves these open.
    """

    strategy: int
    max_tokens: int = 24
    lookahead: int = 2
    target_count: int = 2
    drafter_count: int = 1
    width: int = 1
    branches: int = 0
    at: float = 0.0
    seconds: float = 60.0
    leaves_after: float | None = None


@dataclass(frozen=True)
class Scenario:
    """Who is there, what is asked, and what goes wrong.

    Attributes:
        agreement: How often a drafter is right.
        contexts: The drafters' contexts, as far as they are shorter than the targets'.
        eos_at: The length of the text after which it ends, or None.
        seed: Draws delays, choices among equals, and where drafters are right.
    """

    wishes: tuple[Wish, ...]
    target_count: int = 2
    drafter_count: int = 1
    agreement: float = 0.8
    contexts: tuple[int, ...] = ()
    eos_at: int | None = None
    faults: tuple[Fault, ...] = ()
    seed: int = 1

    @property
    def steady_targets(self) -> set[str]:
        """The targets that nothing happens to."""
        struck = {it.server for it in self.faults}
        return {f"target-{index}" for index in range(self.target_count)} - struck

    def token_after(self, text: Sequence[int]) -> int:
        """Return the target's next token."""
        return EOS if len(text) == self.eos_at else next_token(text)

    def truth(self, max_tokens: int) -> list[int]:
        """Return the text that plain decoding gives, prompt included."""
        text = list(PROMPT)
        while len(text) < len(PROMPT) + max_tokens and text[-1] != EOS:
            text.append(self.token_after(text))
        return text

    def models(self) -> list[VirtualServer]:
        """Make the servers."""

        def agrees(drafter: int) -> Callable[[int], bool]:
            right = Random(self.seed + drafter)
            table = [right.random() < self.agreement for _ in range(1024)]
            return lambda position: table[position % len(table)]

        made = targets(self.target_count, latency_seconds=STEP_SECONDS, seed=self.seed)
        for index in range(self.drafter_count):
            made += drafters(1, latency_seconds=DRAFTER_STEP_SECONDS, seed=self.seed)
            made[-1] = _renamed(made[-1], f"drafter-{index}", agrees=agrees(index))
            if index < len(self.contexts):
                made[-1].context_length = self.contexts[index]
        for model in made:
            model.token_after = self.token_after
        return made


def _renamed(model: VirtualServer, name: str, *, agrees: Callable[[int], bool]) -> VirtualServer:
    return type(model)(
        model.role,
        name=name,
        seed=model.seed,
        latency_seconds=model.latency_seconds,
        agrees=agrees,
    )


async def _hang(model: VirtualServer, seconds: float) -> None:
    model.link.hold(*WORK)
    await asyncio.sleep(seconds)
    model.link.release()


async def _turn_deaf(model: VirtualServer, seconds: float) -> None:
    model.link.hold(*WORK, "OpenSession", "CloseSession", "RenewSession")
    await asyncio.sleep(seconds)
    model.link.release()


async def _get_stuck(model: VirtualServer, seconds: float) -> None:
    model.get_stuck(True)
    await asyncio.sleep(seconds)
    model.get_stuck(False)


async def _slow_down(model: VirtualServer, seconds: float) -> None:
    model.slowdown = 15.0
    await asyncio.sleep(seconds)
    model.slowdown = 1.0


async def _die(model: VirtualServer, seconds: float) -> None:
    await model.kill()
    await asyncio.sleep(seconds)
    await model.start()


async def _freeze(model: VirtualServer, seconds: float) -> None:
    model.link.freeze()
    await asyncio.sleep(seconds)
    model.link.thaw()


async def _drain(model: VirtualServer, seconds: float) -> None:
    await model.set_serving(False)
    await asyncio.sleep(seconds)
    await _die(model, 1.0)


async def _lose_sessions(model: VirtualServer, _seconds: float) -> None:
    model.lose_sessions()


async def _lose_tokens(model: VirtualServer, _seconds: float) -> None:
    model.lose_tokens()


async def _tamper(model: VirtualServer, _seconds: float) -> None:
    model.faults.append("tamper")


async def _lie(model: VirtualServer, _seconds: float) -> None:
    model.faults.append("wrong_answer")


async def _fail(model: VirtualServer, _seconds: float) -> None:
    model.faults.append("fail")


async def _refuse_sessions(model: VirtualServer, seconds: float) -> None:
    model.open_error = errors.CacheExhaustedError("full", retry_after_seconds=0.4)
    await asyncio.sleep(seconds)
    model.open_error = None


async def _refuse_calls(model: VirtualServer, seconds: float) -> None:
    model.is_full = True
    await asyncio.sleep(seconds)
    model.is_full = False


async def _delay(model: VirtualServer, seconds: float) -> None:
    usual, model.link.delay_seconds = model.link.delay_seconds, (0.0002, 0.02)
    await asyncio.sleep(seconds)
    model.link.delay_seconds = usual


FAULTS = {
    "hang": _hang,
    "turn deaf": _turn_deaf,
    "get stuck": _get_stuck,
    "slow down": _slow_down,
    "die": _die,
    "freeze": _freeze,
    "drain": _drain,
    "lose sessions": _lose_sessions,
    "lose tokens": _lose_tokens,
    "tamper": _tamper,
    "lie": _lie,
    "fail": _fail,
    "refuse sessions": _refuse_sessions,
    "refuse calls": _refuse_calls,
    "delay": _delay,
}


async def play(scenario: Scenario) -> History:
    """Let it happen, heal everything, and wait until nothing goes on any more."""
    models = scenario.models()
    by_name = {it.name: it for it in models}
    async with virtual_system(*models, seed=scenario.seed) as system:
        history = History(scenario, models=by_name, began=now())
        with system.pool.listening(lambda: history.note_standings(system)):
            async with asyncio.TaskGroup() as tasks:
                for number, wish in enumerate(scenario.wishes):
                    tasks.create_task(_ask(system, history, number, wish))
                for fault in scenario.faults:
                    tasks.create_task(_strike(by_name[fault.server], fault))
            for model in models:
                await _heal(model)
            await system.settle()
            await system.settle()
        history.records = system.records()
        history.leftovers = system.leftovers()
    return history


async def _ask(system: VirtualSystem, history: History, number: int, wish: Wish) -> None:
    await asyncio.sleep(wish.at)
    stream = history.streams[number] = Stream()
    with suppress(errors.PacelineError, TimeoutError):  # the stream has what it ended with
        async with asyncio.timeout(wish.leaves_after):
            await system.generate(
                into=stream,
                seconds=wish.seconds,
                request_id=f"request-{number}",
                strategy=wish.strategy,
                max_tokens=wish.max_tokens,
                lookahead=wish.lookahead or None,
                target_count=wish.target_count or None,
                drafter_count=wish.drafter_count,
                width=wish.width,
                branches=wish.branches,
            )


async def _strike(model: VirtualServer, fault: Fault) -> None:
    await asyncio.sleep(fault.at)
    await FAULTS[fault.kind](model, fault.seconds)


async def _heal(model: VirtualServer) -> None:
    model.faults.clear()
    model.link.release()
    model.link.thaw()
    await model.start()
