"""Names are found in a text as by looking for each of them at each place."""

from __future__ import annotations

import random
import re

import pytest

from paceline_serving.name_pattern import name_pattern


def found(names, text):
    """Return what an alternation of all names finds, the longest first."""
    longest_first = sorted(filter(None, names), key=len, reverse=True)
    return re.findall("|".join(map(re.escape, longest_first)) or r"(?!)", text)


@pytest.mark.parametrize("seed", range(40))
def test_of_names_that_begin_at_a_place_the_longest_is_found(seed):
    draw = random.Random(seed)
    letters = draw.choice(["ab", "<|a>", ".*(["])
    names = {
        "".join(draw.choices(letters, k=draw.randint(0, 5))) for _ in range(draw.randint(0, 9))
    }
    text = "".join(draw.choices(letters, k=200))
    assert name_pattern(names).findall(text) == found(names, text)


@pytest.mark.parametrize("common", [0, 150, 199, 200, 300, 3000])
def test_a_name_may_be_of_any_length(common):
    names = [f"<{'a' * common}{end}" for end in ("", ">", "b>", "bb")]
    text = " ".join([*names, "<aaa", *reversed(names)])
    assert name_pattern(names).findall(text) == [
        *names,
        *(["<"] if not common else []),
        *names[::-1],
    ]


def test_a_name_that_begins_with_hundreds_of_others_is_found():
    runs = [" " * length for length in range(1, 1000)]
    assert name_pattern(runs).findall(" " * 1500) == [" " * 999, " " * 501]


def test_names_can_be_found_in_any_case():
    assert name_pattern(["<s>"], flags=re.IGNORECASE).findall("<S> <s>") == ["<S>", "<s>"]
