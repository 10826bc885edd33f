"""Streamed text is the decoded ids, never taken back, and free of stop strings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from paceline_orchestrator.front.text import Detokenizer, FinalToken, StreamedText
from paceline_orchestrator.front.tokenizer import Codec

if TYPE_CHECKING:
    import random


def _byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "±"), ("ð", "Ł")]
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def _byte_fallback():
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁", "▁a", "▁word", "b", "é"):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


TOKENIZERS = {"byte level": _byte_level(), "byte fallback": _byte_fallback()}
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


def arbitrary_ids(name):
    size = TOKENIZERS[name].get_vocab_size()
    # Words, special tokens and halves of characters are all at the vocabulary's end or among bytes.
    likely = st.integers(size - 8, size - 1) | st.integers(150, size - 1) | st.integers(0, size - 1)
    return st.lists(likely, max_size=40)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_all_pieces_together_are_the_decoded_ids(name, data):
    token_ids = data.draw(arbitrary_ids(name))
    pieces = stream(StreamedText(CODECS[name]), token_ids)
    assert ids_of(pieces) == token_ids
    assert text_of(pieces) == TOKENIZERS[name].decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_what_was_sent_stays_a_prefix_of_the_text(name, data):
    token_ids = data.draw(arbitrary_ids(name))
    text, sent = StreamedText(CODECS[name]), ""
    for count, token_id in enumerate(token_ids, start=1):
        text.push(FinalToken(token_id, accepted=False))
        piece = text.take()
        sent += piece.text if piece else ""
        whole = TOKENIZERS[name].decode(token_ids[:count], skip_special_tokens=True)
        assert whole.startswith(sent)


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


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from("abcñ🚴 "), max_size=30).map("".join),
    st.lists(st.sampled_from(["abc", "ñ🚴", "cab", "a b"]), max_size=2),
    st.randoms(use_true_random=False),
)
def test_a_resumed_text_goes_on_where_the_pieces_ended(content, stops, source: random.Random):
    codec = CODECS["byte level"]
    token_ids = TOKENIZERS["byte level"].encode(content).ids
    whole = stream(StreamedText(codec, stops), token_ids)
    received = whole[: source.randint(0, len(whole))]
    resumed = StreamedText(codec, stops)
    resumed.resume(ids_of(received))
    assert resumed.token_count == len(ids_of(received))
    # After a stop string nothing more is generated.
    rest = stream(resumed, [] if resumed.stop_string else token_ids[len(ids_of(received)) :])
    assert text_of(received) + text_of(rest) == text_of(whole)
    assert ids_of(received) + ids_of(rest) == ids_of(whole)


def test_a_text_that_broke_right_after_a_stop_string_is_not_told_again():
    tokenizer = TOKENIZERS["byte fallback"]
    token_ids = [tokenizer.token_to_id(token) for token in ("b", "▁word")]
    whole = stream(StreamedText(CODECS["byte fallback"], ["rd"]), token_ids)
    assert (text_of(whole), ids_of(whole)) == ("b wo", token_ids)
    resumed = StreamedText(CODECS["byte fallback"], ["rd"])
    resumed.resume(token_ids)
    assert (stream(resumed, []), resumed.stop_string, resumed.token_count) == ([], "rd", 2)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_long_text_is_resumed_as_if_token_by_token(name, data):
    """Runs of bytes and special tokens may lie anywhere, also where the long part ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline_orchestrator.front.text._OVERLAP_TOKENS", 12)
        vocabulary_size = TOKENIZERS[name].get_vocab_size()
        pieces = st.lists(
            st.integers(0, vocabulary_size - 1)
            | st.sampled_from(TOKENIZERS[name].encode("b é a word ñ🚴 ab").ids),
            min_size=40,
            max_size=80,
        )
        whole = stream(StreamedText(CODECS[name]), data.draw(pieces))
        received = data.draw(st.integers(0, max(0, len(whole) - 1)))
        resumed = StreamedText(CODECS[name])
        resumed.resume(ids_of(whole[:received]))
        rest = stream(resumed, ids_of(whole[received:]))
    assert (ids_of(rest), text_of(rest)) == (ids_of(whole[received:]), text_of(whole[received:]))
    assert resumed.token_count == len(ids_of(whole))


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
    special = TOKENIZERS["byte level"].token_to_id("<|end|>")
    first, *rest = TOKENIZERS["byte level"].encode("cc").ids
    token_ids = [first] * 300 + [special] * 300 + rest * 100
    text = StreamedText(codec, ["c" * 110])
    text.resume(TOKENIZERS["byte level"].encode("a" * 300).ids + token_ids[290:610])
    assert not text.stop_string
    text = StreamedText(codec, ["c" * 12])
    text.resume(TOKENIZERS["byte level"].encode("a" * 300).ids + token_ids[294:606])
    assert text.stop_string


def test_a_long_text_is_resumed_without_looking_at_each_of_its_tokens():
    codec, looked_at = CODECS["byte level"], 0

    class Watching:
        def __getattr__(self, name):
            return getattr(codec, name)

        def decode(self, token_ids):
            nonlocal looked_at
            looked_at += 1
            return codec.decode(token_ids)

    text = StreamedText(Watching(), ["never"])
    text.resume(TOKENIZERS["byte level"].encode("ab ñ 🚴 " * 5000).ids)
    assert looked_at < 1000


def test_half_a_character_is_held_back():
    text = StreamedText(CODECS["byte level"])
    first, *others, last = (
        FinalToken(it, accepted=False) for it in TOKENIZERS["byte level"].encode("🚴").ids
    )
    text.push(first)
    assert text.take() is None
    for token in others:
        text.push(token)
        assert text.take() is None
    text.push(last)
    assert text.take().text == "🚴"


def test_text_that_is_no_utf8_does_not_wait_for_ever():
    token_id = TOKENIZERS["byte level"].token_to_id("Ģ")  # the byte 0x80
    text = StreamedText(CODECS["byte level"])
    for _ in range(40):
        text.push(FinalToken(token_id, accepted=False))
    assert len(text.take().tokens) > 30


def test_the_end_of_text_token_has_no_text():
    text = StreamedText(CODECS["byte level"])
    text.push_without_text(FinalToken(0, accepted=False))
    piece = text.take()
    assert (piece.text, ids_of([piece])) == ("", [0])


def test_without_a_tokenizer_there_are_only_ids():
    pieces = stream(StreamedText(None), [1, 2, 3])
    assert ids_of(pieces) == [1, 2, 3]
    assert text_of(pieces) == ""


def test_the_detokenizer_looks_at_few_tokens_however_long_the_text_is():
    codec, longest = CODECS["byte level"], 0

    class Watching:
        def __getattr__(self, name):
            return getattr(codec, name)

        def decode(self, token_ids):
            nonlocal longest
            longest = max(longest, len(token_ids))
            return codec.decode(token_ids)

    detokenizer = Detokenizer(Watching())
    for token_id in TOKENIZERS["byte level"].encode("ab ñ 🚴 " * 50).ids:
        detokenizer.push(token_id)
    assert longest <= 8
