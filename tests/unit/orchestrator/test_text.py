"""Streamed text is the decoded ids, never taken back, and free of stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_orchestrator.front.text import FinalToken, StreamedText
from paceline_orchestrator.front.tokenizer import Codec
from support.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZERS = {
    "byte level": TINY_TOKENIZERS["byte level, as of GPT-2, Llama 3 and Qwen"](),
    "byte fallback": TINY_TOKENIZERS["byte fallback, as of Llama 2 and Phi-3"](),
}
CODECS = {name: Codec(it.to_str().encode()) for name, it in TOKENIZERS.items()}


def stream(text, token_ids):
    """Return the pieces that come out."""
    pieces = []
    for token_id in token_ids:
        stopped = text.push(FinalToken(token_id, accepted=False))
        pieces.append(text.take())
        if stopped:
            break
    text.flush()
    pieces.append(text.take())
    return [piece for piece in pieces if piece is not None]


def ids_of(pieces):
    return [token.token_id for piece in pieces for token in piece.tokens]


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from("abcñ🚴 "), max_size=30).map("".join),
    st.lists(st.sampled_from(["a", "ab", "abc", "ba", "cab", "ñ", "🚴", "b 🚴"]), max_size=4),
)
def test_the_text_ends_before_a_stop_string(content, stops):
    token_ids = TOKENIZERS["byte level"].encode(content).ids
    text = StreamedText(CODECS["byte level"], stops)
    pieces = stream(text, token_ids)
    if not any(stop in content for stop in stops):
        assert text_of(pieces) == content
        assert not text.stop_string
    else:
        start = len(text_of(pieces))
        assert content.startswith(text_of(pieces) + text.stop_string)
        assert not any(stop in text_of(pieces) for stop in stops), start
        assert ids_of(pieces) == token_ids[: text.token_count]


def test_of_two_stop_strings_in_a_token_the_one_that_comes_first_ends_the_text():
    tokenizer = TOKENIZERS["byte fallback"]
    text = StreamedText(CODECS["byte fallback"], ["ld", "or"])
    pieces = stream(text, [tokenizer.token_to_id(token) for token in ("b", "▁world")])
    assert (text_of(pieces), text.stop_string) == ("b w", "or")


def test_a_text_that_broke_right_after_a_stop_string_is_not_told_again():
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = [tokenizer.token_to_id(token) for token in ("b", "▁world")]
    whole = stream(StreamedText(CODECS["byte fallback"], ["ld"]), token_ids)
    assert (text_of(whole), ids_of(whole)) == ("b wor", token_ids)
    resumed = StreamedText(CODECS["byte fallback"], ["ld"])
    resumed.resume(token_ids)
    assert (stream(resumed, []), resumed.stop_string, resumed.token_count) == ([], "ld", 2)


@pytest.mark.parametrize("at", [0, 1, 300, 871, 872, 873, 990, 997])
def test_a_stop_string_anywhere_in_a_long_text_ends_it(at):
    codec = CODECS["byte level"]
    letters = list("c" * 1000)
    letters[at : at + 2] = "ñ🚴"
    token_ids = TOKENIZERS["byte level"].encode("".join(letters)).ids
    text = StreamedText(codec, ["ñ🚴"])
    text.resume(token_ids)
    assert text.stop_string == "ñ🚴"
    assert text.token_count < len(token_ids) or at == 998


def test_a_stop_string_with_hundreds_of_special_tokens_inside_is_found():
    codec = CODECS["byte level"]
    special = TOKENIZERS["byte level"].token_to_id("<|tool|>")
    first, *rest = TOKENIZERS["byte level"].encode("cc").ids
    token_ids = [first] * 300 + [special] * 300 + rest * 100
    text = StreamedText(codec, ["c" * 110])
    text.resume(TOKENIZERS["byte level"].encode("a" * 300).ids + token_ids[290:610])
    assert not text.stop_string
    text = StreamedText(codec, ["c" * 12])
    text.resume(TOKENIZERS["byte level"].encode("a" * 300).ids + token_ids[294:606])
    assert text.stop_string


@pytest.mark.parametrize(("last", "expected"), [("c", "x"), ("d", "x" + "ab" * 500 + "d")])
def test_a_long_stop_string_is_held_back_until_it_is_there_or_cannot_be(last, expected):
    begun = "ab" * 500
    stops = [f"{begun}c", *(f"{begun[number:]}{number}e" for number in range(63))]
    token_ids = TOKENIZERS["byte level"].encode(f"x{begun}{last}").ids
    text = StreamedText(CODECS["byte level"], stops)
    pieces = stream(text, token_ids)
    assert text_of(pieces) == expected
    assert text.stop_string == (stops[0] if last == "c" else "")


def test_the_end_token_of_a_text_whose_half_character_ends_it_is_left_out():
    first, *_ = TOKENIZERS["byte level"].encode("🚴").ids
    end = FinalToken(TOKENIZERS["byte level"].token_to_id("<|tool|>"), accepted=False)
    for stops, token_ids in (["\ufffd"], [first]), ([], [first, end.token_id]):
        text = StreamedText(CODECS["byte level"], stops)
        text.push(FinalToken(first, accepted=False))
        text.push_without_text(end)
        assert text.token_count == len(token_ids)
        assert ids_of([text.take()]) == token_ids
        assert text.stop_string == "".join(stops)


def test_the_end_of_text_token_has_no_text():
    text = StreamedText(CODECS["byte level"])
    text.push_without_text(FinalToken(0, accepted=False))
    piece = text.take()
    assert (piece.text, ids_of([piece])) == ("", [0])


def test_without_a_tokenizer_there_are_only_ids():
    pieces = stream(StreamedText(None), [1, 2, 3])
    assert ids_of(pieces) == [1, 2, 3]
    assert text_of(pieces) == ""
