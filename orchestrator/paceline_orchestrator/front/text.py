"""From final tokens to text that can be streamed, without ever taking a character back.

Token ids go out together with their text. They are held back while some of their text is uncertain,
and where a stop string could begin.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_orchestrator.front.detokenizer import make_detokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_contract.calls import LikeliestTokens
    from paceline_orchestrator.front.tokenizer import Codec

# Where stop strings name special tokens, these stand for them in the text. No text has surrogates.
_FIRST_MARK, _LAST_MARK = 0xD800, 0xDFFF


@dataclass(frozen=True, slots=True)
class FinalToken:
    """A token that is final, and what is told of it."""

    token_id: int
    accepted: bool
    logprob: float | None = None
    likeliest: LikeliestTokens = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that may be sent, and their text.

    Attributes:
        tokens: In their order.
        text: What they add to the text that was sent before.
        lengths: How many characters of it became certain with each token.
    """

    tokens: tuple[FinalToken, ...]
    text: str
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """A token that was not sent yet.

    Attributes:
        end: The length of the text that is certain with this token and those before it.
    """

    token: FinalToken
    end: int


class StreamedText:
    """Collects final tokens, and gives out those whose text is certain and free of stop strings.

        text = [ sent before a resume )[ of the held tokens )

    Args:
        codec: The tokenizer; None if the model has none: then there is no text.
        stop_strings: End before the first of these. Those of special tokens end at such a token.
        prompt: What the text follows.

    Attributes:
        stop_string: The one that was found; empty until then.
        token_count: Tokens taken in, up to the one that completed the stop string.
    """

    def __init__(
        self,
        codec: Codec | None,
        stop_strings: Sequence[str] = (),
        *,
        prompt: Sequence[int] = (),
    ) -> None:
        self._detokenizer = make_detokenizer(codec, prompt) if codec is not None else None
        special_ids = codec.special_ids if codec is not None else {}
        self._stops = _Stops(stop_strings, special_ids)
        self._held: deque[_Held] = deque()
        self._text = ""
        self._sent_length = 0
        self._is_over = False
        self.stop_string = ""
        self.token_count = 0

    def resume(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that the client has, with the text that they make certain."""
        earlier, last = token_ids[:-1], token_ids[-1:]
        self._take_in(earlier)
        self.token_count = len(earlier)
        self._find_stop_string()
        if last and not self.stop_string:
            self.push(FinalToken(last[0], accepted=False))
        self._held.clear()
        self._text = self._text[max(0, len(self._text) - self._stops.longest_length) :]
        self._sent_length = len(self._text)

    def push(self, token: FinalToken) -> bool:
        """Take in a token; tell whether a stop string is complete. Then nothing more may come."""
        self._take_in((token.token_id,))
        self.token_count += 1
        self._held.append(_Held(token, len(self._text)))
        self._find_stop_string()
        return bool(self.stop_string)

    def push_without_text(self, token: FinalToken) -> None:
        """Take in the token that ends the text and is no part of it."""
        self.flush()
        if not self.stop_string:
            self._held.append(_Held(token, len(self._text)))
            self.token_count += 1

    def flush(self) -> None:
        """End the text, so that all of it can be taken out."""
        if self._is_over:
            return
        # What was uncertain belongs to the last token. A client that has this token has its text.
        if self._detokenizer is not None and self._held:
            self._text += self._detokenizer.finish()
            self._held[-1] = _Held(self._held[-1].token, len(self._text))
            self._find_stop_string()
        self._is_over = True

    def take(self) -> Piece | None:
        """Take out what may be sent now."""
        count, safe_length = len(self._held), len(self._text)
        if not self._is_over:
            count -= self._detokenizer.open_count if self._detokenizer is not None else 0
            safe_length -= self._stops.begun_length(self._text)
        tokens: list[FinalToken] = []
        pieces: list[str] = []
        end = self._sent_length
        while len(tokens) < count and self._held[0].end <= safe_length:
            held = self._held.popleft()
            tokens.append(held.token)
            pieces.append(self._stops.without_marks(self._text[end : held.end]))
            end = max(end, held.end)
        if not tokens:
            return None  # right after a resume a stop string may begin in what was sent
        self._text, self._sent_length = self._text[end:], 0
        self._held = deque(_Held(it.token, it.end - end) for it in self._held)
        return Piece(tuple(tokens), "".join(pieces), tuple(map(len, pieces)))

    def _take_in(self, token_ids: Sequence[int]) -> None:
        """Add tokens' certain text, with the marks of special tokens that stop strings name."""
        if self._detokenizer is None:
            return
        start = 0
        for index, token_id in enumerate(token_ids):
            if token_id in self._stops.marks:
                self._text += self._detokenizer.push_many(token_ids[start : index + 1])
                self._text += self._stops.marks[token_id]
                start = index + 1
        self._text += self._detokenizer.push_many(token_ids[start:])

    def _find_stop_string(self) -> None:
        found = self._stops.first_in(self._text)
        if found is None:
            return
        start, self.stop_string = found
        self._is_over = True
        end = max(start, self._sent_length)
        self._text = self._text[:end]
        self._held = deque(_Held(it.token, min(it.end, end)) for it in self._held)


class _Stops:
    """Looks for stop strings in a text in which marks stand for the special tokens they name.

    Args:
        stop_strings: What is looked for.
        special_ids: Special tokens, by what they are called.

    Attributes:
        marks: What stands for a special token in the text, by its id.
        longest_length: Characters of the longest stop string.
    """

    def __init__(self, stop_strings: Sequence[str], special_ids: Mapping[str, int]) -> None:
        self.marks: dict[int, str] = {}
        self._patterns: dict[str, str] = {}
        for stop_string in stop_strings:
            self._patterns[stop_string] = stop_string
            named = [it for it in special_ids if it in stop_string]
            marked = stop_string
            for name in sorted(named, key=len, reverse=True):
                mark = self.marks.get(special_ids[name]) or self._new_mark(special_ids[name])
                marked = marked.replace(name, mark or name)
            self._patterns[marked] = stop_string
        self.longest_length = max(map(len, self._patterns), default=0)

    def _new_mark(self, special_id: int) -> str:
        """Give a special token a mark; empty if there are no more: then its name is only text."""
        number = _FIRST_MARK + len(self.marks)
        if number > _LAST_MARK:
            return ""
        self.marks[special_id] = chr(number)
        return self.marks[special_id]

    def first_in(self, text: str) -> tuple[int, str] | None:
        """Return where the first stop string begins, and which it is."""
        found = [(text.find(it), stop) for it, stop in self._patterns.items() if it in text]
        return min(found, default=None)

    def begun_length(self, text: str) -> int:
        """Return the length of the longest end of a text with which a stop string could begin."""
        for length in range(min(self.longest_length - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(it.startswith(end) for it in self._patterns):
                return length
        return 0

    def without_marks(self, text: str) -> str:
        """Return what a client sees of a text."""
        return "".join(it for it in text if not _is_mark(it)) if self.marks else text


def _is_mark(character: str) -> bool:
    return _FIRST_MARK <= ord(character) <= _LAST_MARK
