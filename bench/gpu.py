"""What forwards take on a GPU, with which attention kernels, and whether they are right.

    python bench/gpu.py --json build/gpu.json
    python bench/gpu.py --device cpu --tiny          a rehearsal

In this order, so that a run that is cut has said what matters most:

1. forwards of one row and of several, after short and long texts, of a model of Llama 3.1 8B's
   sizes and of a small drafter, with random weights; as they are, and captured;
2. what sampling adds, with the kernel for noise and without;
3. forwards of many texts, one row each;
4. how often the bundled target in bfloat16 chooses otherwise in blocks than row by row;
5. whether a full device refuses a text, and goes on;
6. the kernels of one row and of nine: last, because launches are slower once a profiler has run.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from array import array
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from paceline.errors import OverloadedError
from paceline_bench.pair.random_models import RandomModel, Shape
from paceline_bench.report import json_text
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding import gumbel
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import Interrupt
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from paceline_engine.torch_backend.transformers import TransformersBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_engine.torch_backend.deciding_model import DecidingModel

_REPEATS, _MOST_ROWS = 12, 17
_SAMPLED = SamplingParameters(temperature=0.8, top_p=0.95)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        large, small: The sizes of the models.
        lengths: Tokens before the measured rows.
        rows: Numbers of rows.
        texts: Numbers of texts at once, and the tokens of each.
        prompts: How many texts of 96 tokens are decoded in two ways.
    """

    large: Shape
    small: Shape
    lengths: Sequence[int]
    rows: Sequence[int]
    texts: Sequence[tuple[int, int]]
    prompts: int


WHOLE = Plan(
    Shape(32, 4096, head=128, kv_heads=8, inner=14_336, vocabulary=128_256),
    Shape(2, 768),
    (128, 1024, 8192, 32_000),
    (1, 2, 5, 9, _MOST_ROWS),
    ((1, 1000), (4, 1000), (16, 1000), (4, 4000), (16, 4000)),
    16,
)
TINY = Plan(Shape(2, 128), Shape(1, 64), (16, 64), (1, 9), ((1, 30), (4, 30)), 1)


