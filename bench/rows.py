"""What a forward of several rows takes, with packed weights and without.

Run from the repository's root; it prints a line for each model and number of rows: ms, medians, in
turn. The bundled models, and one of some 100 million random weights.
"""

from __future__ import annotations

import time
from array import array
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from paceline_engine.torch_backend import llama
from paceline_engine.torch_backend.decoders import take_sample
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import SharedRows

ROWS, ROUNDS, TEXT = (1, 2, 3, 5, 9, 17, 33, 64), 30, 100


def main() -> None:
    """Measure each model."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name, dtype in (
        ("models/python-target", torch.float32),
        ("models/python-drafter", torch.float32),
        ("100M", torch.float32),
        ("100M", torch.bfloat16),
    ):
        with torch.inference_mode():
            measure(name, dtype)


def measure(name: str, dtype: torch.dtype) -> None:
    """Print what forwards of a model take."""
    ways = {packs: loaded(name, dtype, packs=packs) for packs in (False, True)}
    for count in ROWS:
        ids = list(range(count))
        times: dict[bool, list[float]] = {packs: [] for packs in ways}
        for _ in range(ROUNDS):
            for packs, (decoder, text) in ways.items():
                started = time.perf_counter()
                decoder(SharedRows([text], [ids], [count]))
                times[packs].append(1e3 * (time.perf_counter() - started))
        plain, packed = median(times[False]), median(times[True])
        ratio = packed / plain
        print(f"{name} {dtype} {count}: {plain:.2f}, packed {packed:.2f} ({ratio:.2f})", flush=True)


def loaded(name: str, dtype: torch.dtype, *, packs: bool) -> tuple[FusedLlama, KeyValues]:
    """Load a model, and have it read a text."""
    model = random_model() if name == "100M" else AutoModelForCausalLM.from_pretrained(name)
    model = model.to(dtype).eval()
    sample = take_sample(model)
    assert sample.shape is not None
    can_pack = llama.can_pack
    try:
        if not packs:
            llama.can_pack = lambda _: False
        decoder = FusedLlama(model)
    finally:
        llama.can_pack = can_pack
    text = KeyValues(Slabs(sample.shape), reserve_length=2 * TEXT)
    text.make_room(TEXT + max(ROWS))
    ids = array("I", range(TEXT))
    decoder(SharedRows([text], [ids], [1]))
    text.extend(ids)
    return decoder, text


def random_model() -> Any:
    """Make a model of some 100 million weights."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
