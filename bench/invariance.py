"""How often a text depends on how it came, and what `--invariant` costs: the engine alone.

Run from the repository's root; it prints Markdown. bench/LOG.md has what it said.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from array import array
from itertools import islice
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.transformers import TransformersBackend

MODEL = Path("models/python-target")
PROMPTS = Path("models/prompts.jsonl")
TEXTS, PROMPT_TOKENS, NEW_TOKENS = 64, 64, 32
LENGTH = PROMPT_TOKENS + NEW_TOKENS
GREEDY, SAMPLED = SamplingParameters(), SamplingParameters(0.8, top_p=0.95)
# Of a block's tokens, and how many of them are right.
BLOCK, RIGHT = 5, 0.8
STREAMS = (1, 16, 64)
ROUNDS, ROUND_TOKENS = 5, 12
NEVER = threading.Event()

Texts = list[list[int]]


def main() -> None:
    """Measure `cost` or `texts`, with one dtype or more."""
    prompts = read_prompts()
    what, *dtypes = sys.argv[1:]
    for dtype in dtypes:
        backends = {
            name: TransformersBackend(str(MODEL), dtype=dtype, invariant=name == "invariant")
            for name in ("usual", "invariant")
        }
        if what == "cost":
            for streams in STREAMS:
                print(f"| {dtype}, {streams} |", cost(backends, prompts, streams), flush=True)
            continue
        for name, backend in backends.items():
            for kind, parameters in {"greedy": GREEDY, "sampled": SAMPLED}.items():
                print(
                    f"| {dtype}, {name}, {kind} |", tell(backend, prompts, parameters), flush=True
                )


def read_prompts() -> Texts:
    """Cut as many prompts as there are texts, of one length."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    lines = (json.loads(line) for line in PROMPTS.read_text().splitlines())
    ids = [token for line in lines for token in tokenizer.encode(line["text"]).ids]
    return [
        ids[start : start + PROMPT_TOKENS]
        for start in range(0, TEXTS * PROMPT_TOKENS, PROMPT_TOKENS)
    ]


def tell(backend: TransformersBackend, prompts: Texts, parameters: SamplingParameters) -> str:
    """Say how many texts differ from those that were decoded alone and plainly."""
    specs = [SessionSpec(LENGTH + BLOCK, parameters, seed=seed) for seed in range(len(prompts))]
    alone = decode(backend, prompts, specs, streams=1)
    found = [
        in_blocks(backend, prompts, specs=specs, alone=alone),
        *(decode(backend, prompts, specs, streams=streams) for streams in STREAMS[1:]),
    ]
    return " ".join(
        f"{sum(one != other for one, other in zip(alone, each, strict=True))} |" for each in found
    )


def decode(
    backend: TransformersBackend,
    prompts: Texts,
    specs: list[SessionSpec],
    *,
    streams: int,
) -> Texts:
    """Decode plainly, so many texts in each forward."""
    texts: Texts = []
    for start in range(0, len(prompts), streams):
        items = [
            Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=Draft(NEW_TOKENS))
            for prompt, spec in islice(zip(prompts, specs, strict=True), start, start + streams)
        ]
        for _ in range(NEW_TOKENS):
            step(backend, items)
        texts.extend(list(item.prefix) for item in items)
    return texts


def in_blocks(
    backend: TransformersBackend, prompts: Texts, *, specs: list[SessionSpec], alone: Texts
) -> Texts:
    """Decode in blocks, of which most tokens are those of the texts that were decoded alone."""
    chance = random.Random(7)  # noqa: S311 - no secret
    texts = [list(prompt) for prompt in prompts]
    for text, spec, expected in zip(texts, specs, alone, strict=True):
        cache = backend.new_cache(spec)
        while len(text) < LENGTH:
            block = [
                token if chance.random() < RIGHT else chance.randrange(2048)
                for token in expected[len(text) : len(text) + BLOCK]
            ]
            item = Item(cache, spec, prefix=array("I", text), task=Judge(Proposal(tuple(block))))
            (outcome,) = backend.run([item], NEVER)
            assert not isinstance(outcome, Exception)
            assert outcome.judgement is not None
            text += block[: len(outcome.judgement.accepted_path)]
            text.append(outcome.judgement.next_token)
        del text[LENGTH:]
    return texts


def step(backend: TransformersBackend, items: list[Item]) -> None:
    """Find one token more of each."""
    for item, outcome in zip(items, backend.run(items, NEVER), strict=True):
        assert not isinstance(outcome, Exception)
        item.take(outcome)


def cost(backends: dict[str, TransformersBackend], prompts: Texts, streams: int) -> str:
    """Take both in turn, and say what CPU time a forward takes, ms; and the ratio, by rounds."""
    items = {}
    for name, backend in backends.items():
        specs = [SessionSpec(512, GREEDY, seed=seed) for seed in range(streams)]
        items[name] = [
            Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=Draft(512))
            for prompt, spec in zip(prompts, specs, strict=False)
        ]
        step(backend, items[name])
    times: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(ROUNDS):
        for name, backend in backends.items():
            started = time.thread_time()
            for _ in range(ROUND_TOKENS):
                step(backend, items[name])
            times[name].append((time.thread_time() - started) / ROUND_TOKENS * 1e3)
    ratios = [after / before for before, after in zip(*times.values(), strict=True)]
    medians = " | ".join(f"{median(each):.2f}" for each in times.values())
    return f"{medians} | {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"


if __name__ == "__main__":
    main()
