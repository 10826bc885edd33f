"""How byte-level tokenizers write bytes: each as one letter.

Printable bytes of Latin-1 are themselves. The others follow from U+0100 on, in their order. GPT-2
began it, and most vocabularies of today are written so.
"""

from __future__ import annotations

_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}

LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(sorted(set(range(256)) - _PRINTABLE))
}
"""Each byte's letter."""

BYTES = {letter: byte for byte, letter in LETTERS.items()}
"""Each letter's byte."""
