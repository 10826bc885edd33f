"""With --invariant what is computed for a text follows from the text alone, bit by bit."""

from __future__ import annotations

import itertools
import random
from array import array
from contextlib import contextmanager

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.attention_kernels import Attention, attend_apart
from paceline_engine.torch_backend.blockwise import (
    BlockSizes,
    Kernel,
    compute_in_blocks,
    pack_all,
    rows_are_alike,
)
from paceline_engine.torch_backend.decoders import take_sample
from paceline_engine.torch_backend.invariance import is_invariant
from paceline_engine.torch_backend.invariant import TILE, InvariantRows
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import KeyValueShape, Slabs
from paceline_engine.torch_backend.library import LibraryDecoder
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.packed_linear import PackedProduct, PlainProduct, can_pack
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_model_server.loading import new_host
from paceline_model_server.settings import ModelServerSettings
from support.device import on_a_cpu
from support.families import build_family
from support.trees import random_tree
from unit.engine.conftest import NEVER, chain

SPEC = SessionSpec(256)
# Beyond two tiles of keys.
LENGTHS = (1, 150)
VOCABULARY_SIZE = 300


def load(directory, *, dtype="float32", fused=True, invariant=True) -> TransformersBackend:
    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr("paceline_engine.torch_backend.decoders.can_fuse", lambda _: False)
        backend = TransformersBackend(str(directory), dtype=dtype, invariant=invariant)
    assert isinstance(backend.decoder, FusedLlama if fused else LibraryDecoder)
    assert backend.description.is_invariant == invariant
    return backend


class Mixture:
    """Texts in forwards as chance has it; what is scored of each is compared with it alone.

    Attributes:
        met: What there was.
        row_count: Rows that were compared.
        different: Those of them that had other bits.
    """

    def __init__(self, backend, *, texts: int, seed: int) -> None:
        self.backend, self.chance = backend, random.Random(seed)
        self.texts = [
            [self.chance.randrange(VOCABULARY_SIZE) for _ in range(self.chance.randint(*LENGTHS))]
            for _ in range(texts)
        ]
        self.alone = [self.scores_alone(text) for text in self.texts]
        self.caches = [backend.new_cache(SPEC) for _ in self.texts]
        self.reached = [0] * texts
        self.met: set[str] = set()
        self.row_count = self.different = 0

    def scores_alone(self, text):
        """All rows of a text, in one forward of its own."""
        cache = self.backend.new_cache(SPEC)
        item = Item(cache, SPEC, prefix=array("I", text[:1]), task=Judge(chain(text[1:])))
        ((_, scores),) = self.scored([item])
        return scores

    @contextmanager
    def watched(self):
        """Yield a list that gets each item that is scored, with the logits of its rows."""
        found, decide = [], self.backend._decide

        def look(item, feed, *, scores, **options):
            if feed.scored_count:
                found.append((item, scores.clone()))
            return decide(item, feed, scores=scores, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.backend, "_decide", look)
            yield found

    def scored(self, items, row_limit=None):
        """Run items, and return those that were scored, with the logits of their rows."""
        with self.watched() as found:
            outcomes = self.backend.run(items, NEVER, row_limit=row_limit)
        assert not any(isinstance(each, Exception) for each in outcomes)
        return found

    def run(self, steps: int) -> None:
        for _ in range(steps):
            count = self.chance.choice(
                [1, len(self.texts), self.chance.randint(1, len(self.texts))]
            )
            group = self.chance.sample(range(len(self.texts)), count)
            items = {n: self.item(n) for n in group}
            rows = [each.row_count() for each in items.values()]
            limit = self.chance.choice([None, sum(rows[:-1]) + self.chance.randint(1, 40)])
            found = self.scored(list(items.values()), limit)
            if len(found) < len(items):
                self.met.add("a part of a prompt")
            self.met.add("alone" if count == 1 else "beside others")
            for n, each in items.items():
                for item, scores in found:
                    if item is each:
                        self.compare(n, item, scores)

    def item(self, n: int) -> Item:
        """A prefix further than before or shorter, and a block that may go wrong."""
        text = self.texts[n]
        if self.chance.random() < 0.2:
            length = self.chance.randint(1, len(text))
        else:
            length = min(len(text), self.reached[n] + self.chance.choice([1, 1, 2, 5, 70, 90]))
        self.reached[n] = length
        prefix = array("I", text[:length])
        if self.chance.random() < 0.5:
            self.met.add("a row")
            return Item(
                self.caches[n],
                SPEC,
                prefix=prefix,
                task=self.chance.choice([Draft(), Judge(chain([]))]),
            )
        right = text[length : length + self.chance.randint(0, 9)]
        wrong = [self.chance.randrange(VOCABULARY_SIZE) for _ in range(self.chance.randint(0, 5))]
        if self.chance.random() < 0.4:
            self.met.add("a tree")
            tree = random_tree(self.chance, right, size=12, vocabulary_size=VOCABULARY_SIZE)
            return Item(self.caches[n], SPEC, prefix=prefix, task=Judge(tree))
        self.met.add("a block that goes wrong" if wrong else "a block")
        return Item(self.caches[n], SPEC, prefix=prefix, task=Judge(chain([*right, *wrong])))

    def compare(self, n: int, item: Item, scores) -> None:
        text, start = self.texts[n], len(item.prefix)
        tree = item.task.proposal if isinstance(item.task, Judge) else chain([])
        paths = [[], *(sorted(tree.ancestors(index)) for index in range(len(tree)))]
        for path, actual in zip(paths, scores, strict=True):
            if list(tree.along(path)) == text[start : start + len(path)]:
                self.row_count += 1
                self.different += not torch.equal(actual, self.alone[n][start + len(path) - 1])


