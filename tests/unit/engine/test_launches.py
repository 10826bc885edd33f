"""How many kernels an accelerator is asked for: bounds, so that a change that adds one shows.

Launching kernels takes most of the time of few rows on a GPU. Operators are counted on the meta
device, which takes an accelerator's path and computes nothing. Views and allocations launch
nothing. A kernel of ours, which needs Triton, counts as one. The numbers of docs/performance.md
("Launches") are these bounds.
"""

from __future__ import annotations

import re
from array import array
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding import gumbel
from paceline_engine.deciding.sampling import Draw, choose_each
from paceline_engine.torch_backend import shared_rows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.shared_rows import SharedRows

META = torch.device("meta")
HEADS, KV_HEADS, WIDTH, VOCABULARY = 8, 2, 64, 32_000
SIZES = {
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 512,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 14,
}
MODELS = {"Llama": (LlamaForCausalLM, LlamaConfig), "Qwen 3": (Qwen3ForCausalLM, Qwen3Config)}
DECODERS = {"fused": FusedLlama, "library": LibraryDecoder}
PARAMETERS = {
    "greedy": SamplingParameters(),
    "sampled": SamplingParameters(0.7),
    "sampled with filters": SamplingParameters(0.7, top_k=50, min_p=0.01),
}
# Texts, and rows of each: the columns of the page.
CASES = ((1, 1), (1, 9), (16, 1), (16, 9))
PAGE = Path(__file__).parents[3] / "docs" / "performance.md"


class Launches(TorchDispatchMode):
    """Counts what a device is asked to compute or to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        results = made if isinstance(made, tuple | list) else [made]
        written = func._schema.is_mutable
        known = set() if written else {*map(place, [*args, *(kwargs or {}).values()])}
        on_device = any(isinstance(it, torch.Tensor) and it.is_meta for it in results)
        is_new = any(place(it) not in known for it in results)
        if on_device and is_new and "empty" not in func.__name__:
            self.launch(func.__name__)
        return made

    def launch(self, name: str) -> None:
        self.count += 1
        self.names.append(name)


def place(thing) -> object:
    """Return what holds a tensor's numbers, which a view shares with its tensor."""
    if not isinstance(thing, torch.Tensor):
        return None
    return StorageWeakRef(thing.untyped_storage()).cdata


class OwnKernels:
    """Stands for Triton's kernels: each call is one launch."""

    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def keep(self, keys, values, **_) -> None:
        self._launches.launch("keep")

    def attend(self, queries, *, like, **_):
        self._launches.launch("attend")
        heads, count, _ = queries.shape
        return queries.new_empty((count, heads, like[1].shape[-1]))

    def noise(self, scores, *_, **__):
        self._launches.launch("noise")
        return torch.empty_like(scores)


@pytest.fixture
def launches(monkeypatch):
    """Count from here on, with our kernels as on a GPU."""
    found = Launches()
    own = OwnKernels(found)
    monkeypatch.setattr(shared_rows, "in_place_kernels", lambda *_, **__: own)
    monkeypatch.setattr(gumbel, "noise_kernel", lambda _: own.noise)
    return found


@cache
def decoder_of(model, how, layers):
    made, config = MODELS[model]
    with torch.device("meta"):
        whole = made(config(**SIZES, num_hidden_layers=layers)).to(torch.bfloat16).eval()
    return DECODERS[how](whole, packs=False)


def forward_of(decoder, launches, *, layers, texts, rows) -> int:
    """Count the launches of a forward of so many texts with so many rows each."""
    shape = KeyValueShape(layers, KV_HEADS, WIDTH, WIDTH, torch.bfloat16, META)
    slabs = Slabs(shape)
    with torch.inference_mode():
        for _ in range(2):  # the first one makes what all later ones find
            made = []
            for n in range(texts):
                text = KeyValues(slabs, reserve_length=1 << 12)
                text.make_room(1000 + n + rows)
                text.extend(array("I", range(1000 + n)))
                made.append(text)
            launches.count = 0
            launches.names.clear()
            with launches:
                shared = SharedRows(made, [range(rows)] * texts, [rows] * texts, together=True)
                decoder(shared)
    return launches.count


def per_layer_and_beside(model, how, launches, *, texts, rows) -> tuple[int, int]:
    """Return the launches of each layer, and those of a forward beside its layers."""
    two, six = (
        forward_of(decoder_of(model, how, layers), launches, layers=layers, texts=texts, rows=rows)
        for layers in (2, 6)
    )
    assert (six - two) % 4 == 0
    layer = (six - two) // 4
    return layer, two - 2 * layer


def choice_of(launches, parameters, *, texts, rows) -> int:
    """Count the launches of the choice of all rows' tokens, up to the first wait."""
    logits = torch.empty(texts * rows, VOCABULARY, dtype=torch.bfloat16, device=META)
    draws = [
        Draw(1000 + row, parameters, seed=text) for text in range(texts) for row in range(rows)
    ]
    launches.count = 0
    launches.names.clear()
    with torch.inference_mode(), launches, suppress(NotImplementedError):
        choose_each(logits, draws)
    return launches.count


def table(text: str) -> dict[str, list[int]]:
    """Return the rows of the page's table by their names: a column for each case."""
    (found,) = re.findall(r"<!-- launches -->\n(.*?)<!-- /launches -->", text, re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in found.strip().splitlines()]
    return {name: [*map(int, cells)] for name, *cells in rows[2:]}


BOUNDS = table(PAGE.read_text())


@pytest.mark.parametrize("how", DECODERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_forward_asks_for_no_more_kernels_than_the_page_says(model, how, launches):
    told = zip(
        BOUNDS[f"{model}, {how}: each layer"], BOUNDS[f"{model}, {how}: beside them"], strict=True
    )
    for (texts, rows), (layer, beside) in zip(CASES, told, strict=True):
        found = per_layer_and_beside(model, how, launches, texts=texts, rows=rows)
        assert found[0] <= layer, (texts, rows, launches.names)
        assert found[1] <= beside, (texts, rows, launches.names)


@pytest.mark.parametrize("name", PARAMETERS)
def test_choosing_tokens_asks_for_no_more_kernels_than_the_page_says(name, launches):
    for (texts, rows), bound in zip(CASES, BOUNDS[f"choosing tokens, {name}"], strict=True):
        found = choice_of(launches, PARAMETERS[name], texts=texts, rows=rows)
        assert found <= bound, (texts, rows, launches.names)


def test_the_page_has_no_other_rows():
    forwards = [f"{model}, {how}" for model in MODELS for how in DECODERS]
    parts = [f"{name}: {part}" for name in forwards for part in ("each layer", "beside them")]
    assert [*BOUNDS] == [*parts, *(f"choosing tokens, {name}" for name in PARAMETERS)]


def test_the_counting_sees_kernels_and_copies_and_no_views():
    with Launches() as launches, torch.inference_mode():
        states = torch.empty(4, 6, device=META)
        states.view(6, 4)[1:].T.unsqueeze(0)
        states.reshape(24)
        states.to(torch.float32)
        assert launches.names == []
        torch.tensor([1, 2]).to(META)
        states.T.reshape(24)
        states.double()
        states.add_(1)
        (states + 1).view(24)
    assert launches.count == 5
