"""The target's tokenizer: fetched once from a model server, slow work done off the event loop."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from paceline.errors import (
    InternalError,
    InvalidFieldError,
    LoadingError,
    NoTargetError,
    UnsupportedError,
)
from paceline.panics import PanicError, taking_panics
from paceline_contract.byte_level import BYTES
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.wire import TokenizerRefusedError, fetch_tokenizer
from paceline_orchestrator.front.prompt_parts import Part, PartsEncoder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.front.prompt_parts import Piece

_MOST_WORDS = 256  # of what the library says of a tokenizer: it quotes it
# Of the thread's processor time: honest tokenizers take a millisecond for hundreds of tokens.
_MOST_DECODE_SECONDS = 0.5
# The longest tokens in use are runs of 128 spaces; a message has thousands of tokens.
_MOST_TOKEN_BYTES = 256
# Tokenizers that are received at a time: each may be large.
_MOST_AT_ONCE = 2
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Codec:
    """Text to token ids, and what a detokenizer needs to know for the way back.

    Attributes:
        special_ids: Tokens without text, by what they are called.
        is_byte_level: Whether a text is the bytes of all tokens put together, as UTF-8.
        has_byte_letters: Whether a step of the decoder takes letters for bytes, as the only step
            that does anything if `is_byte_level`.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        # Two of them, because how special tokens are treated is a state of the tokenizer.
        text = tokenizer_json.decode()
        self._parsing = Tokenizer.from_str(text)
        plain = Tokenizer.from_str(text)
        plain.encode_special_tokens = True
        self._parts = PartsEncoder(plain)
        steps = _decoder_steps(json.loads(text).get("decoder"))
        self._has_byte_fallback = "ByteFallback" in steps
        self.has_byte_letters = "ByteLevel" in steps
        self.is_byte_level = [it for it in steps if it != "Fuse"] == ["ByteLevel"]
        added = self._parsing.get_added_tokens_decoder()
        self._added_texts = {token_id: it.content for token_id, it in added.items()}
        self.special_ids = {it.content: token_id for token_id, it in added.items() if it.special}
        self._bytes_alone: dict[int, bytes] = {}  # of tokens that were asked for

    def with_names(self) -> Codec:
        """Return a codec whose special tokens have a text like any other token: their name."""
        named = copy.copy(self)
        named.special_ids = {}
        return named

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> tuple[int, ...]:
        """Tokenise a prompt; see GenerateRequest for the options.

        Concurrency: other threads run meanwhile. `Tokenizer.encode` would hold them up.

        Raises:
            InvalidFieldError: The tokenizer gives up on this text.
        """
        if not parse_special_tokens:
            plain = Part(text, parse_special_tokens=False)
            return self.encode_pieces([plain], add_special_tokens=add_special_tokens)
        with _giving_up_told():
            (encoding,) = self._parsing.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def encode_pieces(
        self, pieces: Sequence[Piece], *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Tokenise a text of parts, in some of which special tokens count.

        Concurrency: as `encode`.

        Raises:
            InvalidFieldError: The tokenizer gives up on this text.
        """
        with _giving_up_told():
            return self._parts.encode(pieces, add_special_tokens=add_special_tokens)

    def added_text(self, token_id: int) -> str:
        """Return the text of a token that the tokenizer adds to its vocabulary; else nothing."""
        return self._added_texts.get(token_id, "")

    def token_of(self, token_id: int) -> str | None:
        """Return a token as its vocabulary has it; None if it has no text, or does not exist."""
        token: str | None = self._parsing.id_to_token(token_id)
        return None if token in self.special_ids else token

    def bytes_of(self, token_id: int) -> bytes:
        """Return a byte-level tokenizer's token as bytes."""
        token = self.token_of(token_id)
        if token is None:
            return b""
        try:
            return bytes(map(BYTES.__getitem__, token))
        except KeyError:  # an added token with other letters is what it says
            return token.encode()

    def bytes_alone(self, token_id: int) -> bytes:
        """Return what a token alone adds to a text, in UTF-8; of a special token its name.

        Of a token that is part of a character these are its bytes. Empty if there is no such token,
        or if it is longer than any should be.
        """
        if (found := self._bytes_alone.get(token_id)) is None:
            content = self._new_bytes_alone(token_id)
            found = content if len(content) <= _MOST_TOKEN_BYTES else b""
            self._bytes_alone[token_id] = found
        return found

    def _new_bytes_alone(self, token_id: int) -> bytes:
        token: str | None = self._parsing.id_to_token(token_id)
        if token is None or len(token) > _MOST_TOKEN_BYTES:
            return b""
        if token in self.special_ids:
            return token.encode()
        if (content := self.bytes_in_chain(token_id)) is not None:
            return content
        before = self.decode_strings(["a"])
        return self.decode_strings(["a", token])[len(before) :].encode()

    def bytes_in_chain(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that can be part of a character; None if it cannot."""
        if self.has_byte_letters:
            return self.bytes_of(token_id)
        if not self._has_byte_fallback:
            return None
        found = _BYTE_TOKEN.fullmatch(self.token_of(token_id) or "")
        return bytes.fromhex(found[1]) if found else None

    def strings_of(self, content: bytes) -> tuple[str, ...]:
        """Return byte fallback's tokens of these bytes."""
        return tuple(f"<0x{byte:02X}>" for byte in content)

    def decode_strings(self, tokens: list[str]) -> str:
        """Return the text of tokens, as their vocabulary has them.

        Raises:
            InternalError: The tokenizer gives up on these tokens, or takes so long that other
                streams would notice.
        """
        decoder = self._parsing.decoder
        if decoder is None:
            return " ".join(tokens)
        began = time.thread_time()
        try:
            with taking_panics():
                text: str = decoder.decode(tokens)
        except PanicError as error:
            raise InternalError(
                f"the model's tokenizer cannot decode its tokens: {error}"
            ) from None
        if (seconds := time.thread_time() - began) > _MOST_DECODE_SECONDS:
            raise InternalError(
                f"the model's tokenizer takes {seconds:.1f} s to decode {len(tokens)} tokens"
            )
        return text


@contextmanager
def _giving_up_told() -> Iterator[None]:
    """Tell of a prompt on which the tokenizer gives up.

    Raises:
        InvalidFieldError: It did.
    """
    try:
        with taking_panics():
            yield
    except PanicError as error:
        raise InvalidFieldError.of(
            "text", f"the model's tokenizer cannot take it ({error})"
        ) from None


def _decoder_steps(decoder: dict[str, Any] | None) -> list[str]:
    """Return the types of a decoder's steps, in their order."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the tokenizer of a server is not used, for as long as it is the same server.

    Attributes:
        has_none: Whether the server has said that its model has none.
    """

    fingerprint: str
    incarnation: str
    reason: str
    has_none: bool = False


class Codecs:
    """The tokenizers that were fetched, by fingerprint.

    One server that says that its model has none does not speak for the others, since it may be too
    old to know the question: the others with the same fingerprint are asked first. That there is
    none is known when all of them have said so. A server that comes later is asked, too.
    """

    def __init__(self) -> None:
        self._codecs: dict[str, Codec | None] = {}
        self._refusals: dict[str, _Refusal] = {}  # by the server's name
        self._receiving = asyncio.Semaphore(_MOST_AT_ONCE)

    def has(self, fingerprint: str) -> bool:
        """Whether it was fetched, or is known not to exist."""
        return fingerprint in self._codecs

    def has_of(self, server: ModelServer) -> bool:
        """Whether the tokenizer that a server names was fetched."""
        facts = server.facts
        return facts is not None and self._codecs.get(facts.tokenizer_fingerprint) is not None

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
        refused = (it for it in self._refusals.values() if not it.has_none)
        return next((it.reason for it in refused if it.fingerprint == fingerprint), "")

    def choose(self, servers: Sequence[ModelServer]) -> ModelServer | None:
        """Return the first server to ask for its tokenizer.

        None: each server's tokenizer was fetched or refused, or the server has none.
        """
        return next((it for it in servers if self._may_be_asked(it)), None)

    def forget_all_but(self, servers: Collection[ModelServer]) -> None:
        """Forget what was fetched or refused of servers that are gone.

        Pods have a new name each time, and models come and go. Requests that run have their
        tokenizer in hand. While no server says what it has, all stays, for it may be back soon.
        """
        names = {it.name for it in servers}
        self._refusals = {name: it for name, it in self._refusals.items() if name in names}
        fingerprints = {it.facts.tokenizer_fingerprint for it in servers if it.facts}
        if fingerprints:
            self._codecs = {it: codec for it, codec in self._codecs.items() if it in fingerprints}

    def conclude(self, fingerprint: str, servers: Sequence[ModelServer]) -> bool:
        """Take it that there is no such tokenizer, if each of these servers has said so.

        Args:
            fingerprint: The tokenizer's.
            servers: All with this fingerprint that can be asked, now or after a pause.

        Returns:
            Whether the tokenizer was fetched, or is known not to exist.
        """
        refusals = [self._refusal_of(it) for it in servers]
        if servers and all(it is not None and it.has_none for it in refusals):
            self._codecs.setdefault(fingerprint, None)
        return self.has(fingerprint)

    async def fetch(self, server: ModelServer) -> None:
        """Fetch the tokenizer of a server's model, unless it was fetched.

        One that is refused is remembered, so that `choose` leaves this server out until it says
        that it is another, or has another tokenizer; likewise that the server has none.

        Raises:
            TokenizerRefusedError: It is too large, came damaged, or cannot be read.
            PacelineError: It could not be fetched.
        """
        try:
            await self._fetch(server)
        except UnsupportedError as error:
            self._refuse(server, error.message, has_none=True)
        except TokenizerRefusedError as error:
            self._refuse(server, error.message)
            raise

    def _refuse(self, server: ModelServer, reason: str, *, has_none: bool = False) -> None:
        assert server.facts is not None
        self._refusals[server.name] = _Refusal(
            fingerprint=server.facts.tokenizer_fingerprint,
            incarnation=server.facts.incarnation,
            reason=reason,
            has_none=has_none,
        )

    def _may_be_asked(self, server: ModelServer) -> bool:
        return (
            server.facts is not None
            and not self.has_of(server)
            and self._refusal_of(server) is None
        )

    def _refusal_of(self, server: ModelServer) -> _Refusal | None:
        """Return why a server's tokenizer is not used, if that was said of this very server."""
        facts, refusal = server.facts, self._refusals.get(server.name)
        if facts is None or refusal is None:
            return None
        is_same = facts.tokenizer_fingerprint, facts.incarnation
        return refusal if is_same == (refusal.fingerprint, refusal.incarnation) else None

    async def _fetch(self, server: ModelServer) -> None:
        assert server.facts is not None
        fingerprint = server.facts.tokenizer_fingerprint
        if self._codecs.get(fingerprint) is not None:
            return
        tokenizer_json = await fetch_tokenizer(
            server.models, name=server.name, receiving=self._receiving
        )
        self._codecs[fingerprint] = await asyncio.to_thread(
            _read, tokenizer_json, fingerprint=fingerprint, name=server.name
        )


def _read(tokenizer_json: bytes, *, fingerprint: str, name: str) -> Codec:
    """Read what the server of this name sent; on a thread, for hundreds of megabytes are hashed."""
    if hashlib.sha256(tokenizer_json).hexdigest() != fingerprint:
        raise TokenizerRefusedError(f"{name} sent a tokenizer that is not what it says")
    try:
        with taking_panics():
            return Codec(tokenizer_json)
    except Exception as error:  # of the library, which has no class of its own for it
        words = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
        raise TokenizerRefusedError(f"{name}'s tokenizer cannot be read: {words}") from error
