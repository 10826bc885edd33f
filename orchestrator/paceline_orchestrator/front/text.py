"""From final tokens to text that can be streamed, without ever taking a character back.

Token ids go out together with their text. They are held back while the text is uncertain (an
incomplete UTF-8 character) and where a stop string could begin. All texts concatenated are what the
tokenizer makes of all ids at once; only a stop string cuts that short. (The tokenizers library's
DecodeStream keeps the first promise, but loses what is uncertain at the end.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_orchestrator.calls.likeliest import LikeliestTokens
    from paceline_orchestrator.front.tokenizer import Codec

__all__ = ["Detokenizer", "FinalToken", "Piece", "StreamedText"]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# Text that stays uncertain for so many tokens is looked at more closely: it may be no UTF-8 at all.
_LONG_RUN = 8
# An incomplete character has at most three bytes, so at most three tokens with bytes.
_INCOMPLETE_TOKENS = 3
# A stop string has at most as many bytes, and so as many tokens with text.
_OVERLAP_TOKENS = 64


class Detokenizer:
    """Turns tokens into text as soon as it is certain.

        [ ... context )[ pending )
              text is certain  text may still change

    A token's text can depend on the tokens before it (a leading space, a character's first bytes),
    so pending ones are decoded together with the last certain ones.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> tuple[int, str]:
        """Add a token.

        Returns:
            How many of the pending tokens, from the first, now have certain text; and their text.
        """
        codec = self._codec
        in_byte_run = bool(self._pending) and not codec.byte_ids.isdisjoint(self._pending)
        self._pending.append(token_id)
        if token_id in codec.byte_ids or (in_byte_run and token_id in codec.special_ids):
            return 0, ""
        text = codec.decode(self._context + self._pending)
        if not text.startswith(self._context_text):
            return 0, ""
        if not text.endswith(_REPLACEMENT):
            return self._release(len(self._pending), text)
        if codec.is_byte_level and len(self._pending) >= _LONG_RUN:
            return self._release_invalid(text)
        return 0, ""

    def flush(self) -> tuple[int, str]:
        """End the text: what was uncertain is what it is."""
        return self._release(len(self._pending), self._codec.decode(self._context + self._pending))

    def _release(self, count: int, text: str) -> tuple[int, str]:
        """Make the first pending tokens the context; `text` is that of context and these."""
        new_text = text[len(self._context_text) :]
        released = self._pending[:count]
        del self._pending[:count]
        # Special tokens have no text, so they cannot be what the next token's text depends on.
        context = [it for it in released if it not in self._codec.special_ids]
        if context:
            self._context = context
            self._context_text = self._codec.decode(context)
        return count, new_text

    def _release_invalid(self, text: str) -> tuple[int, str]:
        """Release what surely is no UTF-8, all but the last character that could still become one.

        Lossy decoding goes from left to right, so bytes can only change their meaning as long as
        they belong to its last character. Where the two halves decode by themselves to what they
        decode to together, a character ends.
        """
        tokens_with_bytes = 0
        for cut in range(len(self._pending) - 1, 0, -1):
            tokens_with_bytes += self._pending[cut] not in self._codec.special_ids
            if tokens_with_bytes > _INCOMPLETE_TOKENS:
                break
            first = self._codec.decode(self._context + self._pending[:cut])
            rest = self._codec.decode(self._pending[cut:])
            if rest and first + rest == text:
                return self._release(cut, first)
        return 0, ""


