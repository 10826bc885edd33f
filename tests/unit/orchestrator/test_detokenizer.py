"""A text is what the tokenizer makes of prompt and answer, less what it makes of the prompt."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import chain, groupby, islice, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from paceline_contract.byte_level import LETTERS
from paceline_orchestrator.front.detokenizer import make_detokenizer, whole_text
from paceline_orchestrator.front.text import FinalToken, StreamedText
from paceline_orchestrator.front.tokenizer import Codec
from support.examples import examples
from support.tiny_tokenizers import ODD_BYTE_LEVELS, TINY_TOKENIZERS

KINDS = {**TINY_TOKENIZERS, **ODD_BYTE_LEVELS}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
ALL = pytest.mark.parametrize("name", TINY_TOKENIZERS)
ALL_AND_ODD = pytest.mark.parametrize("name", KINDS)
FALLBACK = "byte fallback, as of Llama 2 and Phi-3"
BYTES = "byte level, as of GPT-2, Llama 3 and Qwen"
UNREPEATED = "byte level, repetitions left out"
TEXT_REPLACED = "byte level, text replaced"
LEAVING_OUT = (UNREPEATED, "byte level, letters stripped")


@cache
def tokenizer_of(name):
    return KINDS[name]()


@cache
def codec_of(name):
    return Codec(tokenizer_of(name).to_str().encode())


def decoded(name, token_ids, *, with_names=False):
    """Return what the library makes of tokens, but each wrong part of a run of bytes is U+FFFD.

    The library's own byte fallback spoils the whole run.
    """
    tokenizer = tokenizer_of(name)
    tokens = [tokenizer.id_to_token(it) for it in token_ids]
    special = {it.content for it in tokenizer.get_added_tokens_decoder().values() if it.special}
    tokens = [it for it in tokens if with_names or it not in special]
    if "ByteFallback" in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        tokens = list(with_runs_decoded(tokens))
    decoder = tokenizer.decoder
    if decoder is None:
        return " ".join(tokens)
    return decoder.decode(tokens) if tokens else ""  # some decoders panic of nothing


def with_runs_decoded(tokens):
    run = b""
    for token in [*tokens, None]:
        found = token and re.fullmatch("<0x(..)>", token)
        if found:
            run += bytes.fromhex(found[1])
            continue
        if run:
            yield run.decode(errors="replace")
            run = b""
        if token is not None:
            yield token


def ids_of_bytes(name, content):
    """Return a token for each byte."""
    word = LETTERS.__getitem__ if "byte level" in name else "<0x{:02X}>".format
    return ids(name, *map(word, content))


def likely_ids(name, max_size=30):
    """Draw tokens: many words, spaces and special tokens, and bytes that are characters or not."""
    tokenizer = tokenizer_of(name)
    size = tokenizer.get_vocab_size()
    of_bytes = [b"\xf0", b"\x9f", b"\x98", b"\x81", b"\xe4", b"\xbd", b"\xa0", b"\xff", b" ", b"a"]
    of_bytes += [b"\xed"]  # begins a surrogate, which is no character
    of_bytes += ["é".encode(), "你".encode(), "😁".encode()]
    pieces = [[token_id] for token_id in range(max(0, size - 60), size)]
    if "byte" in name:
        pieces += [ids_of_bytes(name, content) for content in of_bytes]
    drawn = st.lists(st.sampled_from(pieces), max_size=max_size)
    # A decoder that leaves tokens out would have a long run of them held back for ever.
    most = 2 if name in LEAVING_OUT else max_size * 4
    return drawn.map(lambda found: without_long_runs([*chain(*found)], most=most))


def without_long_runs(token_ids, *, most):
    return [it for _, run in groupby(token_ids) for it in islice(run, most)]


def expected(name, prompt, token_ids):
    """Return the text of prompt and answer, less what no answer changes of the prompt's text."""
    before, whole = decoded(name, prompt), decoded(name, [*prompt, *token_ids])
    if "byte" in name:
        ends = (b"\x80\x81\x82", b"\xbf\xbe\xbd", b"a")
        followed = [decoded(name, [*prompt, *ids_of_bytes(name, it)]) for it in ends]
        kept = takewhile(lambda it: len({*it}) == 1, zip(before, *followed, strict=False))
        before = "".join(first for first, *_ in kept)
    assert whole.startswith(before)
    return whole[len(before) :]


