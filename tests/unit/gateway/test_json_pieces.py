"""A large body is parsed in pieces, with the result of the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from paceline_gateway.bodies import json_pieces
from paceline_gateway.bodies.json_pieces import outline, put_back
from support.examples import examples

PIECE = 20
SCRAPS = st.sampled_from(
    [
        *('"', "\\", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "é", "😀", "\\\\", '\\"', ":", " "),
        *("[", "]", "{", "}", "a" * 30, "1", "-2.5e3", "\n", ": ", "1," * 20, '"a":', "null", ","),
    ]
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner),
    max_leaves=40,
)


@pytest.fixture(autouse=True, scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_pieces, "_LEAST_BYTES", 10)
        patch.setattr(json_pieces, "_PIECE_BYTES", PIECE)
        yield


def in_pieces(content):
    short, values = outline(content)
    return put_back(from_json(short, allow_inf_nan=False), values)


@settings(max_examples=examples(300))
@given(VALUES, st.booleans())
def test_each_value_is_what_the_whole_text_says(value, ascii_only):
    content = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "replace")
    assert in_pieces(content) == from_json(content)


@settings(max_examples=examples(1000))
@given(st.lists(SCRAPS, max_size=40).map("".join))
@example("[" + "1," * 30 + "]")
@example("[" + "1," * 15 + " ," + "1," * 15 + "1]")
@example('"' + "\\ud83d" * 20 + '"')
@example('{"' + "a" * 60 + '"  : 1}')
@example('["' + "a" * 60)
def test_what_is_no_json_is_none_in_pieces_and_what_is_is_the_same(text):
    for each in (text, f'"{text}"', f"[{text}]", '{"a": "' + text + '"}'):
        content = each.encode()
        try:
            whole = from_json(content, allow_inf_nan=False)
        except ValueError:
            with pytest.raises(ValueError, match=r"at line|number is missing"):
                in_pieces(content)
        else:
            assert in_pieces(content) == whole


@pytest.mark.parametrize(
    "value",
    [[*range(1000)], "once upon a time " * 50, "é" * 500, "😀" * 500, '"\\' * 400, "\n" * 400],
)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_library_parses_no_long_piece(value, ascii_only, monkeypatch):
    lengths = []

    def parse(content, **options):
        lengths.append(len(content))
        return from_json(content, **options)

    monkeypatch.setattr(json_pieces, "from_json", parse)
    content = json.dumps({"prompt": value, "n": 1}, ensure_ascii=ascii_only).encode()
    assert in_pieces(content) == {"prompt": value, "n": 1}
    assert len(lengths) > 10
    assert max(lengths) <= PIECE + 4
