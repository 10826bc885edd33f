from __future__ import annotations

import json

import pytest

from paceline_engine.model_files.identity import canonical_tokenizer
from paceline_engine.model_files.tokenizer_difference import tell_difference
from support.speakers import KINDS
from support.tiny_models import build_tokenizer

WHOLE = json.loads(build_tokenizer(300).to_str())


def changed(change) -> bytes:
    found = json.loads(json.dumps(WHOLE))
    change(found)
    return canonical_tokenizer(found)


def rename(found):
    vocabulary = found["model"]["vocab"]
    vocabulary["Ċ!"] = vocabulary.pop("Ċ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.update(normalizer={"type": "NFC"}), "all tokens are the same; normalizer"),
        (lambda it: it["added_tokens"][0].update(content="<s>"), "token 0 is '<|end|>' and '<s>'"),
        (lambda it: it["added_tokens"].pop(), "token 299 is '<|fill-"),
        (lambda it: it["model"]["merges"].reverse(), "all tokens are the same; model.merges"),
        (rename, "is 'Ċ' and 'Ċ!'; model.vocab"),
    ],
)
def test_the_first_token_and_the_parts_that_differ_are_named(change, words):
    assert words in tell_difference(canonical_tokenizer(WHOLE), changed(change))


def test_another_kind_of_tokenizer_differs_in_most_parts():
    other = canonical_tokenizer(json.loads(KINDS["unigram"](400).to_str()))
    told = tell_difference(canonical_tokenizer(WHOLE), other)
    assert told.startswith("token 0 is '<|end|>' and '<pad>'; ")
    for part in ("decoder", "model.type", "model.vocab", "normalizer", "pre_tokenizer"):
        assert part in told