@ALL_AND_ODD
@settings(max_examples=examples(60))
@given(data=st.data())
def test_all_text_together_is_what_the_tokenizer_makes_of_prompt_and_answer(name, data):
    prompt = data.draw(likely_ids(name, max_size=12))
    token_ids = data.draw(likely_ids(name))
    detokenizer = make_detokenizer(codec_of(name), prompt)
    text = "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()
    assert text == expected(name, prompt, token_ids)


@ALL_AND_ODD
@settings(max_examples=examples(60))
@given(data=st.data())
def test_all_that_is_sent_of_an_answer_is_its_text(name, data):
    prompt = data.draw(likely_ids(name, max_size=3))
    token_ids = data.draw(likely_ids(name, max_size=4))
    sent = pieces(StreamedText(codec_of(name), prompt=prompt), token_ids)
    text = "".join(it.text for it in sent)
    assert text == (expected(name, prompt, token_ids) if token_ids else "")


@pytest.mark.parametrize("name", [BYTES, FALLBACK, "byte level and more", TEXT_REPLACED])
def test_a_character_that_the_prompt_begins_is_not_lost_at_a_special_token(name):
    first, *_ = ids_of_bytes(name, "你".encode())
    text = StreamedText(codec_of(name), prompt=[first])
    sent = list(pieces(text, ids(name, "<|tool|>", "<|tool|>")))
    assert [(it.text, it.lengths) for it in sent] == [(REPLACEMENT, (0, 1))]


@ALL_AND_ODD
@settings(max_examples=examples(40))
@given(data=st.data())
def test_many_tokens_at_once_are_the_same_as_one_by_one(name, data):
    token_ids = data.draw(likely_ids(name, max_size=60))
    cut = data.draw(st.integers(0, len(token_ids)))
    one_by_one, at_once = make_detokenizer(codec_of(name)), make_detokenizer(codec_of(name))
    first = "".join(map(one_by_one.push, token_ids[:cut]))
    assert at_once.push_many(token_ids[:cut]) == first
    assert at_once.open_count == one_by_one.open_count
    rest = "".join(map(one_by_one.push, token_ids[cut:])) + one_by_one.finish()
    assert "".join(map(at_once.push, token_ids[cut:])) + at_once.finish() == rest


def pushed(name, token_ids):
    """Push tokens one by one; yield their number, their text, what came of it, and from what."""
    detokenizer, text = make_detokenizer(codec_of(name)), ""
    for count, token_id in enumerate(token_ids, start=1):
        text += detokenizer.push(token_id)
        whole = decoded(name, token_ids[:count])
        assert whole.startswith(text)
        yield count, whole, text, detokenizer


@pytest.mark.parametrize("name", ODD_BYTE_LEVELS)
@settings(max_examples=examples(40))
@given(data=st.data())
def test_an_odd_decoder_holds_back_what_may_change_and_of_few_tokens(name, data):
    token_ids = data.draw(likely_ids(name))
    for count, whole, text, detokenizer in pushed(name, token_ids):
        assert len(whole) - len(text) <= 2
        if name not in LEAVING_OUT:
            special = set(codec_of(name).special_ids.values())
            open_ids = token_ids[count - detokenizer.open_count : count]
            assert sum(it not in special for it in open_ids) <= 3


@pytest.mark.parametrize("name", [BYTES, FALLBACK, "byte level and more"])
def test_a_special_token_inside_a_character_is_held_back_with_it(name):
    detokenizer = make_detokenizer(codec_of(name))
    first, *rest = ids_of_bytes(name, "😁".encode())
    counts = []
    for token_id in (*ids(name, "<|tool|>"), first, *ids(name, "<|tool|>"), *rest):
        detokenizer.push(token_id)
        counts.append(detokenizer.open_count)
    assert counts == [0, 1, 2, 3, 4, 0]