ALL = {
    "a part of a prompt",
    "alone",
    "beside others",
    "a row",
    "a block",
    "a block that goes wrong",
    "a tree",
}


# Every two of a number of texts, a dtype and a way to compute meet; all in `make test-long`.
MIXED = [
    (2, "float32", True),
    (2, "bfloat16", False),
    (64, "float32", False),
    (64, "bfloat16", True),
]
OTHERS = [
    cell
    for cell in itertools.product((2, 64), ("float32", "bfloat16"), (True, False))
    if cell not in MIXED
]


@pytest.mark.parametrize(
    ("texts", "dtype", "fused"),
    [*MIXED, *(pytest.param(*cell, marks=pytest.mark.long) for cell in OTHERS)],
)
def test_a_rows_logits_follow_from_its_text_alone(tiny_pair, dtype, fused, texts):
    mixture = Mixture(load(tiny_pair.target, dtype=dtype, fused=fused), texts=texts, seed=2)
    mixture.run(40 if texts < 64 else 12)
    assert mixture.met == ALL
    assert mixture.row_count > 50
    assert mixture.different == 0


STEPS = 8


def drafts(backend, *prompts) -> list[Item]:
    """Drafts that grow as trees for so many steps."""
    task = Draft(STEPS, width=3, branch_count=4)
    return [
        Item(backend.new_cache(SPEC), SPEC, prefix=array("I", prompt), task=task)
        for prompt in prompts
    ]


def compared_step(mixture, items) -> int:
    """Do a step of drafts; what they follow has the bits of its text. Return how many rows."""
    before = [item.draft_tree for item in items]
    with mixture.watched() as seen:
        outcomes = mixture.backend.run(items, NEVER)
    row_count = 0
    for item, tree, outcome, (_, scores) in zip(items, before, outcomes, seen, strict=True):
        item.take(outcome)
        for index, actual in zip(tree.due, scores, strict=bool(tree.due)):
            text = [*item.prefix, *tree.found.along(sorted(tree.found.ancestors(index)))]
            assert torch.equal(actual, mixture.scores_alone(text)[-1])
            row_count += 1
    return row_count


# Its paths go over the edge of a tile.
PROMPT = range(60)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "library"])
def test_a_draft_that_grows_as_a_tree_has_its_texts_bits(tiny_pair, fused):
    mixture = Mixture(load(tiny_pair.drafter, fused=fused), texts=0, seed=1)
    items = drafts(mixture.backend, PROMPT)
    assert sum(compared_step(mixture, items) for _ in range(STEPS)) > 20


