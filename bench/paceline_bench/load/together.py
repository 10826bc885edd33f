"""Several texts at once in this process, greedily: by our engine, and in two ways by the library.

Each returns what `offer` does, one text for each prompt in their order, so that all are measured
alike: a token has come when whoever asked for it could have read it.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from paceline import Strategy
from paceline_bench.load.streams import Served
from paceline_bench.pair.library import load_model
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.terms.backend import Backend

    TokenIds = tuple[int, ...]

# The library's own, and the best of 128, 512 and 2048 for 64 prompts of 64 tokens on the bundled
# target with one thread: a step's mask is as large as its tokens times all that they see.
_PAGE_TOKENS, _STEP_TOKENS = 256, 512
# It takes no new text while less than 15% of its memory is free.
_SLACK = 1.5


def decode_together(backend: Backend, prompts: Sequence[TokenIds], count: int) -> list[Served]:
    """Continue all texts, one `run` for a step of all of them."""
    sent_at, interrupt = time.perf_counter(), threading.Event()
    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
    items = []
    for prompt in prompts:
        spec = SessionSpec(reserve_length=len(prompt) + count)
        items.append(
            Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=Draft(count))
        )
    pending = list(zip(items, arrivals, strict=True))
    while pending:
        outcomes = backend.run([item for item, _ in pending], interrupt)
        now, unfinished = time.perf_counter(), []
        for (item, arrived), outcome in zip(pending, outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if outcome.drafted.token_ids:
                arrived.append((now, len(outcome.drafted)))
            if not item.take(outcome):
                unfinished.append((item, arrived))
        pending = unfinished
    return [
        _text(prompt, item.prefix[len(prompt) :], sent_at=sent_at, arrivals=arrived)
        for prompt, item, arrived in zip(prompts, items, arrivals, strict=True)
    ]


class LibraryBatches:
    """A model in transformers' own hands."""

    def __init__(self, model: str, *, most_texts: int, longest: int) -> None:
        """Load it, from a directory.

        Args:
            most_texts: There is memory for so many at once, of continuous batching.
            longest: The tokens of a text, the prompt's included.
        """
        self._model: Any = load_model(model, dtype="float32", device="cpu")
        # Else it would take two thirds of the memory there is, and half a minute for it.
        self._blocks = math.ceil(_SLACK * most_texts) * math.ceil(longest / _PAGE_TOKENS) + 1
        self._most_texts = most_texts

    @torch.inference_mode()
    def padded(self, prompts: Sequence[TokenIds], count: int) -> list[Served]:
        """Decode with `generate`: one batch, in which all begin and end together.

        Prompts of one length, so nothing is padded: its best case.
        """
        sent_at, watch = time.perf_counter(), _Watch()
        ids = torch.tensor(prompts)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            streamer=watch,
        )
        return [
            _text(
                prompt,
                row[len(prompt) :],
                sent_at=sent_at,
                arrivals=[(at, 1) for at in watch.step_ends],
            )
            for prompt, row in zip(prompts, output.tolist(), strict=True)
        ]

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Have continuous batching ready, what `generate_batch` is made of.

        With a short text behind it, so that nothing of what it prepares is measured.
        """
        with self._model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),  # type: ignore[no-untyped-call]
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=self._blocks,
                max_batch_tokens=_STEP_TOKENS,
                max_requests_per_batch=self._most_texts,
            ),
            warmup=False,
        ) as self._manager:
            self.continuous([(0,)], 1)
            yield

    def continuous(self, prompts: Sequence[TokenIds], count: int) -> list[Served]:
        """Decode with continuous batching, within `batching`."""
        sent_at, manager = time.perf_counter(), self._manager
        names = manager.add_requests(
            [list(prompt) for prompt in prompts], max_new_tokens=count, record_timestamps=True
        )
        found: dict[str, Any] = {}
        while len(found) < len(names):
            output = manager.get_result(timeout=1)
            if output is None:
                assert manager.is_running(), "the library's continuous batching has ended"
            elif output.is_finished():
                assert output.error is None, output.error
                found[output.request_id] = output
        return [
            _text(
                prompt,
                each.generated_tokens,
                sent_at=sent_at,
                arrivals=[(at, 1) for at in each.timestamps],
            )
            for prompt, each in zip(prompts, map(found.__getitem__, names), strict=True)
        ]


class _Watch(BaseStreamer):
    """Is told of each step of a batch, after the prompts."""

    def __init__(self) -> None:
        self._times: list[float] = []

    @property
    def step_ends(self) -> list[float]:
        return self._times[1:]

    def put(self, _value: torch.Tensor) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _text(
    prompt: TokenIds,
    token_ids: Sequence[int],
    *,
    sent_at: float,
    arrivals: Sequence[tuple[float, int]],
) -> Served:
    return Served(
        prompt=prompt,
        stream=0,
        strategy=Strategy.AUTOREGRESSIVE,
        sent_at=sent_at,
        arrivals=tuple(arrivals),
        token_ids=tuple(token_ids),
    )