@ALL_AND_ODD
@settings(max_examples=examples(60))
@given(data=st.data())
def test_with_names_of_special_tokens_the_text_is_the_librarys(name, data):
    tool = st.sampled_from([ids(name, "<|tool|>"), []])
    parts = data.draw(st.lists(st.tuples(likely_ids(name, max_size=3), tool), max_size=6))
    token_ids = [*chain.from_iterable(chain(*parts))]
    assert whole_text(codec_of(name), token_ids) == decoded(name, token_ids, with_names=True)


@pytest.mark.parametrize("name", [BYTES, FALLBACK, "byte level and more"])
def test_a_character_that_a_special_token_interrupts_is_named_once(name):
    first, second, third = ids_of_bytes(name, "你".encode())
    token_ids = [first, second, *ids(name, "<|tool|>", "<|tool|>"), third, *ids(name, "a")]
    text = f"{REPLACEMENT}<|tool|><|tool|>{REPLACEMENT}a"
    assert whole_text(codec_of(name), token_ids) == text


def test_where_bytes_are_read_twice_the_text_is_the_librarys():
    tokenizer = KINDS[BYTES]()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.ByteLevel()])
    token_ids = ids(BYTES, *(LETTERS[byte] for byte in "é".encode()))
    detokenizer = make_detokenizer(Codec(tokenizer.to_str().encode()))
    text = detokenizer.push_many(token_ids) + detokenizer.finish()
    assert text == tokenizer.decode(token_ids) == REPLACEMENT


def test_text_that_a_later_token_replaces_stays_as_it_was_sent():
    tokenizer = KINDS[BYTES]()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "z")])
    a, b, c = ids(BYTES, "a", "b", "c")
    assert tokenizer.decode([a, b, c]) == "zc"
    detokenizer = make_detokenizer(Codec(tokenizer.to_str().encode()))
    assert [detokenizer.push(it) for it in (a, b, c)] == ["a", "", "c"]


def test_a_decoder_that_never_says_what_is_certain_holds_no_stream_back():
    detokenizer = make_detokenizer(codec_of(UNREPEATED))
    first = ids_of_bytes(UNREPEATED, b"\xf0") * 100
    assert detokenizer.push_many(first[:10]) == ""
    assert detokenizer.push(first[10]) == REPLACEMENT
    detokenizer.push_many(first[11:])
    assert detokenizer.open_count <= 10


@ALL
@settings(max_examples=examples(40))
@given(data=st.data())
def test_only_an_incomplete_character_is_held_back(name, data):
    token_ids = data.draw(likely_ids(name))
    for _, whole, text, detokenizer in pushed(name, token_ids):
        waiting = whole[len(text) :]
        assert waiting in ("", REPLACEMENT)
        assert bool(waiting) == bool(detokenizer.open_count)


