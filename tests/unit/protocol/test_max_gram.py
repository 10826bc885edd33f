from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_contract.max_gram import BigramError, MaxGram, MaxGramRules, parse_bigrams
from paceline_contract.suffix_index import Tie

texts = st.lists(st.integers(0, 3), max_size=60)


def paper_search(text: list[int]) -> list[int]:
    """Return what followed the earliest of the longest matches, up to the text's end."""
    for length in range(len(text) - 1, 0, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[len(text) - length :]:
                return text[start + length :]
    return []


@given(texts, st.integers(1, 12))
def test_it_proposes_what_the_paper_does(text, count):
    """Search, append, search again, as long as something is missing."""
    proposed: list[int] = []
    while len(proposed) < count:
        found = paper_search(text + proposed)
        if not found:
            break
        proposed += found
    max_gram = MaxGram(longest=100)
    max_gram.extend(text)
    assert max_gram.propose(count) == proposed[:count]


@pytest.mark.parametrize(("tie", "expected"), [(Tie.EARLIEST, [2]), (Tie.LATEST, [3])])
def test_of_equal_matches_the_tie_rule_chooses(tie, expected):
    max_gram = MaxGram(tie=tie)
    max_gram.extend([1, 2, 1, 3, 1])
    assert max_gram.propose(1) == expected


def test_bigrams_stand_in_where_the_last_token_is_new():
    max_gram = MaxGram(bigrams=(None, 2, 3, None))
    max_gram.extend([1])
    assert max_gram.propose(5) == [2, 3]
    max_gram.extend([0, 1])
    assert max_gram.propose(2) == [0, 1], "found in the text: no bigram is asked"


def test_it_takes_arrays_as_sessions_keep_them():
    max_gram = MaxGram()
    max_gram.follow(array("I", [1, 2, 1]))
    assert max_gram.propose(3) == [2, 1, 2]


TABLE = {"format": "paceline bigrams 1", "next": [1, None, 0]}


def test_a_table_is_read():
    assert parse_bigrams(json.dumps(TABLE), vocabulary_size=3) == (1, None, 0)
    assert parse_bigrams(json.dumps(TABLE)) == (1, None, 0)


def test_a_table_of_another_vocabulary_is_left_out():
    rules = MaxGramRules(Tie.LATEST, (1, None, 0))
    for size, fits, proposed in ((3, True, [0, 1]), (4, False, [])):
        max_gram = rules.begin(vocabulary_size=size)
        max_gram.extend([2])
        assert rules.fit(size) is fits
        assert max_gram.propose(3) == proposed
    assert MaxGramRules().fit(4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is no JSON"),
        ("[]", "has no format"),
        (json.dumps({**TABLE, "format": "another"}), "has no format"),
        (json.dumps({**TABLE, "next": [1]}), "3 entries"),
        (json.dumps({**TABLE, "next": 3}), "needs `next`, a list"),
        (json.dumps({**TABLE, "next": [1, 3, 0]}), r"next\[1\] is 3, not null or in \[0, 3\)"),
        (json.dumps({**TABLE, "next": [1, True, 0]}), r"next\[1\] is True"),
    ],
)
def test_what_is_no_table_is_refused(text, said):
    with pytest.raises(BigramError, match=said):
        parse_bigrams(text, vocabulary_size=3)
