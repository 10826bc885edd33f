"""Open tiles: rows that are kept beside a recurrent state give the logits of the whole text.

The reference is the library's own forward over the whole text, without a cache.
"""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.torch_backend.recurrent.open_tile import TILE
from paceline_engine.torch_backend.recurrent.recurrent_rows import RecurrentLayers
from paceline_engine.torch_backend.recurrent.recurrent_text import MARGIN
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import VOCABULARY_SIZE, build_family
from support.held_memory import held_bytes
from unit.engine.conftest import NEVER, chain

LENGTH = 300
SPEC = SessionSpec(LENGTH + 40)
CLOSE = 5e-3  # of log probabilities; rounding makes up to 1e-3, a row too many some 0.1
# Each family as it is, and some of them with each row by itself (`--invariant`).
CASES = [
    *((name, False) for name in ("qwen3.5", "falcon-h1", "mamba 2", "lfm2")),
    *((name, True) for name in ("qwen3.5", "falcon-h1")),
]


class Texts:
    """Texts of chance in a model of a family, and the log probabilities of their tokens."""

    def __init__(self, name, directory, *, invariant, count=3) -> None:
        build_family(name, directory)
        self.backend = TransformersBackend(str(directory), invariant=invariant)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        chance = random.Random(name)
        size = VOCABULARY_SIZE - 1  # the last token is for rows that are dropped
        self.texts = [[chance.randrange(size) for _ in range(LENGTH)] for _ in range(count)]
        with torch.inference_mode():
            logits = model(torch.tensor(self.texts)).logits.log_softmax(-1)
        told = torch.tensor(self.texts)[:, 1:, None]
        self.logprobs = logits[:, :-1].gather(-1, told)[..., 0].tolist()
        self.renew()

    def renew(self) -> None:
        """Begin without any state."""
        self.caches = [self.backend.new_cache(SPEC) for _ in self.texts]

    def item(self, n, length, right, wrong=()) -> Item:
        """Ask for the next tokens of a text, some of them wrong, after its first ones."""
        block = [*self.texts[n][length : length + right], *wrong]
        prefix = array("I", self.texts[n][:length])
        task = Judge(chain(block), logprobs=True, score=True)
        return Item(self.caches[n], SPEC, prefix=prefix, task=task)

    def check(self, asked) -> list[int]:
        """Compute the items of (text, length, right, wrong) together; return their row counts."""
        outcomes = self.backend.run([self.item(*each) for each in asked], NEVER)
        for (n, length, right, *_), outcome in zip(asked, outcomes, strict=True):
            found = outcome.judgement.logprobs[:right]
            expected = self.logprobs[n][length - 1 : length - 1 + right]
            assert found == pytest.approx(expected, abs=CLOSE), (n, length, right)
        return [outcome.row_count for outcome in outcomes]


@pytest.fixture(
    scope="module",
    params=CASES,
    ids=[f"{name} invariant" if invariant else name for name, invariant in CASES],
)
def texts(request, tmp_path_factory):
    name, invariant = request.param
    return Texts(name, tmp_path_factory.mktemp("family"), invariant=invariant)


