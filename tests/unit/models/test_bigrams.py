from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, pre_tokenizers

from bigrams import following, main
from paceline_contract.max_gram import parse_bigrams

if TYPE_CHECKING:
    from pathlib import Path


def test_the_most_frequent_follower_stands_in_the_table():
    assert following([[1, 2, 1, 3, 1, 3], [0]], vocabulary_size=4) == [None, 3, 1, 1]


def test_a_tie_goes_to_the_smaller_id():
    assert following([[1, 3], [1, 2]], vocabulary_size=4)[1] == 2


def test_the_table_is_that_of_a_slow_count():
    source = random.Random(5)
    texts = [[source.randrange(6) for _ in range(source.randrange(9))] for _ in range(40)]
    pairs = [(text[n], text[n + 1]) for text in texts for n in range(len(text) - 1)]
    expected = []
    for token in range(7):  # the last one never stands there
        counts = [sum(pair == (token, after) for pair in pairs) for after in range(7)]
        expected.append(counts.index(max(counts)) if any(counts) else None)
    assert following(texts, vocabulary_size=7) == expected
    assert expected[6] is None


def test_each_file_is_a_text_of_its_own_and_its_tokens_are_the_tokenizers(tmp_path, monkeypatch):
    """Of "a b a c a c" and "b a": c follows a most often; b is not seen before b."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = (SimpleNamespace(text="a b a c a c b"), SimpleNamespace(text="b a"))
    monkeypatch.setattr("bigrams.load_corpus", lambda: SimpleNamespace(training=files))
    output = tmp_path / "bigrams.json"
    main(["--tokenizer", str(tmp_path / "tokenizer.json"), "--output", str(output)])
    assert parse_bigrams(output.read_text(), vocabulary_size=4) == (2, 0, 0, None)


def test_what_is_written_can_be_read(tmp_path: Path, monkeypatch):
    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tokenizer))
    monkeypatch.setattr("bigrams.load_corpus", lambda: Corpus())
    main(["--tokenizer", str(tokenizer), "--output", str(tmp_path / "new" / "bigrams.json")])
    text = (tmp_path / "new" / "bigrams.json").read_text()
    assert parse_bigrams(text, vocabulary_size=2) == (None, None)
    assert json.loads(text)["format"] == "paceline bigrams 1"


class Corpus:
    training = ()