class Measurements:
    """What was measured so far: lists of rows by kind. Each row is printed as it comes."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.found: dict[str, list[dict[str, Any]]] = {}

    def add(self, kind: str, **row: Any) -> None:
        """Add a row, and write the file anew."""
        self.found.setdefault(kind, []).append(row)
        print(f"{kind}: {json.dumps(row)}", flush=True)
        if self._path is not None:
            self._path.write_text(json_text(self.found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, in the order of the list above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    plan = TINY if options.tiny else WHOLE
    dtype = "float32" if options.tiny else "bfloat16"
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    note = Measurements(options.json)
    is_gpu = options.device != "cpu"
    if is_gpu:
        name = torch.cuda.get_device_name(options.device)
        note.add("machine", device=name, torch=torch.__version__)
    for shape in (plan.large, plan.small):
        for capture in (False, True) if is_gpu else (False,):
            model = RandomModel(shape, dtype=dtype, device=options.device, capture=capture)
            what = {"model": str(shape), "captured": capture}
            measure_forwards(model, plan, what, note)
            measure_sampling(model, plan.lengths[1], what, note)
            measure_texts(model, plan.texts, what, note)
            del model
            gc.collect()  # A model and its hooks refer to each other.
            if is_gpu:
                torch.cuda.empty_cache()
    count_flips(options.device, dtype, plan.prompts, note)
    if is_gpu:
        fill_memory(plan.large, dtype, options.device, note)
        name_kernels(plan, dtype, options.device, note)


def measure_forwards(
    model: DecidingModel, plan: Plan, what: dict[str, Any], note: Measurements
) -> None:
    """Note the ms of forwards by rows, after texts of each length."""
    for length in plan.lengths:
        text, prefix = read(model, length)
        took = {
            rows: milliseconds(partial(text.judge, prefix, prefix[1:rows])) for rows in plan.rows
        }
        note.add("forwards", **what, length=length, ms=took)
        text.cache.clear()


def measure_sampling(
    model: DecidingModel, length: int, what: dict[str, Any], note: Measurements
) -> None:
    """Note the ms that sampling takes instead of the likeliest token."""
    kernel = gumbel.noise_kernel
    for how, parameters, with_kernel in (
        ("greedy", SamplingParameters(), True),
        ("sampled", _SAMPLED, True),
        ("sampled, in steps", _SAMPLED, False),
    ):
        gumbel.noise_kernel = kernel if with_kernel else lambda _: None  # type: ignore[assignment]
        text, prefix = read(model, length, SessionSpec(length + 64, parameters, seed=3))
        took = {rows: milliseconds(partial(text.judge, prefix, prefix[1:rows])) for rows in (1, 9)}
        note.add("sampling", **what, length=length, how=how, ms=took)
    gumbel.noise_kernel = kernel


def measure_texts(
    model: DecidingModel, texts: Sequence[tuple[int, int]], what: dict[str, Any], note: Measurements
) -> None:
    """Note the ms of a forward of one row of each of many texts."""
    for count, length in texts:
        spec = SessionSpec(length + 64)
        items = []
        for n in range(count):
            prefix = array("I", (7 * n + 13 * i for i in range(length)))
            prefix = array("I", (each % model.description.vocabulary_size for each in prefix))
            item = Item(model.new_cache(spec), spec, prefix=prefix, task=Draft())
            model.run([item], Interrupt())
            items.append(item)
        took = milliseconds(partial(model.run, items, Interrupt()))
        note.add("texts", **what, count=count, length=length, ms=took)


def count_flips(device: str, dtype: str, prompts: int, note: Measurements) -> None:
    """Note how many tokens the bundled target chooses otherwise in blocks of nine rows."""
    target = Path(__file__).resolve().parents[1] / "models/python-target"
    lines = (target.parent / "prompts.jsonl").read_text().splitlines()[:prompts]
    for each in dict.fromkeys((dtype, "float32")):
        model = TransformersBackend(str(target), device=device, dtype=each)
        assert model.tokenizer is not None
        tokenizer = Tokenizer.from_buffer(model.tokenizer)
        flips = total = 0
        for line in lines:
            prompt = tokenizer.encode(json.loads(line)["text"]).ids
            alone = ModelText(model, SessionSpec(512))
            chosen: list[int] = []
            for _ in range(96):
                chosen.append(alone.judge([*prompt, *chosen]).next_token)
            together = ModelText(model, SessionSpec(512))
            for start in range(0, 96, 8):
                block = chosen[start : start + 8]
                judged = together.judge([*prompt, *chosen[:start]], block)
                total += len(judged.accepted_path) + 1
                flips += len(judged.accepted_path) < len(block)
        note.add("flips", dtype=each, flips=flips, tokens=total)


def fill_memory(shape: Shape, dtype: str, device: str, note: Measurements) -> None:
    """Note how many long texts fit, and that a text is computed after others were refused."""
    model = RandomModel(shape, dtype=dtype, device=device)
    length, held = 30_000, []
    answer: object = None
    for _ in range(64):
        spec = SessionSpec(length + 64)
        prefix = array("I", (i % 1000 for i in range(length)))
        item = Item(model.new_cache(spec), spec, prefix=prefix, task=Draft())
        (answer,) = model.run([item], Interrupt())
        if isinstance(answer, Exception):
            break
        held.append(item)
    assert isinstance(answer, OverloadedError), answer
    after = [type(each).__name__ for each in model.run(held[:2], Interrupt())]
    note.add("memory", length=length, fit=len(held), then=type(answer).__name__, after=after)


def name_kernels(plan: Plan, dtype: str, device: str, note: Measurements) -> None:
    """Note the kernels that take most of the time, of one row and of nine."""
    model = RandomModel(plan.large, dtype=dtype, device=device)
    for length in plan.lengths[1:]:
        text, prefix = read(model, length)
        for rows in (1, 9):
            kernels = attention_kernels(partial(text.judge, prefix, prefix[1:rows]))
            note.add("kernels", model=str(plan.large), length=length, rows=rows, ms=kernels)
        text.cache.clear()


def read(
    model: DecidingModel, length: int, spec: SessionSpec | None = None
) -> tuple[ModelText, array[int]]:
    """Let a model read a text in two parts."""
    size = model.description.vocabulary_size
    prefix = array("I", (13 * n % size for n in range(length)))
    text = ModelText(model, spec or SessionSpec(length + 64))
    text.draft(prefix[: length // 2])
    text.draft(prefix)
    return text, prefix


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median of some runs, of which the first are not counted."""
    times = []
    for _ in range(_REPEATS + 3):
        started = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - started))
    return round(median(times[3:]), 3)


def attention_kernels(run: Callable[[], object]) -> dict[str, float]:
    """Return the ms of the device's kernels that take most of a run's time, and of all."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profile.key_averages():
        times[event.key[:70]] = times.get(event.key[:70], 0.0) + event.self_device_time_total / 1e3
    most = sorted(times.items(), key=lambda each: -each[1])
    kept = [each for each in most if "fmha" in each[0] or "flash" in each[0]] + most[:3]
    launches = sum(event.count for event in profile.key_averages())
    summed = {"all": sum(times.values()), "launches": launches}
    return {name: round(ms, 3) for name, ms in (*kept, *summed.items())}


if __name__ == "__main__":
    main()