def test_a_tree_has_its_texts_bits_after_its_attention_failed_half_way(tiny_pair, monkeypatch):
    """Beside another text: then both are computed again, on what they had."""
    mixture = Mixture(load(tiny_pair.drafter), texts=0, seed=1)
    items = drafts(mixture.backend, PROMPT, [*reversed(PROMPT)])

    def attend(queries, **options):
        if next(passes) == fails_at:
            raise RuntimeError("can't allocate memory")
        return attend_apart(queries, **options)

    monkeypatch.setattr("paceline_engine.torch_backend.invariant.attend_apart", attend)
    for fails_at in range(STEPS):
        passes = itertools.count()
        compared_step(mixture, items)
        assert next(passes) > fails_at


@pytest.mark.parametrize(
    ("dtype", "fused"),
    [
        ("float32", True),
        ("bfloat16", False),
        pytest.param("float32", False, marks=pytest.mark.long),
        pytest.param("bfloat16", True, marks=pytest.mark.long),
    ],
)
def test_without_the_option_they_do_not(tiny_pair, dtype, fused):
    backend = load(tiny_pair.target, dtype=dtype, fused=fused, invariant=False)
    mixture = Mixture(backend, texts=9, seed=9)
    mixture.run(40)
    assert mixture.different > 0


# Windows, soft caps, sinks, learned positions, norms of queries, and weights the other way round.
HOLDS = (
    "gemma2", "gemma3", "gpt-bigcode", "gpt-neox", "gpt2", "granite", "llama", "mistral", "olmo2",
    "opt", "phi", "phi3", "qwen2", "qwen3", "starcoder2",
)  # fmt: skip
# With a recurrent state, alone or beside attention.
RECURRENT = (
    "bamba", "falcon-h1", "granite 4 dense", "lfm2", "mamba 2", "nemotron-h", "olmo hybrid",
    "qwen3.5",
)  # fmt: skip
# Rows go to experts; the library computes them one text at a time; rotations change.
REFUSED = (
    "mixtral", "gpt-oss", "deepseek-v3", "bloom", "falcon", "dynamic", "granite 4 hybrid",
    "qwen3-next",
)  # fmt: skip


# Each family once; with the other dtype, too, in `make test-long`.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[pytest.mark.long] * (index % 2 != place))
        for index, name in enumerate((*HOLDS, *RECURRENT))
        for place, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_it_holds_for_many_families(name, dtype, tmp_path):
    backend = TransformersBackend(
        str(build_family(name, tmp_path / name)), dtype=dtype, invariant=True
    )
    mixture = Mixture(backend, texts=6, seed=3)
    mixture.run(20)
    assert mixture.row_count > 50
    assert mixture.different == 0


@pytest.mark.parametrize("name", ["falcon-h1", "qwen3.5"])
def test_a_draft_that_grows_across_the_edge_of_a_tile_has_its_texts_bits(name, tmp_path):
    backend = TransformersBackend(str(build_family(name, tmp_path / name)), invariant=True)
    mixture = Mixture(backend, texts=2, seed=7)
    prompts = [[n % VOCABULARY_SIZE for n in range(3, 3 + length)] for length in (60, 62, 125, 9)]
    items = drafts(backend, *prompts)
    assert sum(compared_step(mixture, items) for _ in range(STEPS)) > 4 * STEPS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_for_which_it_does_not_hold_is_refused_in_a_line(name, dtype, tmp_path):
    directory = str(build_family(name, tmp_path / name))
    with pytest.raises(ModelLoadError, match="--invariant") as caught:
        TransformersBackend(directory, dtype=dtype, invariant=True)
    assert "\n" not in str(caught.value)


def test_more_threads_than_one_are_refused(tiny_pair):
    with pytest.raises(ModelLoadError, match="one thread of a CPU"):
        TransformersBackend(str(tiny_pair.target), threads=2, invariant=True)


async def test_a_server_hands_the_option_on(tiny_pair):
    settings = ModelServerSettings(model=str(tiny_pair.target), threads=2, invariant=True)
    with pytest.raises(ModelLoadError, match="--invariant"):
        await new_host(settings, role="target", on_failure=print).start()


def sample_forwards(backend):
    """What the proof at load computes."""
    return is_invariant(
        backend.decoder,
        take_sample(backend.model).shape,
        vocabulary_size=VOCABULARY_SIZE,
        context_length=4096,
        multiple=backend.row_multiple,
    )


