"""What fake models write: each next token is a function of the text, over the bytes' alphabet.

Most characters are one byte, and one token. An umlaut is two, and an emoji four.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Sequence

# The byte alphabet, and one special token.
VOCABULARY_SIZE = 257
EOS = 256

_CHARACTERS = (
    *"abcdefghijklmnopqrstuvwxyz",
    "\N{LATIN SMALL LETTER O WITH DIAERESIS}",
    "\N{BICYCLIST}",
)


def next_token(text: Sequence[int]) -> int:
    """Return the target's token after a text: the next byte of a character, or the first of one."""
    recent = tuple(text[-4:])
    for encoded in _encoded():
        for length in range(min(len(encoded) - 1, len(recent)), 0, -1):
            if recent[-length:] == encoded[:length]:
                return encoded[length]
    drawn = zlib.crc32(struct.pack(f"<{len(recent)}I", *recent), len(text))
    return _encoded()[drawn % len(_CHARACTERS)][0]


def logprob_of(text: Sequence[int]) -> float:
    """Return what a target says of a text's last token: another number for each text."""
    return -1.0 - zlib.crc32(struct.pack(f"<{len(text)}I", *text)) / 2**32


def likeliest_after(text: Sequence[int], count: int) -> list[tuple[int, float]]:
    """Return what a target holds likely after a text: others after each text."""
    first = next_token(text)
    said = logprob_of([*text, first])
    return [((first + rank) % EOS, said - rank) for rank in range(count)]


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return what plain decoding generates: the oracle."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


@cache
def _encoded() -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(byte_tokenizer().encode(it).ids) for it in _CHARACTERS)


@cache
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are single bytes, with `<|end|>` as the special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token_id for token_id, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer
