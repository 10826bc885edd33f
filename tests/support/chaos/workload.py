"""What a run of chaos asks for, and what it must get: streams of simulated text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.errors import DeadlineError, TryAgainError
from paceline_protocol.methods import Strategy

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from paceline import AsyncClient

_STRATEGIES = (*(strategy.value for strategy in Strategy), "auto")
_SHAPES = ((1, 0), (4, 0), (4, 3))  # width and branches
_LENGTHS = (20, 60, 150, 400)
_PROMPTS = tuple(f"rider {index}:".encode() for index in range(20))
_LEAVING_SHARE = 0.05
# A stream that is not done by then hangs, whatever else happens.
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """One request, and whether its client leaves in the middle."""

    prompt: bytes
    strategy: str
    width: int
    branches: int
    max_tokens: int
    temperature: float
    seed: int
    leaves_after: int | None

    @property
    def options(self) -> dict[str, Any]:
        fields = ("strategy", "width", "branches", "max_tokens", "temperature", "seed")
        return {field: getattr(self, field) for field in fields}


@dataclass
class Record:
    """What became of an order; times are the monotonic clock's.

    Attributes:
        order: What was asked for.
        events: When what was heard: a chunk's length, or a failure's name; with the orchestrator.
        tokens: All that was received.
        is_done: Whether it ended as it was to.
        failure: Of a stream that broke for good.
    """

    order: Order
    events: list[tuple[float, int, str]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    is_done: bool = False
    failure: str = ""

    def note(self, orchestrator: int, what: str) -> None:
        self.events.append((time.monotonic(), orchestrator, what))

    def gaps(self) -> Iterator[tuple[float, float, int]]:
        """Yield from when to when nothing was heard, and the orchestrator that was silent."""
        for (begin, orchestrator, _), (end, _, _) in zip(
            self.events, self.events[1:], strict=False
        ):
            yield begin, end, orchestrator

    @property
    def is_right(self) -> bool:
        expected = oracle(self.order)[: len(self.tokens)]
        return self.tokens == expected and (
            self.order.leaves_after is not None or len(self.tokens) == self.order.max_tokens
        )


def draw_order(lots: random.Random) -> Order:
    length = lots.choice(_LENGTHS)
    leaves = lots.random() < _LEAVING_SHARE
    width, branches = lots.choice(_SHAPES)
    return Order(
        prompt=lots.choice(_PROMPTS),
        strategy=lots.choice(_STRATEGIES),
        width=width,
        branches=branches,
        max_tokens=length,
        temperature=lots.choice((0.0, 0.8)),
        seed=lots.randrange(1 << 53),
        leaves_after=lots.randrange(1, length) if leaves else None,
    )


def oracle(order: Order, *, vocabulary_size: int = 2048, first: int = 256) -> list[int]:
    """Continue a prompt as the simulated target's definition says, with no code of the servers'.

    A token is a hash of all before it; a seed counts where there is something to sample.
    """
    state = _mix(_mix(0) ^ (order.seed if order.temperature else 0))
    for token in order.prompt:
        state = _mix(state ^ (token + 1))
    tokens = []
    for _ in range(order.max_tokens):
        tokens.append(first + state % (vocabulary_size - first))
        state = _mix(state ^ (tokens[-1] + 1))
    return tokens


def _mix(value: int) -> int:
    """Return SplitMix64's finaliser of 64 bits."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


async def stream(order: Order, choose: Callable[[int | None], tuple[int, AsyncClient]]) -> Record:
    """Read a stream to its end, wherever it can be resumed.

    Args:
        order: What to ask for.
        choose: Gives an orchestrator's index and its client; it is told which one has failed.
    """
    record, generation, failed = Record(order), None, None
    ends = time.monotonic() + _PATIENCE_SECONDS
    while not record.is_done and time.monotonic() < ends:
        index, client = choose(failed)
        record.note(index, "asked")
        timeout = ends - time.monotonic()
        if generation is None:
            generation = client.generate(list(order.prompt), timeout=timeout, **order.options)
        else:
            generation = client.resume(generation, timeout=timeout)
        try:
            record.is_done = await _read(generation, record, index)
        except (TryAgainError, DeadlineError) as error:
            record.note(index, type(error).__name__)
            failed = index
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the run's finding
            record.failure = repr(error)
            record.note(index, type(error).__name__)
            break
    return record


async def _read(generation: Any, record: Record, index: int) -> bool:
    """Read until the end, or until the client leaves; so a stream that breaks raises."""
    leaves_after = record.order.leaves_after
    async with generation:
        async for chunk in generation:
            record.tokens += chunk.token_ids
            record.note(index, str(len(chunk.token_ids)))
            if leaves_after is not None and len(record.tokens) >= leaves_after:
                break
    return True
