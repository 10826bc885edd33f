from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models

from bigrams import following, main
from paceline_protocol.max_gram import parse_bigrams

if TYPE_CHECKING:
    from pathlib import Path


def test_the_most_frequent_follower_stands_in_the_table():
    assert following([[1, 2, 1, 3, 1, 3], [0]], vocabulary_size=4) == [None, 3, 1, 1]


def test_a_tie_goes_to_the_smaller_id():
    assert following([[1, 3], [1, 2]], vocabulary_size=4)[1] == 2


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
