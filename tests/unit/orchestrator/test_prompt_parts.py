"""Special tokens count where a template wrote them, and are letters where somebody else did."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from paceline_orchestrator.front.prompt_parts import Part
from paceline_orchestrator.front.tokenizer import Codec
from support.tiny_tokenizers import TINY_TOKENIZERS

SPECIAL = ("<s>", "</s>", "<|tool|>")


def _special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([*SPECIAL[:2], AddedToken(SPECIAL[2], rstrip=True, lstrip=True)])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def _pieces(space: str) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Return a vocabulary with merges across spaces, and with letters of special tokens."""
    letters = [space, *"abcdefghijklmnopqrstuvwxyz<>/|[]S\n\u00fc", "<unk>"]
    merges = [("a", "b"), (space, "a"), (space, "<"), ("s", ">"), ("<", "s>"), ("b", space),
              ("<", "/"), (space, space), ("\n", "\n"), ("t", "o"), ("to", "o"), ("too", "l"),
              ("|", ">"), ("<", "|"), ("a", "<")]  # fmt: skip
    names = [*letters, *(first + second for first, second in merges)]
    return {name: float(index) for index, name in enumerate(dict.fromkeys(names))}, merges


def _bpe(space: str) -> Tokenizer:
    vocabulary, merges = _pieces(space)
    ids = {name: int(index) for name, index in vocabulary.items()}
    return Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>", fuse_unk=True))


def _byte_level() -> Tokenizer:
    tokenizer = TINY_TOKENIZERS["byte level, as of GPT-2, Llama 3 and Qwen"]()
    split = pre_tokenizers.Split(Regex(r" ?[a-z]+|\s+(?!\S)|\s+| ?[^\sa-z]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = _bpe("\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _special(tokenizer)


def _legacy() -> Tokenizer:
    tokenizer = _bpe("\u2581")
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return _special(tokenizer)


def _unigram() -> Tokenizer:
    """Return one whose vocabulary has the special tokens, too, as SentencePiece's have."""
    vocabulary, _ = _pieces("\u2581")
    scored = [(name, -1.0 - index / 100) for name, index in vocabulary.items()]
    scored += [(name, 0.0) for name in SPECIAL[:2]]
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=list(vocabulary).index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return _special(tokenizer)


def _with_first_token() -> Tokenizer:
    tokenizer = _metaspace("first")
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


MADE = {
    "byte level": _byte_level,
    "metaspace": lambda: _metaspace("always"),
    "metaspace before the first word": lambda: _metaspace("first"),
    "metaspace as it stands": lambda: _metaspace("never"),
    "a space in front by a normalizer, as of Llama 2": _legacy,
    "unigram, with special tokens in its vocabulary": _unigram,
    "one that adds a first token": _with_first_token,
}
ALL = {name: Codec(make().to_str().encode()) for name, make in {**TINY_TOKENIZERS, **MADE}.items()}
WORDS = ["a", "b", " ", "  ", "ab", "tool", "\n", "\n\n", "\u00fc", "<", ">", "/s>", "|", "<think>"]

written = st.lists(st.sampled_from([*WORDS, *SPECIAL]), max_size=8).map("".join)
harmless = st.lists(st.sampled_from([it for it in WORDS if it[0] not in "/|"]), max_size=8).map(
    "".join
)
anything = st.lists(st.sampled_from([*WORDS, *SPECIAL, "<S>"]), max_size=8).map("".join)


def ids_of(codec, *parts, add_special_tokens=False):
    return codec.encode_pieces(
        [Part(text, parse) for text, parse in parts], add_special_tokens=add_special_tokens
    )


def special_ids(codec):
    return {codec.special_ids[it] for it in SPECIAL}


@pytest.mark.parametrize("name", ALL)
@given(st.lists(st.tuples(written, harmless), min_size=1, max_size=3), st.booleans())
def test_parts_without_special_tokens_are_what_the_whole_text_is(name, turns, add):
    codec = ALL[name]
    parts = [part for ours, said in turns for part in ((ours, True), (said, False))]
    whole = "".join(text for text, _ in parts)
    crosses = sum(whole.count(it) for it in SPECIAL) != sum(
        text.count(it) for text, parse in parts for it in SPECIAL if parse
    )
    if crosses:
        return
    expected = codec.encode(whole, add_special_tokens=add, parse_special_tokens=True)
    assert ids_of(codec, *parts, add_special_tokens=add) == expected


@pytest.mark.parametrize("name", ALL)
@given(st.lists(st.tuples(written, anything), min_size=1, max_size=3))
@example([("", "<"), ("", "/s>")])
@example([("", "<"), ("/s>", "")])
@example([("<", "/s>")])
def test_of_special_tokens_only_those_of_a_template_count(name, turns):
    codec = ALL[name]
    parts = [part for ours, said in turns for part in ((ours, True), (said, False))]
    found = [it for it in ids_of(codec, *parts) if it in special_ids(codec)]
    wanted = [
        it
        for ours, _ in turns
        for it in codec.encode(ours, add_special_tokens=False, parse_special_tokens=True)
        if it in special_ids(codec)
    ]
    assert found == wanted


@pytest.mark.parametrize("name", ALL)
@given(anything)
def test_a_text_that_is_not_parsed_has_no_special_token(name, text):
    codec = ALL[name]
    ids = codec.encode(text, add_special_tokens=False, parse_special_tokens=False)
    assert special_ids(codec).isdisjoint(ids)


def without(name, special):
    """Return the tokenizer that does not know a special token: to it, that is a text like any."""
    described = json.loads(MADE[name]().to_str())
    (index,) = (
        index for index, it in enumerate(described["added_tokens"]) if it["content"] == special
    )
    # Its place is taken by a word that no text here has: the other tokens keep their ids.
    described["added_tokens"][index]["content"] = "\u22a0\u22a0"
    return Codec(json.dumps(described).encode())


UNKNOWING = {name: without(name, "</s>") for name in MADE if "unigram" not in name}


@pytest.mark.parametrize("name", UNKNOWING)
@given(st.lists(st.tuples(st.sampled_from(["", "<s>", "a <s>b", "<|tool|> a", " <s>\n"]),
                          st.sampled_from(["</s>", "a</s>b", " </s> ", "\n</s></s>a", "a b"])),
                min_size=1, max_size=3))  # fmt: skip
def test_what_somebody_wrote_is_tokenised_as_if_the_tokenizer_had_no_such_token(name, turns):
    codec, unknowing = ALL[name], UNKNOWING[name]
    parts = [part for ours, said in turns for part in ((ours, True), (said, False))]
    expected = unknowing.encode(
        "".join(text for text, _ in parts), add_special_tokens=False, parse_special_tokens=True
    )
    assert ids_of(codec, *parts) == expected
