"""What the model card says, beside loops over single tokens that say the same."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from corpus import SourceFile
from evaluate import Family, completions, real_text
from growth import CONTEXT
from python_text import distinct_share, tokenize_error
from vocabulary import END_OF_TEXT_ID, VOCABULARY_SIZE

MODELS = Path(__file__).parents[3] / "models"


class Bigrams:
    """A model whose next token follows from the last one alone, with as many logits as it likes."""

    def __init__(self, seed, *, end_after=()):
        generator = torch.Generator().manual_seed(seed)
        self._rows = torch.randn(VOCABULARY_SIZE, 6, generator=generator)
        self._columns = torch.randn(6, VOCABULARY_SIZE, generator=generator)
        self._end_after = torch.tensor([*end_after], dtype=torch.int64)

    def __call__(self, ids, *, logits_to_keep=0, **_options):
        logits = self._rows[ids[:, -logits_to_keep:]] @ self._columns
        logits[..., END_OF_TEXT_ID] = torch.where(
            torch.isin(ids[:, -logits_to_keep:], self._end_after), 1e4, -30.0
        )
        return SimpleNamespace(logits=logits)

    def after(self, token_id):
        return self(torch.tensor([[token_id]])).logits[0, 0].double()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "python-target", padding_side="left")


def greedy(model, token_id, count):
    found = []
    while len(found) < count:
        token_id = int(model.after(token_id).argmax())
        found.append(token_id)
        if token_id == END_OF_TEXT_ID:
            break
    return found


def test_acceptance_counts_each_token_up_to_the_end_of_a_text_and_none_after_it(tokenizer):
    prompts = ["def f(x):\n", "import os, sys\n\nprint(", "class A"]
    firsts = [tokenizer(it)["input_ids"][-1] for it in prompts]
    plain = Bigrams(1)
    paths = [greedy(plain, first, 128) for first in firsts]
    end = next(it for it in paths[0][2:] if it not in paths[1] + paths[2])
    target = Bigrams(1, end_after={end})
    # One does not know of the end, and is right about all else; the other is another model.
    drafters = {"drafter": plain, "tiny": Bigrams(2, end_after={end})}
    found = completions(Family(target, drafters, tokenizer), prompts, temperature=0.0)

    texts = [greedy(target, first, 128) for first in firsts]
    assert [len(it) for it in texts] == [paths[0].index(end) + 2, 128, 128]
    assert (found["count"], found["new_tokens"]) == (3, sum(map(len, texts)))
    for name, drafter in drafters.items():
        same = [
            int(drafter.after(before).argmax()) == token_id
            for first, text in zip(firsts, texts, strict=True)
            for before, token_id in zip([first, *text], text, strict=False)
        ]
        assert found["acceptance"][name] == pytest.approx(sum(same) / len(same))
    shares = [distinct_share(text, size=4) for text in texts]
    assert found["distinct_4_grams"] == pytest.approx(sum(shares) / 3)


def test_real_text_is_measured_token_by_token(tokenizer):
    files = [
        SourceFile("a.py", 'greeting = "Gr\u00fc\u00dfe \U0001f44b"\n' * 40),
        SourceFile("b.py", "for index in range(10):\n    print(index, end='')\n" * 30),
    ]
    models = {"target": Bigrams(1), "drafter": Bigrams(2), "tiny": Bigrams(3)}
    family = Family(models["target"], {it: models[it] for it in ("drafter", "tiny")}, tokenizer)
    found = real_text(family, files)

    ids = [tokenizer(file.text, add_special_tokens=False)["input_ids"] for file in files]
    stream = [token for each in ids for token in [END_OF_TEXT_ID, *each]]
    windows = (len(stream) - 1) // CONTEXT
    assert found["tokens"] == windows * CONTEXT > 0
    byte_count = sum(len(file.text.encode()) for file in files)
    bytes_per_token = byte_count / sum(map(len, ids))
    assert found["bytes_per_token"] == pytest.approx(bytes_per_token)
    pairs = list(pairwise(stream))[: windows * CONTEXT]
    memo = {}

    def chances(name, before):
        if (name, before) not in memo:
            memo[name, before] = models[name].after(before).softmax(-1)
        return memo[name, before]

    for name in models:
        loss = -sum(math.log(chances(name, a)[b]) for a, b in pairs) / len(pairs)
        likeliest = ((chances(name, a).argmax(), chances("target", a).argmax()) for a, _ in pairs)
        same = sum(int(own) == int(targets) for own, targets in likeliest)
        overlap = sum(
            float(torch.minimum(chances(name, a), chances("target", a)).sum()) for a, _ in pairs
        )
        assert found["loss"][name] == pytest.approx(loss, rel=1e-4)
        assert found["bits_per_byte"][name] == pytest.approx(
            found["loss"][name] / math.log(2) / bytes_per_token
        )
        assert found["greedy_agreement"][name] == pytest.approx(same / len(pairs))
        assert found["rejection_acceptance"][name] == pytest.approx(overlap / len(pairs), rel=1e-4)
    assert found["greedy_agreement"]["target"] == 1


@pytest.mark.parametrize(
    ("items", "size", "share"),
    [("abcab", 2, 3 / 4), ("aaaa", 2, 1 / 3), ("abc", 4, 1.0), ("abcd", 4, 1.0), ("", 1, 1.0)],
)
def test_the_share_of_distinct_grams(items, size, share):
    assert distinct_share(items, size=size) == share


@pytest.mark.parametrize(
    ("text", "strict", "excused"),
    [
        ("x = 1\n", True, True),
        ("x = 1\nname = 'no end", True, True),  # only up to the last complete line
        ("print(\n", False, True),
        ('text = """\n', False, True),
        ("if x:\n    y\n  z\n", False, False),
        ("", True, True),
    ],
)
def test_a_text_is_python_or_cut_short_or_neither(text, strict, excused):
    assert (tokenize_error(text, excuse_unfinished=False) is None) is strict
    assert (tokenize_error(text, excuse_unfinished=True) is None) is excused
