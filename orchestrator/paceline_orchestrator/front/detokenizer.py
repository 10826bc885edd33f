"""Token ids become text, one token at a time.

Theory of operation
    The text of an answer is what the tokenizer makes of prompt and answer, less what it makes of
    the prompt. Where the end of the prompt's text depends on what follows, as an incomplete
    character does, this end belongs to the answer: it is the prompt's text only as far as no answer
    changes it. A detokenizer finds this text token by token. After each token it knows two things:

        certain text   characters that no later token can change
        open tokens    the last tokens, while their bytes belong to an incomplete character

    Both follow from the token ids alone. How the ids arrived (one by one, in blocks, or at once
    when a stream is resumed) makes no difference, so a resumed stream continues exactly where the
    broken one ended.

    Three things make a token's text depend on its neighbours:

    - A character has up to four bytes, and tokens can cut it anywhere. An incremental UTF-8 decoder
      keeps the bytes of the last, incomplete character: three at most. Bytes that cannot become a
      character any more are one U+FFFD for each part that could have begun one, as in Python and
      Rust. (The library's byte fallback makes U+FFFD of every byte of a run in which one byte is
      wrong. It decides when the run is over, and a stream cannot wait for that.)
    - Decoders treat the first token of a text in another way: they strip its space, or add none.
      So a token is decoded behind the tokens before it, and what that adds is the token's text. At
      the start of an answer the tokens before it are the prompt's last ones. (A decoder that
      replaces text across tokens is not followed back: what was sent stays.)
    - Special tokens have no text. They do not end a character, and the token after a leading
      special token is the first token of the text.

    One class is for byte-level tokenizers, whose text is the bytes of all tokens put together. One
    is for decoders in which other steps stand beside those bytes (`probed_text.py`), and one for
    all other decoders of the library.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING, Protocol, TypeAlias

from paceline_orchestrator.front.probed_text import ProbedDetokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_orchestrator.front.tokenizer import Codec

# What is decoded together: a token, or the bytes of whole characters, as the decoder takes them.
_Unit: TypeAlias = tuple[str, ...]

_INCOMPLETE_BYTES = 3  # the most that a character can lack its last byte with
# So many units before a token decide what the token looks like. One is enough for every decoder of
# the library except those that replace text across tokens.
_CONTEXT_UNITS = 8
# So many tokens are looked at before an answer. Special tokens have no text, so a prompt of nothing
# else would be looked at whole, on the event loop.
_MOST_LOOKED_AT = 256
# So many tokens are decoded at once: about a millisecond, in which no other thread runs.
_TOKENS_AT_ONCE = 512
# Where the decoder is asked what is certain, a token takes 30 to 100 microseconds.
_PROBED_FACTOR = 16


class Detokenizer(Protocol):
    """The text of one answer, token by token."""

    @property
    def open_count(self) -> int:
        """How many of the last tokens have text that is not certain."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is certain now, and was not before."""

    def push_many(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return all text that has become certain. Faster than one by one."""

    def finish(self) -> str:
        """End the text; return what was not certain. An incomplete character is U+FFFD."""


def make_detokenizer(codec: Codec, prompt: Sequence[int] = ()) -> Detokenizer:
    """Begin the text that follows a prompt.

    Cost: only the prompt's last tokens are looked at.
    """
    if codec.is_byte_level:
        return _ByteDetokenizer(codec, prompt)
    if codec.has_byte_letters:
        return ProbedDetokenizer(codec, prompt)
    return _ChainDetokenizer(codec, prompt)


def whole_text(codec: Codec, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, with the names of special tokens.

    A name between the bytes of a character ends it: what is there of it is U+FFFD, on both sides.

    Cost: not for the event loop.
    """
    detokenizer = make_detokenizer(codec.with_names())
    return detokenizer.push_many(token_ids) + detokenizer.finish()


def work_size(codec: Codec | None, token_count: int) -> int:
    """Return for `TextWorkers` how much work the text of tokens is: as many of most tokenizers."""
    is_probed = codec is not None and codec.has_byte_letters and not codec.is_byte_level
    return token_count * (_PROBED_FACTOR if is_probed else 1)


class _OpenTokens:
    """Counts the last tokens that have bytes of the incomplete character.

    tokens   [ a ][ b ][ special ][ c ]
    bytes      2    1       0       1      two bytes are incomplete: b, special and c are open
    """

    def __init__(self) -> None:
        self._byte_counts: deque[int] = deque()
        self._total = 0

    def __len__(self) -> int:
        return len(self._byte_counts)

    def add(self, byte_count: int, *, incomplete: int) -> None:
        """Add a token with its bytes; so many of the last bytes are incomplete."""
        self._byte_counts.append(byte_count)
        self._total += byte_count
        while self._byte_counts and self._total - self._byte_counts[0] >= incomplete:
            self._total -= self._byte_counts.popleft()


class _Utf8Decoder:
    """Decodes bytes as they come; bytes that cannot become a character are U+FFFD at once."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending_count(self) -> int:
        """How many of the last bytes belong to an incomplete character."""
        return len(self._decoder.getstate()[0])

    def decode(self, content: bytes) -> str:
        """Add bytes; return the characters that are complete."""
        text = self._decoder.decode(content)
        # Python keeps the first two bytes of a surrogate's encoding, which is no character.
        pending = self._decoder.getstate()[0]
        if len(pending) == 2 and pending[0] == 0xED and pending[1] >= 0xA0:
            text += self.finish()
        return text

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character; nothing if there is none."""
        return self._decoder.decode(b"", final=True)


class _ByteDetokenizer:
    """Text that is the bytes of all tokens put together, as UTF-8."""

    def __init__(self, codec: Codec, prompt: Sequence[int]) -> None:
        self._codec = codec
        self._utf8 = _Utf8Decoder()
        self._open = _OpenTokens()
        ending = b""
        for token_id in reversed(prompt[-_MOST_LOOKED_AT:]):
            ending = codec.bytes_of(token_id) + ending
            if len(ending) >= _INCOMPLETE_BYTES:
                break
        self._utf8.decode(ending)

    @property
    def open_count(self) -> int:
        return len(self._open)

    def push(self, token_id: int) -> str:
        content = self._codec.bytes_of(token_id)
        text = self._utf8.decode(content)
        self._open.add(len(content), incomplete=self._utf8.pending_count)
        return text

    def push_many(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        return self._utf8.finish()


class _ChainDetokenizer:
    """Text that a decoder of the library makes of token strings.

        [ ... context )[ bytes )
              certain    are an incomplete
              text       character

    The context consists of units, so the library never sees half a character.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int]) -> None:
        self._codec = codec
        self._utf8 = _Utf8Decoder()
        self._context: deque[_Unit] = deque(maxlen=_CONTEXT_UNITS)
        self._context_text = ""
        self._bytes = b""
        self._follows_invalid_bytes = False
        self._open = _OpenTokens()
        for token_id in prompt[self._window_start(prompt) :]:
            self.push(token_id)
        self._open = _OpenTokens()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def push(self, token_id: int) -> str:
        content = self._codec.bytes_in_chain(token_id)
        token = self._codec.token_of(token_id)
        if content is not None:
            text = self._push_bytes(content)
        elif token is not None:
            text = self._give_up_bytes() + self._add((token,))
        else:
            text = ""
        self._open.add(len(content or ""), incomplete=len(self._bytes))
        return text

    def push_many(self, token_ids: Sequence[int]) -> str:
        start = self._window_start(token_ids)
        pieces = list(self._pieces(token_ids[:start]))
        return "".join((*pieces, *map(self.push, token_ids[start:])))

    def finish(self) -> str:
        return self._give_up_bytes()

    def _window_start(self, token_ids: Sequence[int]) -> int:
        """Return from where on tokens decide what follows them."""
        count, start = 0, len(token_ids)
        first = max(0, start - _MOST_LOOKED_AT)
        while start > first and count < _CONTEXT_UNITS + _INCOMPLETE_BYTES:
            start -= 1
            count += self._codec.token_of(token_ids[start]) is not None
        return start

    def _pieces(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Add tokens, as many at once as the library may see; yield their text."""
        batch: list[_Unit] = []
        for token_id in token_ids:
            is_whole = self._codec.bytes_in_chain(token_id) is None and not self._bytes
            token = self._codec.token_of(token_id)
            if is_whole and token is not None:
                batch.append((token,))
            if batch and (not is_whole or len(batch) == _TOKENS_AT_ONCE):
                yield self._add(*batch)
                batch.clear()
            if not is_whole:
                yield self.push(token_id)
        if batch:
            yield self._add(*batch)

    def _push_bytes(self, content: bytes) -> str:
        strings_of = self._codec.strings_of
        self._bytes += content
        characters = self._utf8.decode(content)
        decided_count = len(self._bytes) - self._utf8.pending_count
        decided, self._bytes = self._bytes[:decided_count], self._bytes[decided_count:]
        if not decided:
            return ""
        is_valid = characters.encode() == decided
        if is_valid and not self._follows_invalid_bytes:
            return self._add(strings_of(decided))
        # The library would take valid bytes beside invalid ones for one invalid run.
        self._start_context(strings_of(decided), is_valid=is_valid)
        return characters

    def _give_up_bytes(self) -> str:
        """Return what an incomplete character is that nothing completes any more."""
        if self._bytes:
            self._start_context(self._codec.strings_of(self._bytes), is_valid=False)
            self._bytes = b""
        return self._utf8.finish()

    def _add(self, *units: _Unit) -> str:
        """Make units part of the context; return what they add to its text."""
        text = self._decode(units)[len(self._context_text) :]
        self._context += units
        self._context_text = self._decode()
        self._follows_invalid_bytes = False
        return text

    def _start_context(self, unit: _Unit, *, is_valid: bool) -> None:
        self._context.clear()
        self._context.append(unit)
        self._context_text = self._decode()
        self._follows_invalid_bytes = not is_valid

    def _decode(self, added: Sequence[_Unit] = ()) -> str:
        """Decode the context with what is added to it."""
        units = (*self._context, *added)
        return self._codec.decode_strings([string for unit in units for string in unit])