@on_a_cpu
def test_the_proof_at_load_sees_a_row_that_looks_at_its_neighbours(tiny_pair):
    backend = load(tiny_pair.target)
    assert sample_forwards(backend)
    hook = backend.decoder.layers[1].register_forward_hook(
        lambda _module, _rows, hidden: hidden + 1e-6 * len(hidden)
    )
    assert not sample_forwards(backend)
    hook.remove()


def after(most_keys, wrong):
    """Attention that is `wrong` for rows after more keys than that."""

    def attend(queries, *, keys, **options):
        seen = attend_apart(queries, keys=keys, **options)
        return wrong(seen) if keys.shape[2] > most_keys else seen

    return attend


@on_a_cpu
@pytest.mark.parametrize("most_keys", [128, 960, 2048])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda seen: seen + 1e-6 * seen.shape[2],
        lambda seen: seen + 1e-6 * torch.arange(seen.shape[2])[:, None],
    ],
    ids=["the number of rows", "the place among the rows"],
)
def test_the_proof_at_load_sees_what_only_long_texts_show(tiny_pair, monkeypatch, most_keys, wrong):
    backend = load(tiny_pair.target)
    monkeypatch.setattr(
        "paceline_engine.torch_backend.invariant.attend_apart", after(most_keys, wrong)
    )
    assert not sample_forwards(backend)
    monkeypatch.setattr(
        "paceline_engine.torch_backend.invariant.attend_apart", after(1 << 20, wrong)
    )
    assert sample_forwards(backend)


@on_a_cpu
def test_the_proof_at_load_sees_texts_that_change_one_another_in_one_kernel(tiny_pair, monkeypatch):
    backend = load(tiny_pair.target)

    def attend(queries, *, keys, **options):
        seen = attend_apart(queries, keys=keys, **options)
        return seen + 1e-6 * (len(seen) - 1) if 128 < keys.shape[2] < 512 else seen

    monkeypatch.setattr("paceline_engine.torch_backend.invariant.attend_apart", attend)
    assert not sample_forwards(backend)


class Doubling(torch.nn.Linear):
    """A linear module that computes something else with its weight."""

    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_a_module_that_computes_something_else_with_its_weight_goes_on_to_do_so():
    model = torch.nn.Sequential(Doubling(64, 96), torch.nn.Linear(96, 64))
    rows = torch.randn(70, 64)
    with torch.inference_mode():
        expected = model(rows)
        assert len(pack_all(model, None)) == 2
        compute_in_blocks(model, None, (4, 8, 32))
        assert torch.allclose(model(rows), expected, atol=1e-5)
        assert torch.allclose(model(rows[None]), expected, atol=1e-5)


def no_packing(monkeypatch):
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)


@on_a_cpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "library"])
@pytest.mark.parametrize(
    ("is_other", "multiple", "most"),
    [
        (lambda count: count % 16, 16, 64),
        (lambda count: count > 32, 4, 32),
        (lambda count: count % 16 or count > 32, 16, 32),
    ],
    ids=["below 16", "above 32", "both"],
)
def test_on_a_processor_with_other_kernels_for_some_numbers_of_rows_blocks_have_none_of_these(
    tiny_pair, monkeypatch, fused, is_other, multiple, most
):
    product = torch.nn.functional.linear
    counts = set()

    def linear(hidden, weight, bias=None):
        count = hidden[..., 0].numel()
        counts.add(count)
        return product(hidden, weight, bias) + (1e-6 if is_other(count) else 0)

    no_packing(monkeypatch)
    monkeypatch.setattr("torch.nn.functional.linear", linear)
    backend = load(tiny_pair.target, fused=fused)
    assert backend.row_multiple == multiple
    counts.clear()
    mixture = Mixture(backend, texts=9, seed=4)
    mixture.run(20)
    assert max(counts) == most
    assert mixture.row_count > 50
    assert mixture.different == 0


@on_a_cpu
def test_a_processor_whose_products_differ_for_any_number_of_rows_is_refused(
    tiny_pair, monkeypatch
):
    product = torch.nn.functional.linear

    def linear(hidden, weight, bias=None):
        return product(hidden, weight, bias) + 1e-6 * len(hidden)

    no_packing(monkeypatch)
    monkeypatch.setattr("torch.nn.functional.linear", linear)
    with pytest.raises(ModelLoadError, match="--invariant"):
        load(tiny_pair.target)


