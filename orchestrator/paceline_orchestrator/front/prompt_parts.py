"""Text to token ids where special tokens count in some parts of the text alone.

A template writes special tokens, and people write texts in which the same letters can stand. Parts
say which is which. They are no texts of their own: most tokenizers join letters across any border
that one could draw, put a space before the first word, or look at what stands before. So the text
is tokenised as a whole, by a tokenizer that knows no special token:

    parts      "<s>You said: " "<s>" " there."        the first one with special tokens
    encoded    "#1You said: <s> there."               #1 is an added token of that tokenizer alone
    ids        [#1] [You] [ said] [:] [ <] [s] [>] [ there] [.]
    returned   [<s>] [You] ...                        what each stand-in stands for

A stand-in is a word that nobody can guess, so no text has it. It takes the spaces around it as its
special token does. Some models can also make the id of a special token from its letters (those that
SentencePiece made have it among their words): where that happens the letters are taken apart.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from tokenizers import AddedToken

from paceline_serving.name_pattern import name_pattern

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_PRIVATE = (0x10_0000, 0x10_FFFD)  # code points that no standard gives a meaning to
_NONCE_LETTERS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a text, and whether special tokens in it count."""

    text: str
    parse_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Token:
    """An added token of the tokenizer between two parts, by its text."""

    text: str


Piece: TypeAlias = "Part | Token"


class PartsEncoder:
    """Encodes texts of parts. The tokenizer is this encoder's alone: it is given stand-ins.

    Args:
        tokenizer: It encodes special tokens as text (`encode_special_tokens`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self._tokenizer = tokenizer
        self._special_ids = {it.content: id_ for id_, it in added.items() if it.special}
        self._special = name_pattern(self._special_ids)
        # The library's rule: of all that begin at a place, the longest.
        self._added = name_pattern(it.content for it in added.values())
        nonce = "".join(_private_letter(secrets.randbelow(1 << 15)) for _ in range(_NONCE_LETTERS))
        self._stand_ins = {
            it.content: nonce + _private_letter(index)
            for index, it in enumerate((*added.values(), AddedToken("")))
        }
        self._nothing = self._stand_ins[""]
        flags = {it.content: it for it in added.values()}
        tokenizer.add_tokens(
            [
                AddedToken(
                    stand_in,
                    lstrip=text in flags and flags[text].lstrip,
                    rstrip=text in flags and flags[text].rstrip,
                    normalized=False,
                    special=False,
                )
                for text, stand_in in self._stand_ins.items()
            ]
        )
        ids = {it.content: id_ for id_, it in added.items()}
        self._meant: dict[int | None, int | None] = {
            tokenizer.token_to_id(stand_in): ids.get(text)
            for text, stand_in in self._stand_ins.items()
        }

    def encode(self, pieces: Sequence[Piece], *, add_special_tokens: bool) -> tuple[int, ...]:
        """Tokenise a text.

        Concurrency: other threads run meanwhile. `Tokenizer.encode` would hold them up.
        """
        # A template's special tokens are stand-ins in it: whatever else spells one, also across the
        # border of two parts, is only letters.
        text = "".join(map(self._written, pieces))
        ids, made = self._encode(text, add_special_tokens=add_special_tokens)
        if made & {self._special_ids[it] for it in self._special.findall(text)}:
            apart = self._special.sub(self._apart, text)
            ids, _ = self._encode(apart, add_special_tokens=add_special_tokens)
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[tuple[int, ...], set[int]]:
        """Return a text's ids, and those that the model made, not a stand-in or the tokenizer."""
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        meant = [self._meant.get(it, it) for it in encoding.ids]
        made = {
            token_id
            for token_id, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True)
            if not is_added
        }
        return tuple(it for it in meant if it is not None), made

    def _written(self, piece: Piece) -> str:
        if isinstance(piece, Token):
            return self._stand_ins[piece.text]
        return self._added.sub(self._stand_in, piece.text) if not _is_plain(piece) else piece.text

    def _stand_in(self, found: re.Match[str]) -> str:
        """Write a special token's stand-in; other added tokens are found by the tokenizer."""
        return self._stand_ins[found[0]] if found[0] in self._special_ids else found[0]

    def _apart(self, found: re.Match[str]) -> str:
        return found[0][:1] + self._nothing + found[0][1:]


def _is_plain(piece: Piece) -> bool:
    return isinstance(piece, Part) and not piece.parse_special_tokens


def _private_letter(index: int) -> str:
    return chr(_PRIVATE[0] + index)
