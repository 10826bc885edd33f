"""Counter-based noise: the randomness of a position, the same in every process and language.

Specification for other implementations (vectors: tests/contract/vectors/noise.json):

    generator  Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
    key        (seed mod 2^32, seed div 2^32)
    counter    (token_id div 2, position mod 2^32, position div 2^32, purpose)
    words      (w0, w1) for an even token id, (w2, w3) for an odd one; call them (a, b)
    bits       the upper 53 bits of a * 2^32 + b, with the lowest set to 1: odd, in [1, 2^53)
    uniform    bits / 2^53: exact in float64, never 0 or 1, symmetric about 1/2
    gumbel     -ln(-ln(uniform)) in float64, in (-3.61, 36.74)

Seeds of sessions are below 2^53. Under REJECTION a stage of a drafter's stack draws with a key of
its own, seed + (stage + 1) * 2^53: see `reviews.stage_seed`.

A position is the number of tokens before the token that is chosen, the prompt counted.

There is one implementation. `philox` uses nothing but integer operators, so it takes Python ints,
NumPy int64 arrays and torch int64 tensors alike: bits beyond 32 are masked away. The words of a
counter, and of a key, may have different shapes that broadcast, and may be ints beside arrays. The
first rounds then cost less, because values that do not depend on a position are computed once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

_Word: TypeAlias = Any
"""An int, or an int64 array or tensor, of values in [0, 2^32)."""


class Purpose(IntEnum):
    """What a position's noise is for; different purposes are independent. Never renumber."""

    EXACT = 1
    DRAFT = 2
    ACCEPT = 3
    RESIDUAL = 4


def philox(
    counter: tuple[_Word, _Word, _Word, _Word], key: tuple[_Word, _Word]
) -> tuple[_Word, _Word, _Word, _Word]:
    """Encrypt one 128-bit counter, or many at once.

    Args:
        counter: Four words that broadcast; they stay as they are.
        key: Two words that broadcast with these.

    Cost: 100 integer operations, most of them on the whole shape.
    """
    left_0, right_0, left_1, right_1 = counter
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = left_0 * _MULTIPLIERS[0], left_1 * _MULTIPLIERS[1]
        # The right words keep the whole product: the mask takes what is above 32 bits away.
        left_0 = (product_1 >> 32) ^ right_0 ^ key_0
        left_0 &= _WORD
        left_1 = (product_0 >> 32) ^ right_1 ^ key_1
        left_1 &= _WORD
        right_0, right_1 = product_1, product_0
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _WORD, (key_1 + _KEY_STEPS[1]) & _WORD
    return left_0, right_0 & _WORD, left_1, right_1 & _WORD


def pair_bits(seed: _Word, counter: tuple[_Word, _Word, _Word, _Word]) -> tuple[_Word, _Word]:
    """Return the 53 noise bits of token ids 2n and 2n + 1, where n is the counter's first word.

    Args:
        seed: One for all, or an array that broadcasts with the counter; below 2^63.
    """
    words = philox(counter, (seed & _WORD, seed >> 32))
    even, odd = words[0] << 21, words[2] << 21
    even |= words[1] >> 11
    even |= 1
    odd |= words[3] >> 11
    odd |= 1
    return even, odd


def noise_bits(seed: int, position: int, *, token_id: int, purpose: Purpose) -> int:
    """Return the noise of one token id at one position: an odd number in [1, 2^53)."""
    counter = (token_id >> 1, position & _WORD, position >> 32, int(purpose))
    bits: int = pair_bits(seed, counter)[token_id & 1]
    return bits


def uniform(bits: int) -> float:
    """Map noise bits to a float in (0, 1)."""
    return bits * 2.0**-53