@ALL_AND_ODD
@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_stream_that_is_resumed_at_any_chunk_goes_on_as_if_it_had_not_broken(name, data):
    codec = codec_of(name)
    prompt = data.draw(likely_ids(name, max_size=6))
    token_ids = data.draw(likely_ids(name, max_size=40))
    text = decoded(name, token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    of_text = [text[start : start + data.draw(st.integers(1, 4))]] if text else []
    stops = data.draw(st.lists(st.sampled_from(["hello", "<|tool|>", *of_text]), max_size=2))
    sent = list(pieces(StreamedText(codec, stops, prompt=prompt), token_ids))
    cut = data.draw(st.integers(0, len(sent)))
    received = [token.token_id for piece in sent[:cut] for token in piece.tokens]
    resumed = StreamedText(codec, stops, prompt=prompt)
    resumed.resume(received)
    assert resumed.token_count == len(received)
    is_over = cut == len(sent)
    rest = list(pieces(resumed, [] if is_over else token_ids[len(received) :]))
    assert "".join(it.text for it in rest) == "".join(it.text for it in sent[cut:])
    assert [it.lengths for it in rest if it.tokens] == [it.lengths for it in sent[cut:]]


def pieces(text, token_ids):
    """Yield what goes out, to the end of the text."""
    for token_id in token_ids:
        is_over = bool(text.stop_string) or text.push(FinalToken(token_id, accepted=False))
        piece = text.take()
        if piece is not None:
            assert sum(piece.lengths) == len(piece.text)
            assert len(piece.lengths) == len(piece.tokens)
            yield piece
        if is_over:
            return
    text.flush()
    piece = text.take()
    if piece is not None:
        yield piece


def ids(name, *tokens):
    return [tokenizer_of(name).token_to_id(it) for it in tokens]


def byte_ids(content):
    return ids(FALLBACK, *(f"<0x{byte:02X}>" for byte in content.encode()))


def test_a_run_of_byte_tokens_that_ends_in_a_character_loses_that_character_alone():
    text = StreamedText(codec_of(FALLBACK))
    sent = "".join(it.text for it in pieces(text, (byte_ids("😁你水") * 4)[:39]))
    assert sent == "😁你水😁你水😁你水😁你" + REPLACEMENT


def test_a_stop_string_is_found_within_a_run_of_byte_tokens():
    text = StreamedText(codec_of(FALLBACK), ["水"])
    sent = list(pieces(text, byte_ids("😁你水") * 20))
    assert "".join(it.text for it in sent) == "😁你"
    assert sum(len(it.tokens) for it in sent) == 10


def test_byte_tokens_in_small_letters_are_bytes_as_in_the_library():
    vocabulary = {"a": 256, **{f"<0x{byte:02x}>": byte for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    token_ids = [256, *"😁你".encode(), 256]
    assert tokenizer.decode(token_ids) == "a😁你a"
    detokenizer = make_detokenizer(Codec(tokenizer.to_str().encode()))
    assert "".join(map(detokenizer.push, token_ids)) == "a😁你a"


def test_bytes_that_are_no_text_are_sent_again_by_no_resumption():
    alphabet = {codec_of(BYTES).bytes_of(it): it for it in range(256)}
    token_ids = [alphabet[b"\xff"], alphabet[b"\xfe"]] * 2000
    resumed = StreamedText(codec_of(BYTES))
    resumed.resume(token_ids[:21])
    assert "".join(it.text for it in pieces(resumed, token_ids[21:])) == REPLACEMENT * 3979


def test_a_first_token_keeps_the_space_that_separates_it_from_the_prompt():
    hello, world = ids(FALLBACK, "▁hello"), ids(FALLBACK, "▁world", ".")
    text = StreamedText(codec_of(FALLBACK), prompt=ids(FALLBACK, "<s>") + hello)
    assert "".join(it.text for it in pieces(text, world)) == " world."
    stopped = StreamedText(codec_of(FALLBACK), [" world"], prompt=hello)
    assert not "".join(it.text for it in pieces(stopped, world))
    assert stopped.stop_string == " world"


def test_a_prompt_may_end_inside_a_character():
    first, *rest = [*tokenizer_of(BYTES).encode("ß").ids]
    text = StreamedText(codec_of(BYTES), prompt=[first])
    assert "".join(it.text for it in pieces(text, rest)) == "ß"


@pytest.mark.parametrize("name", [BYTES, FALLBACK])
def test_a_special_token_is_a_stop_string_though_it_has_no_text(name):
    a, tool, end = ids(name, "a", "<|tool|>", "</s>")
    text = StreamedText(codec_of(name), ["<|tool|>"])
    sent = list(pieces(text, [a, end, a, tool, a]))
    assert "".join(it.text for it in sent) == "aa"
    assert text.stop_string == "<|tool|>"
    assert text.token_count == 4


def test_a_stop_string_may_be_a_special_token_and_text():
    a, b, tool = ids(BYTES, "a", "b", "<|tool|>")
    text = StreamedText(codec_of(BYTES), ["<|tool|>b"])
    sent = list(pieces(text, [a, tool, a, tool, b, a]))
    assert "".join(it.text for it in sent) == "aa"
    assert (text.stop_string, text.token_count) == ("<|tool|>b", 5)


def test_a_piece_of_a_special_tokens_name_is_no_stop_string():
    a, tool = ids(BYTES, "a", "<|tool|>")
    text = StreamedText(codec_of(BYTES), ["|", "tool"])
    assert "".join(it.text for it in pieces(text, [a, tool, a])) == "aa"
    assert not text.stop_string


def test_each_token_says_how_much_text_it_adds():
    (ab,) = ids(BYTES, "ab")
    token_ids = [ab, *tokenizer_of(BYTES).encode("🚴").ids, ab]
    text = StreamedText(codec_of(BYTES))
    sent = list(pieces(text, token_ids))
    lengths = [length for it in sent for length in it.lengths]
    assert lengths == [2, *(0 for _ in token_ids[2:-1]), 1, 2]


@ALL
def test_a_tokens_text_costs_the_same_however_long_the_text_is(name):
    codec, most = codec_of(name), 0

    class Watching:
        def __getattr__(self, attribute):
            return getattr(codec, attribute)

        def decode_strings(self, tokens):
            nonlocal most
            most = max(most, len(tokens))
            return codec.decode_strings(tokens)

    detokenizer = make_detokenizer(Watching(), prompt=ids(name, "a") * 1000)
    for token_id in ids(name, "a", "b") * 1000:
        detokenizer.push(token_id)
    assert most <= 17
    detokenizer.push_many(ids(name, "a", "b") * 1000)
    assert most < 1000, "other threads have their turns meanwhile"
    if "byte level" not in name:
        assert most > 100, "many at once"


@ALL
@pytest.mark.parametrize("count", [300, 20_000])
def test_a_prompt_of_special_tokens_alone_is_not_looked_at_whole(name, count):
    codec, looked_at = codec_of(name), 0
    special_id = next(iter(codec.special_ids.values()), 0)

    class Watching:
        def __getattr__(self, attribute):
            return getattr(codec, attribute)

        def token_of(self, token_id):
            nonlocal looked_at
            looked_at += 1
            return codec.token_of(token_id)

        def bytes_of(self, token_id):
            nonlocal looked_at
            looked_at += 1
            return codec.bytes_of(token_id)

    make_detokenizer(Watching(), prompt=(special_id,) * count)
    assert looked_at < 1000


def test_what_an_end_of_text_token_cuts_short_belongs_to_the_token_before_it():
    first, *_ = byte_ids("你")
    text = StreamedText(codec_of(FALLBACK))
    text.push(FinalToken(first, accepted=False))
    text.push_without_text(FinalToken(*ids(FALLBACK, "</s>"), accepted=False))
    piece = text.take()
    assert (piece.text, piece.lengths) == (REPLACEMENT, (1, 0))


def test_a_stop_string_that_spans_a_resumption_ends_the_text_and_takes_nothing_back():
    a, b = ids(FALLBACK, "a", "b")
    text = StreamedText(codec_of(FALLBACK), ["ab"])
    text.resume([a])
    assert text.push(FinalToken(b, accepted=False))
    piece = text.take()
    assert (text.stop_string, piece.text, piece.lengths) == ("ab", "", (0,))


@ALL
def test_the_bytes_of_single_tokens_are_the_text_but_for_what_a_text_begins_with(name):
    tokenizer, codec = tokenizer_of(name), codec_of(name)
    text = "the cat, é 你😁 sat"
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    special = set(codec.special_ids.values())
    alone = b"".join(codec.bytes_alone(it) for it in token_ids if it not in special)
    assert alone.decode().strip() == decoded(name, token_ids).strip()
    for special_text, token_id in codec.special_ids.items():
        assert codec.bytes_alone(token_id) == special_text.encode()
    assert codec.bytes_alone(1 << 30) == b""