@dataclass(frozen=True, slots=True)
class FinalToken:
    """A token that is final, and what is told of it."""

    token_id: int
    accepted: bool
    logprob: float | None = None
    likeliest: LikeliestTokens = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that may be sent, and their text."""

    tokens: tuple[FinalToken, ...]
    text: str


class StreamedText:
    """Collects final tokens, and gives out those whose text is certain and free of stop strings.

        tail = [ sent before a resume )[ held: a stop string could begin in it )

    Args:
        codec: The tokenizer; None if the model has none: then there is no text.
        stop_strings: End before the first of these.

    Attributes:
        stop_string: The one that was found; empty until then.
        token_count: Tokens taken in, up to the one that completed the stop string.
    """

    def __init__(self, codec: Codec | None, stop_strings: Sequence[str] = ()) -> None:
        self._codec = codec
        self._detokenizer = Detokenizer(codec) if codec is not None else None
        self._stop_strings = tuple(stop_strings)
        self._uncertain: deque[FinalToken | None] = deque()
        self._held: deque[tuple[FinalToken | None, int]] = deque()  # with the end of its text
        self._tail = ""
        self._sent_length = 0
        self.stop_string = ""
        self.token_count = 0

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that the client has, with their text, as if they had been generated.

        Of many tokens all but the last ones are decoded at once, some hundred times as fast. What
        comes next depends on the last ones alone: on those within a stop string's length, and on an
        incomplete character or run of bytes.
        """
        start = self._find_window(token_ids)
        if start:
            self._skip(token_ids, start)
            if self.stop_string:
                return
        for token_id in token_ids[start:]:
            self._take(token_id, None)
            if self.stop_string:
                break
            self.take()
        self._held.clear()
        self._sent_length = len(self._tail)

    def _find_window(self, token_ids: Sequence[int]) -> int:
        """Return from where on tokens are looked at one by one: where no run of bytes goes on."""
        if self._codec is None:
            return 0
        inner = self._codec.byte_ids | self._codec.special_ids
        start = self._back(token_ids, self._back(token_ids, len(token_ids)))
        while start > 0 and not inner.isdisjoint(token_ids[start - 1 : start + 1]):
            start -= 1
        return start

    def _back(self, token_ids: Sequence[int], end: int) -> int:
        """Go back from a position by as many tokens with text as a stop string can have."""
        assert self._codec is not None
        left = _OVERLAP_TOKENS
        while end > 0 and left > 0:
            end -= 1
            left -= token_ids[end] not in self._codec.special_ids
        return end

    def _skip(self, token_ids: Sequence[int], count: int) -> None:
        """Take in the first tokens without their text, unless a stop string is complete in it.

        The text that is searched reaches into what is looked at again, so that none is overlooked.
        """
        assert self._codec is not None
        text = self._codec.decode_many(token_ids[: self._back(token_ids, len(token_ids))])
        # An incomplete last character is looked at again.
        found = [it for it in self._stop_strings if it in text.rstrip(_REPLACEMENT)]
        self.stop_string = found[0] if found else ""
        self.token_count = count

    def push(self, token: FinalToken) -> bool:
        """Take in a token; tell whether a stop string is complete. Then nothing more may come."""
        self._take(token.token_id, token)
        return bool(self.stop_string)

    def push_without_text(self, token: FinalToken) -> None:
        """Take in the token that ends the text and is no part of it."""
        self.flush()
        if not self.stop_string:
            self._held.append((token, len(self._tail)))
            self.token_count += 1

    def flush(self) -> None:
        """End the text, so that all of it can be taken out."""
        if self._detokenizer is not None and not self.stop_string:
            self._append(*self._detokenizer.flush())
            self._stop_strings = ()

    def take(self) -> Piece | None:
        """Take out what may be sent now."""
        safe = len(self._tail) - self._possible_stop_length()
        tokens: list[FinalToken] = []
        end = 0
        while self._held and (self._held[0][1] <= safe or self.stop_string):
            token, end = self._held.popleft()
            if token is not None:
                tokens.append(token)
        end = min(end, len(self._tail))
        text = self._tail[self._sent_length : end]
        self._tail = self._tail[end:]
        self._sent_length = max(0, self._sent_length - end)
        self._held = deque((token, at - end) for token, at in self._held)
        return Piece(tuple(tokens), text) if tokens or text else None

    def _take(self, token_id: int, token: FinalToken | None) -> None:
        self.token_count += 1
        self._uncertain.append(token)
        if self._detokenizer is None:
            self._append(1, "")
        else:
            self._append(*self._detokenizer.push(token_id))

    def _append(self, count: int, text: str) -> None:
        """Give certain text to the first `count` uncertain tokens: they go out together."""
        self._tail += text
        for _ in range(count):
            self._held.append((self._uncertain.popleft(), len(self._tail)))
        self._find_stop_string()

    def _find_stop_string(self) -> None:
        found = [(self._tail.find(it), it) for it in self._stop_strings if it in self._tail]
        if found:
            start, self.stop_string = min(found)
            self.token_count -= len(self._uncertain)
            self._tail = self._tail[: max(start, self._sent_length)]
            self._stop_strings = ()

    def _possible_stop_length(self) -> int:
        """Length of the longest end of the tail with which a stop string could begin."""
        longest = max(map(len, self._stop_strings), default=0)
        for length in range(min(longest - 1, len(self._tail)), 0, -1):
            if any(it.startswith(self._tail[-length:]) for it in self._stop_strings):
                return length
        return 0
