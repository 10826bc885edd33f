"""A tiny tokenizer for each kind of decoder that models of the field have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable

_SPECIAL = ["<s>", "</s>", "<|tool|>"]
_WORDS = ["a", "b", "é", "ß", "hello", "world", ".", "'s", "you", "🚴"]


def _finished(tokenizer: Tokenizer, decoder: decoders.Decoder | None) -> Tokenizer:
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def _word_level(words: list[str], decoder: decoders.Decoder | None) -> Tokenizer:
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    return _finished(tokenizer, decoder)


def _byte_level(decoder: decoders.Decoder) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("Ã", "±"), ("ð", "Ł"), ("Ġ", "Ġ"), ("b", "ð")]
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    for first, second in merges:
        vocabulary[first + second] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _finished(tokenizer, decoder)


def _byte_fallback(*last_steps: decoders.Decoder) -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁", "▁▁", *_WORDS, *(f"▁{word}" for word in _WORDS)):
        vocabulary[word] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last_steps]
    return _finished(tokenizer, decoders.Sequence(steps))


def _metaspace(scheme: str) -> Tokenizer:
    words = ["▁", "▁▁", *_WORDS, *(f"▁{word}" for word in _WORDS)]
    return _word_level(words, decoders.Metaspace(prepend_scheme=scheme))


TINY_TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level, as of GPT-2, Llama 3 and Qwen": lambda: _byte_level(decoders.ByteLevel()),
    "byte level and more": lambda: _byte_level(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "byte fallback, as of Llama 2 and Phi-3": lambda: _byte_fallback(decoders.Strip(" ", 1, 0)),
    "byte fallback without a strip, as of Gemma": _byte_fallback,
    "metaspace": lambda: _metaspace("always"),
    "metaspace before the first word": lambda: _metaspace("first"),
    "metaspace as it stands": lambda: _metaspace("never"),
    "word pieces, as of BERT": lambda: _word_level(
        [*_WORDS, *(f"##{word}" for word in _WORDS)], decoders.WordPiece()
    ),
    "ends of words, as of CLIP": lambda: _word_level(
        [*_WORDS, *(f"{word}</w>" for word in _WORDS)], decoders.BPEDecoder()
    ),
    "a replacement": lambda: _word_level(
        ["@", *_WORDS],
        decoders.Sequence([decoders.Replace("@", " - "), decoders.Strip("b", 0, 1)]),
    ),
    "none": lambda: _word_level(_WORDS, None),
}
"""How to make each, by what it is."""


_LETTER_STEPS = {
    "letters replaced": decoders.Replace("Ġ", " "),
    "letters stripped": decoders.Strip("Ġ", 1, 0),
    "word pieces": decoders.WordPiece(),
    "ends of words": decoders.BPEDecoder("b"),
    "repetitions left out": decoders.CTC(),
}
_TEXT_STEPS = {
    "text replaced": decoders.Replace("a", "xyz"),
    "wrong bytes replaced": decoders.Replace("\N{REPLACEMENT CHARACTER}", "?"),
    "wrong bytes stripped": decoders.Strip("\N{REPLACEMENT CHARACTER}", 1, 0),
    "two spaces stripped": decoders.Strip(" ", 2, 0),
    "the last letter stripped": decoders.Strip("b", 0, 1),
}


def _byte_level_with(*steps: decoders.Decoder) -> Callable[[], Tokenizer]:
    return lambda: _byte_level(decoders.Sequence([*steps]))


ODD_BYTE_LEVELS: dict[str, Callable[[], Tokenizer]] = {
    f"byte level, {name}": _byte_level_with(*steps)
    for name, steps in {
        **{name: (step, decoders.ByteLevel()) for name, step in _LETTER_STEPS.items()},
        **{name: (decoders.ByteLevel(), step) for name, step in _TEXT_STEPS.items()},
    }.items()
}
"""How to make byte-level tokenizers whose decoders have further steps, as no family of models."""
