"""What a forward of one row of many texts takes: the engine alone, plain decoding.

Run from the repository's root; it prints a line for each kind of texts and each number of them: CPU
time of the thread in ms, for a machine that others use. To compare two versions take them in turn,
with PYTHONPATH for the other one's `services`; the last column says whether they found the same.
"""

from __future__ import annotations

import json
import random
import threading
import time
import zlib
from array import array
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from paceline_engine.terms.calls import SamplingParameters, SessionSpec
from paceline_engine.terms.items import Decode, Item
from paceline_engine.torch_backend.transformers import TransformersBackend

MODEL = Path("models/python-target")
PROMPTS = Path("models/prompts.jsonl")
STREAMS, STEPS, PROMPT_TOKENS = (1, 16, 64), 15, 64
MIXED_TOKENS = (30, 120)
GREEDY, SAMPLED = SamplingParameters(), SamplingParameters(0.8, top_p=0.95)
KINDS = {"one length": GREEDY, "mixed lengths": GREEDY, "sampled": SAMPLED}


def main() -> None:
    """Measure each kind of texts, with one text or more."""
    backend = TransformersBackend(str(MODEL))
    for kind in KINDS:
        for streams in STREAMS:
            print(kind, streams, measure(backend, new_items(backend, kind, streams)), flush=True)


def new_items(backend: TransformersBackend, kind: str, streams: int) -> list[Item]:
    """Begin so many texts."""
    tokenizer, chance = Tokenizer.from_file(str(MODEL / "tokenizer.json")), random.Random(5)  # noqa: S311 - no secret
    lines = (json.loads(line) for line in PROMPTS.read_text().splitlines())
    ids = [token for line in lines for token in tokenizer.encode(line["text"]).ids]
    items = []
    for index in range(streams):
        length = chance.randint(*MIXED_TOKENS) if kind == "mixed lengths" else PROMPT_TOKENS
        spec = SessionSpec(256, KINDS[kind], seed=index)
        prompt = array("I", ids[index * PROMPT_TOKENS :][:length])
        items.append(Item(backend.new_cache(spec), spec, prefix=prompt, task=Decode(STEPS + 1)))
    return items


def measure(backend: TransformersBackend, items: list[Item]) -> str:
    """Say what the prompts' forward takes, the others' median, and what was found."""
    times = []
    for _ in range(STEPS + 1):
        started = time.thread_time()
        for item, outcome in zip(items, backend.run(items, threading.Event()), strict=True):
            assert not isinstance(outcome, Exception)
            item.take(outcome)
        times.append(1e3 * (time.thread_time() - started))
    found = zlib.crc32(b"".join(item.prefix.tobytes() for item in items))
    return f"prompts {times[0]:.1f}, then {median(times[1:]):.2f}, texts {found:08x}"


if __name__ == "__main__":
    main()
