"""The text of byte-level decoders with further steps, found by asking the decoder.

Theory of operation
    Where other steps stand before or behind the bytes, no rule says which text is certain. A step
    before them may rewrite the letters that stand for bytes, a step behind them may strip or
    replace. U+FFFD may be a wrong byte, or the beginning of a character. So the tokens are decoded
    with two endings, too, and certain is what all three texts begin with:

        a b E2               a b U+FFFD
        a b E2, 80 80 80     a b U+2000 U+FFFD
        a b E2, BF BF BF     a b U+2FFF U+FFFD
                            [   )
                            certain text

    One of the endings completes the character, whichever it is: after E0 and F0 a byte 80 would be
    wrong, after ED and F4 a byte BF.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_contract.byte_level import LETTERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_orchestrator.front.tokenizer import Codec

_ENDINGS = tuple(LETTERS[byte] * 3 for byte in (0x80, 0xBF))
# So many tokens are looked at before an answer, of which so many with text are kept.
_MOST_LOOKED_AT = 256
_KEPT_TOKENS = 12
_MOST_TOKENS = 16  # that are decoded for each one that comes
# An incomplete character has bytes of three tokens, and a step may leave tokens out. What still
# more tokens leave uncertain is sent as it is, so that no decoder can hold a stream back.
_MOST_OPEN = 10


class ProbedDetokenizer:
    """The text of one answer, token by token: a `Detokenizer`.

    Of the text of the last tokens the first part is certain, and the rest is the tail.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int]) -> None:
        self._codec = codec
        self._tokens: list[str] = []
        self._certain_length = 0
        self._tail = ""
        self._open_text_count = 0
        self._open_special_count = 0  # while some text is not certain
        ending: list[str] = []
        for token_id in reversed(prompt[-_MOST_LOOKED_AT:]):
            if (token := codec.token_of(token_id)) is not None:
                ending.append(token)
            if len(ending) == _KEPT_TOKENS:
                break
        for token in reversed(ending):
            self._add(token)

    @property
    def open_count(self) -> int:
        """How many of the last tokens have text that is not certain."""
        return self._open_text_count + self._open_special_count

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now, and was not before."""
        token = self._codec.token_of(token_id)
        if token is None:
            self._open_special_count += bool(self._tail)
            return ""
        text = self._add(token)
        if text or not self._tail:
            self._open_text_count = self._open_special_count = 0
        self._open_text_count += bool(self._tail)
        if self._open_text_count > _MOST_OPEN:
            text += self.finish()
        return text

    def push_many(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return all text that has become certain."""
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        """End the text; return what was not certain."""
        text, self._tail = self._tail, ""
        self._certain_length += len(text)
        self._open_text_count = self._open_special_count = 0
        return text

    def _add(self, token: str) -> str:
        """Add a token; return what has become certain."""
        decode = self._codec.decode_strings
        self._tokens.append(token)
        whole = decode(self._tokens)
        end = min(_common_length(whole, decode([*self._tokens, it])) for it in _ENDINGS)
        text, self._tail = whole[self._certain_length : end], whole[end:]
        self._certain_length = end
        if len(self._tokens) >= _MOST_TOKENS:
            del self._tokens[:-_KEPT_TOKENS]
            self._certain_length = len(decode(self._tokens)) - len(self._tail)
        return text


def _common_length(first: str, second: str) -> int:
    """Return how many characters two texts begin with alike."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))
