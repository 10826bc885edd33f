"""Token lists and the digest by which an orchestrator and a model server agree on a prefix."""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from hashlib import _Hash

_DIGEST_BYTES = 16
_CHECKPOINT_TOKENS = 256
"""A digest hashes at most this many tokens again: some microseconds, whatever the length."""


class TokenPrefix:
    """A list of token ids that grows and shrinks at its end, and digests any of its beginnings.

    Cost: each token is hashed once when appended; a digest and a truncation hash the tokens since
    the last checkpoint again.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._tokens = array("I")
        self._checkpoints: list[_Hash] = [hashlib.sha256()]
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    def tokens(self, length: int | None = None) -> array[int]:
        """Copy the first tokens, or all."""
        return self._tokens[:length]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens, each in [0, 2^32)."""
        self._tokens.extend(token_ids)
        start = (len(self._checkpoints) - 1) * _CHECKPOINT_TOKENS
        for end in range(start + _CHECKPOINT_TOKENS, len(self._tokens) + 1, _CHECKPOINT_TOKENS):
            self._checkpoints.append(self._hash_to(end))

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first `length`."""
        del self._tokens[length:]
        del self._checkpoints[length // _CHECKPOINT_TOKENS + 1 :]

    def digest(self, length: int | None = None) -> bytes:
        """Digest the first `length` tokens, or all."""
        return self._hash_to(len(self) if length is None else length).digest()[:_DIGEST_BYTES]

    def _hash_to(self, length: int) -> _Hash:
        index = min(length // _CHECKPOINT_TOKENS, len(self._checkpoints) - 1)
        state = self._checkpoints[index].copy()
        state.update(_little_endian(self._tokens[index * _CHECKPOINT_TOKENS : length]))
        return state


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "little":
        return tokens.tobytes()
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()