def test_rows_that_come_and_go_by_chance_leave_no_trace(texts):
    chance = random.Random(4)
    texts.renew()
    lengths = [1] * len(texts.texts)
    back = 0
    while min(lengths) < LENGTH - 10:
        group = chance.sample(range(3), chance.randint(1, 3))
        asked = []
        for n in group:
            if chance.random() < 0.1:  # as after a rejection by another target, or another prompt
                lengths[n] = chance.randint(max(1, lengths[n] - 100), lengths[n])
                back += 1
            right = min(chance.choice([0, 1, 3, 8, 20, 70]), LENGTH - lengths[n])
            wrong = [chance.randrange(VOCABULARY_SIZE) for _ in range(chance.randint(0, 4))]
            asked.append((n, lengths[n], right, wrong))
        texts.check(asked)
        for n, length, right, _ in asked:
            lengths[n] = min(LENGTH - 1, length + chance.randint(right // 2, right))
    assert back


def test_a_rejection_across_the_edge_of_a_tile_leaves_no_trace(texts):
    texts.renew()
    for edge in (TILE, 2 * TILE, 3 * TILE):
        for length in (edge - 3, edge - 1):
            texts.check([(0, length, 0, [7, 8, 9, 7, 8, 9])])
        texts.check([(0, edge - 1, 8)])
        texts.check([(0, edge + 20, 4)])


def test_a_text_is_cut_to_each_length_of_its_open_rows_and_to_its_prompt_below(texts):
    texts.renew()
    end = 4 * TILE - 1
    base = end // TILE * TILE - MARGIN
    for length in [*range(end, base, -9), base + 4, base + 3, base + 2, base + 1]:
        texts.check([(0, end, 3)])
        (rows,) = texts.check([(0, length, 4)])
        assert rows == 1 + 4, "only the last token and the block"
    texts.check([(0, end, 3)])
    (rows,) = texts.check([(0, base - 1, 4)])
    assert rows == base - 1 + 4, "a prefix behind the open rows is computed anew"


def test_the_layers_of_a_long_prompt_hold_no_more_memory_than_is_counted(texts):
    texts.renew()
    texts.check([(0, LENGTH - 1, 0)])
    counted = texts.backend.token_memory().bytes_per_text
    assert 0 < held_bytes(texts.caches[0].layers) <= counted


def test_another_answer_to_a_prompt_begins_at_the_prompts_tiles(texts):
    texts.renew()
    prompt = 3 * TILE + 5
    texts.check([(1, prompt, 2)])
    for length in range(prompt, LENGTH - 20, 5):
        texts.check([(1, length, 5)])
    (rows,) = texts.check([(1, prompt, 4)])
    kept = 3 * TILE - MARGIN - TILE
    assert rows <= prompt - kept + 4
    kept_text, texts.caches[1] = texts.caches[1], texts.backend.new_cache(SPEC)
    texts.caches[1].begin_like(kept_text)
    (rows,) = texts.check([(1, prompt + 2, 4)])
    assert rows == 1 + 4, "a kept text is copied"
    texts.check([(1, prompt - 9, 60)])


def test_what_is_no_number_in_a_dropped_row_does_not_come_back(texts):
    texts.renew()
    embeddings = texts.backend.model.get_input_embeddings().weight
    bad = VOCABULARY_SIZE - 1
    with torch.inference_mode():
        before = embeddings[bad].clone()
        embeddings[bad] = torch.nan
    try:
        for length in (60, 64, 65, 66, 67, 68, 140, 200):
            texts.check([(0, length, 1)])
            # In its own forward it spoils the other rows, which are computed again.
            texts.backend.run([texts.item(0, length, 0, [bad, 1])], NEVER)
            texts.check([(0, length, 4), (1, length, 1)])
    finally:
        with torch.inference_mode():
            embeddings[bad] = before


def test_a_model_whose_logits_are_off_with_open_rows_is_computed_row_by_row(tmp_path, monkeypatch):
    convolve = RecurrentLayers.convolve
    twice = lambda *own, **more: 2 * convolve(*own, **more)  # noqa: E731
    monkeypatch.setattr(RecurrentLayers, "convolve", twice)
    backend = TransformersBackend(str(build_family("lfm2", tmp_path)))
    assert backend.judges_row_by_row


@pytest.mark.parametrize("family", ["mamba", "rwkv"])
def test_invariance_is_refused_in_a_line_where_no_rows_are_kept(family, tmp_path):
    directory = build_family(family, tmp_path)
    with pytest.raises(ModelLoadError, match="with --invariant: its recurrent state has no form"):
        TransformersBackend(str(directory), invariant=True)
