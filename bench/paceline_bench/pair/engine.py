"""A drafter and a target in this process: the engine without any services around it."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from paceline_bench.pair.acceptance import Block
from paceline_contract.max_gram import MaxGram
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.terms.backend import Backend

Draft: TypeAlias = "Callable[..., Sequence[int]]"
"""What may follow a text: at most `count` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A text and what it took.

    Attributes:
        token_ids: The new tokens.
        first_token_ns: From the beginning to the first of them.
        forward_ns: The target's forwards, one after another, choosing tokens included.
        draft_ns: All of the drafter's.
        blocks: What the target judged.
    """

    token_ids: tuple[int, ...]
    first_token_ns: int
    forward_ns: tuple[int, ...]
    draft_ns: int = 0
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Latency:
    """What a model's forwards take, ms: the first one of each text, and all others."""

    first_ms: tuple[float, ...]
    later_ms: tuple[float, ...]


class EnginePair:
    """Decodes greedily, with the least around the engine that will do."""

    def __init__(self, target: Backend, drafter: Backend) -> None:
        self.target = target
        self.drafter = drafter

    def plain(self, prompt: Sequence[int], count: int) -> Decoded:
        """Decode one token after another."""
        return decode(self.target, prompt, count)

    def speculative(self, lookahead: int) -> Callable[[Sequence[int], int], Decoded]:
        """Return decoding by drafting so many tokens and verifying them, in turn."""

        def decode_blocks(prompt: Sequence[int], count: int) -> Decoded:
            drafter = ModelText(self.drafter, _block_spec(prompt, count, lookahead))
            return _speculate(
                self.target, drafter.draft_chain, prompt, count=count, lookahead=lookahead
            )

        return decode_blocks

    def from_the_text(self, lookahead: int) -> Callable[[Sequence[int], int], Decoded]:
        """Return the same with Max-Gram alone as the drafter."""

        def decode_blocks(prompt: Sequence[int], count: int) -> Decoded:
            return _speculate(self.target, text_alone(), prompt, count=count, lookahead=lookahead)

        return decode_blocks

    def gap(self, prefix: Sequence[int], choices: tuple[int, int]) -> float:
        """Return how far the target's scores of two next tokens are apart."""
        target: Any = self.target  # a library model's: there is nothing else to measure
        with torch.inference_mode():
            scores = target.model(torch.tensor([prefix], device=target.device)).logits
        first, second = (float(scores[0, -1, choice]) for choice in choices)
        return abs(first - second)


def text_alone() -> Draft:
    """Return drafting by Max-Gram, for one text as it grows."""
    max_gram = MaxGram()

    def draft(prefix: Sequence[int], *, count: int) -> Sequence[int]:
        max_gram.follow(prefix)
        return max_gram.propose(count)

    return draft


def decode(model: Backend, prompt: Sequence[int], count: int) -> Decoded:
    """Continue a prompt with one model, a token for each forward."""
    at_model = ModelText(model, SessionSpec(reserve_length=len(prompt) + count))
    text, forwards = array("I", prompt), _Watch()
    for _ in range(count):
        with forwards:
            text.extend(at_model.draft(text).token_ids)
    return Decoded(
        token_ids=tuple(text[len(prompt) :]),
        first_token_ns=forwards.laps[0],
        forward_ns=tuple(forwards.laps),
    )


def measure_latency(model: Backend, prompts: Sequence[Sequence[int]], count: int) -> Latency:
    """Time the first forward of each text apart from the others, as the DSI paper does."""
    times = [decode(model, prompt, count).forward_ns for prompt in prompts]
    return Latency(
        first_ms=tuple(first / 1e6 for first, *_ in times),
        later_ms=tuple(later / 1e6 for _, *others in times for later in others),
    )


def measure_rows(
    model: Backend, prefix: Sequence[int], row_counts: Sequence[int], *, repeats: int
) -> dict[int, float]:
    """Return the median ms of a forward with so many rows after a prefix, by their number.

    Sizes take turns, so that whatever else the machine does is shared fairly.
    """
    text, widest = array("I", prefix), max(row_counts)
    at_model = ModelText(model, SessionSpec(reserve_length=len(text) + widest))
    at_model.draft(text)
    watches = {rows: _Watch() for rows in row_counts}
    for _ in range(repeats):
        for rows, watch in watches.items():
            block = [text[index % len(text)] for index in range(rows - 1)]
            with watch:
                at_model.judge(text, block)
    return {rows: median(watch.laps) / 1e6 for rows, watch in watches.items()}


def _speculate(
    model: Backend, draft: Draft, prompt: Sequence[int], *, count: int, lookahead: int
) -> Decoded:
    """Decode by drafting so many tokens and verifying them, in turn."""
    target = ModelText(model, _block_spec(prompt, count, lookahead))
    text, blocks = array("I", prompt), []
    drafts, forwards = _Watch(), _Watch()
    while (missing := len(prompt) + count - len(text)) > 0:
        # A verification gives one token more than it accepts.
        with drafts:
            block = draft(text, count=min(lookahead, missing - 1))
        with forwards:
            judged = target.judge(text, block)
        accepted_count = len(judged.accepted_path)
        text.extend((*block[:accepted_count], judged.next_token))
        if block:
            blocks.append(Block(len(block), accepted_count))
    return Decoded(
        token_ids=tuple(text[len(prompt) :]),
        first_token_ns=drafts.laps[0] + forwards.laps[0],
        forward_ns=tuple(forwards.laps),
        draft_ns=sum(drafts.laps),
        blocks=tuple(blocks),
    )


def _block_spec(prompt: Sequence[int], count: int, lookahead: int) -> SessionSpec:
    """Reserve for a text; a block may reach beyond what is needed by its own length."""
    return SessionSpec(reserve_length=len(prompt) + count + lookahead)


class _Watch:
    """A stopwatch: keeps what the blocks under it took, ns."""

    def __init__(self) -> None:
        self.laps: list[int] = []

    def __enter__(self) -> None:
        self._started_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self.laps.append(time.perf_counter_ns() - self._started_ns)
