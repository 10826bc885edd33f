"""The target's tokenizer: fetched once from a model server, slow work done off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from paceline.errors import (
    InternalError,
    InvalidFieldError,
    LoadingError,
    NoTargetError,
    UnsupportedError,
)
from paceline.panics import PanicError, taking_panics
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.wire import TokenizerRefusedError, fetch_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_orchestrator.fleet.server import ModelServer

__all__ = ["Codec", "Codecs"]

# Of the thread's processor time: honest tokenizers take microseconds for a few tokens.
_MOST_DECODE_SECONDS = 0.5
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Codec:
    """Text to token ids, and back.

    Attributes:
        byte_ids: Tokens that are one byte each; what a run of them means is known when it is over,
            because a run that is no UTF-8 as a whole becomes replacement characters as a whole.
        special_ids: Tokens without text.
        is_byte_level: Whether the text is the UTF-8 of all tokens' bytes put together.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        # Two of them, because how special tokens are treated is a state of the tokenizer.
        text = tokenizer_json.decode()
        self._parsing = Tokenizer.from_str(text)
        self._plain = Tokenizer.from_str(text)
        self._plain.encode_special_tokens = True
        decoder = json.dumps(json.loads(text).get("decoder"))
        vocabulary = self._plain.get_vocab(with_added_tokens=True)
        self.is_byte_level = '"ByteLevel"' in decoder
        self.byte_ids = frozenset(
            token_id
            for token, token_id in vocabulary.items()
            if '"ByteFallback"' in decoder and _BYTE_TOKEN.fullmatch(token)
        )
        added = self._plain.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, it in added.items() if it.special)

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> tuple[int, ...]:
        """Tokenise a prompt; see GenerateRequest for the options.

        Concurrency: other threads run meanwhile. `Tokenizer.encode` would hold them up.

        Raises:
            InvalidFieldError: The tokenizer gives up on this text.
        """
        tokenizer = self._parsing if parse_special_tokens else self._plain
        try:
            with taking_panics():
                (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        except PanicError as error:
            raise InvalidFieldError.of(
                "text", f"the model's tokenizer cannot take it ({error})"
            ) from None
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; special ones have none.

        Raises:
            InternalError: The tokenizer gives up on these tokens, or takes so long that other
                streams would notice.
        """
        began = time.thread_time()
        with _decoding():
            text = self._plain.decode(token_ids, skip_special_tokens=True)
        if (seconds := time.thread_time() - began) > _MOST_DECODE_SECONDS:
            raise InternalError(
                f"the model's tokenizer takes {seconds:.1f} s to decode {len(token_ids)} tokens"
            )
        return text

    def decode_many(self, token_ids: Sequence[int]) -> str:
        """Do the same, and let other threads run meanwhile, which costs more for a few tokens."""
        with _decoding():
            (text,) = self._plain.decode_batch([list(token_ids)], skip_special_tokens=True)
        return text


@contextmanager
def _decoding() -> Iterator[None]:
    try:
        with taking_panics():
            yield
    except PanicError as error:
        raise InternalError(f"the model's tokenizer cannot decode its tokens: {error}") from None


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the tokenizer of a server is not used, for as long as it is the same server."""

    fingerprint: str
    incarnation: str
    reason: str


class Codecs:
    """The tokenizers that were fetched, by fingerprint."""

    def __init__(self) -> None:
        self._codecs: dict[str, Codec | None] = {}
        self._refusals: dict[str, _Refusal] = {}  # by the server's name

    def has(self, fingerprint: str) -> bool:
        """Whether it was fetched, or is known not to exist."""
        return fingerprint in self._codecs

    def get(self, fingerprint: str) -> Codec | None:
        """Return a fetched tokenizer; None if the model has none.

        Raises:
            LoadingError: It was not fetched yet.
            NoTargetError: It was refused.
        """
        if fingerprint not in self._codecs:
            if reason := self.why_refused(fingerprint):
                raise NoTargetError(reason, retry_after_seconds=shortage.RETRY_SECONDS)
            raise LoadingError(
                "the tokenizer is being fetched", retry_after_seconds=shortage.RETRY_SECONDS
            )
        return self._codecs[fingerprint]

    def why_refused(self, fingerprint: str) -> str:
        """Say why no tokenizer with this fingerprint is there; empty if none was refused."""
        reasons = [it.reason for it in self._refusals.values() if it.fingerprint == fingerprint]
        return reasons[0] if reasons else ""

    def choose(self, servers: Sequence[ModelServer]) -> ModelServer | None:
        """Return the first server to fetch a tokenizer from; None if all of theirs are refused."""
        return next((it for it in servers if not self._is_refused(it)), None)

    async def fetch(self, server: ModelServer) -> None:
        """Fetch the tokenizer of a server's model, unless it is known.

        One that is refused is remembered, so that `choose` leaves this server out until it says
        that it is another, or has another tokenizer.

        Raises:
            TokenizerRefusedError: It is too large, came damaged, or cannot be read.
            PacelineError: It could not be fetched.
        """
        try:
            await self._fetch(server)
        except TokenizerRefusedError as error:
            assert server.facts is not None
            self._refusals[server.name] = _Refusal(
                fingerprint=server.facts.tokenizer_fingerprint,
                incarnation=server.facts.incarnation,
                reason=error.message,
            )
            raise

    def _is_refused(self, server: ModelServer) -> bool:
        facts, refusal = server.facts, self._refusals.get(server.name)
        if facts is None or refusal is None or facts.tokenizer_fingerprint in self._codecs:
            return False
        is_same = facts.tokenizer_fingerprint, facts.incarnation
        return is_same == (refusal.fingerprint, refusal.incarnation)

    async def _fetch(self, server: ModelServer) -> None:
        assert server.facts is not None
        fingerprint = server.facts.tokenizer_fingerprint
        if fingerprint in self._codecs:
            return
        try:
            tokenizer_json = await fetch_tokenizer(server.models, name=server.name)
        except UnsupportedError:
            self._codecs[fingerprint] = None
            return
        if hashlib.sha256(tokenizer_json).hexdigest() != fingerprint:
            raise TokenizerRefusedError(f"{server.name} sent a tokenizer that is not what it says")
        try:
            self._codecs[fingerprint] = await asyncio.to_thread(_new_codec, tokenizer_json)
        except Exception as error:  # of the library, which has no class of its own for it
            raise TokenizerRefusedError(
                f"{server.name}'s tokenizer cannot be read: {error}"
            ) from error


def _new_codec(tokenizer_json: bytes) -> Codec:
    with taking_panics():
        return Codec(tokenizer_json)