@on_a_cpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Conv1D, PackedProduct, PlainProduct])
def test_another_order_of_additions_is_seen_in_each_kind_of_product(monkeypatch, kind, dtype):
    """Also where no more than the last bit of a float32 sum differs."""
    if kind is PackedProduct and not can_pack([torch.zeros(1, 1, dtype=getattr(torch, dtype))]):
        pytest.skip("nothing is packed on this processor")
    strides = () if kind is PackedProduct else (96, 1)
    kernel = Kernel((80, 96), getattr(torch, dtype), strides, True, kind)
    with_weight = Kernel.with_weight

    def in_two_orders(kernel, weight):
        ours, theirs = with_weight(kernel, weight), with_weight(kernel, weight.flip(1))
        return lambda rows: theirs(rows.flip(1)) if len(rows) == 16 else ours(rows)

    monkeypatch.setattr(Kernel, "with_weight", in_two_orders)
    assert not rows_are_alike([kernel], BlockSizes(16, 32))


@pytest.mark.parametrize("how", [Attention(scale=0.3), Attention(scale=0.3, window=9, soft_cap=2)])
def test_texts_in_one_tile_have_one_kernel_and_the_bits_that_they_have_alone(how):
    shape = KeyValueShape(1, 2, 8, 8, torch.float32, torch.device("cpu"))
    generator, lengths = torch.Generator().manual_seed(3), [40, 50, 63, 64, 65, 90]
    slabs = Slabs(shape, tile=TILE)
    texts = [KeyValues(slabs, reserve_length=128) for _ in lengths]
    for text, length in zip(texts, lengths, strict=True):
        text.make_room(100)
        kept = torch.randn(2, 2, length, 8, generator=generator)
        InvariantRows([text], [range(length)], [0]).keep(0, *kept)
        text.extend(array("I", range(length)))
    states = torch.randn(3, 4, 8, 8, generator=generator)
    queries, keys, values = states[0], states[1][:2], states[2][:2]
    together = InvariantRows(texts, [[7]] * 6, [1] * 6)
    seen = together.attend(0, queries, keys=keys, values=values, how=how)
    # Beyond the 64th token they are in the next tile.
    assert len(together._kernels) == 2
    for row, text in enumerate(texts):
        alone = InvariantRows([text], [[7]], [1])
        own = [states[:, row : row + 4] for states in (queries, keys, values)]
        asked, *made = (torch.nn.functional.pad(each, (0, 0, 0, 4 - each.shape[1])) for each in own)
        expected = alone.attend(0, asked, keys=made[0], values=made[1], how=how)
        assert torch.equal(expected[:, 0], seen[:, row])


def test_made_keys_are_attended_to_in_tiles_as_kept_ones_are(tiny_pair):
    """Latent attention is met in models with experts only; there is none that it would serve."""
    shape = KeyValueShape(1, 2, 8, 8, torch.float32, torch.device("cpu"))
    generator, how = torch.Generator().manual_seed(3), Attention(scale=0.3)
    slabs = Slabs(shape, tile=TILE)
    pairs = [[KeyValues(slabs, reserve_length=200) for _ in range(2)] for _ in "ab"]
    chains, trees = [(), ()], [(0, 1, 1, 0), (0, 0, 2, 3)]
    for counts, parents in (
        ([70, 3], chains),
        ([1, 90], chains),
        ([40, 1], chains),
        ([9, 4], trees),
    ):
        total = -(-sum(counts) // 4) * 4
        queries, keys, values = torch.randn(3, 2, total, 8, generator=generator)
        seen = []
        for made, texts in enumerate(pairs):
            for text, count in zip(texts, counts, strict=True):
                text.make_room(count)
            rows = InvariantRows(texts, [range(count) for count in counts], counts, parents=parents)
            if made:
                made_keys, made_values = rows.keep(0, keys, values)
                seen.append(
                    rows.attend_to_made(queries, keys=made_keys, values=made_values, how=how)
                )
            else:
                seen.append(rows.attend(0, queries, keys=keys, values=values, how=how))
            for text, count, own in zip(texts, counts, parents, strict=True):
                text.extend(array("I", range(count)), own)
        assert seen[0].shape == queries.shape
        assert torch.equal(*seen)
