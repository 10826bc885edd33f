"""The target's tokenizer: fetched once from a model server, slow work done off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from paceline.errors import InternalError, LoadingError, UnsupportedError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.wire import fetch_tokenizer

if TYPE_CHECKING:
    from paceline_orchestrator.fleet.server import ModelServer

__all__ = ["Codec", "Codecs"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Byte-level tokenizers write each byte as a letter: those of printable bytes of Latin-1 are the
# bytes themselves, and the others follow from U+0100 on, in their order.
_PRINTABLE = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + index) for index, byte in enumerate(sorted(set(range(256)) - _PRINTABLE))
}
_BYTES = {letter: byte for byte, letter in _LETTERS.items()}


class Codec:
    """Text to token ids, and what a detokenizer needs to know for the way back.

    Attributes:
        special_ids: Tokens without text, by what they are called.
        is_byte_level: Whether a text is the bytes of all tokens put together, as UTF-8.
        is_lossy_by_character: Whether a wrong byte costs one U+FFFD, and not the run it stands in.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        # Two of them, because how special tokens are treated is a state of the tokenizer.
        text = tokenizer_json.decode()
        self._parsing = Tokenizer.from_str(text)
        self._plain = Tokenizer.from_str(text)
        self._plain.encode_special_tokens = True
        steps = _decoder_steps(json.loads(text).get("decoder"))
        self._has_byte_fallback = "ByteFallback" in steps
        self.is_lossy_by_character = "ByteLevel" in steps
        self.is_byte_level = self.is_lossy_by_character and set(steps) <= {"ByteLevel", "Fuse"}
        added = self._plain.get_added_tokens_decoder()
        self._special_tokens = {it.content for it in added.values() if it.special}
        self.special_ids = {it.content: token_id for token_id, it in added.items() if it.special}

    def encode(
        self, text: str, *, add_special_tokens: bool, parse_special_tokens: bool
    ) -> tuple[int, ...]:
        """Tokenise a prompt; see GenerateRequest for the options.

        Concurrency: other threads run meanwhile. `Tokenizer.encode` would hold them up.
        """
        tokenizer = self._parsing if parse_special_tokens else self._plain
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def token_of(self, token_id: int) -> str | None:
        """Return a token as its vocabulary has it; None if it has no text, or does not exist."""
        token: str | None = self._plain.id_to_token(token_id)
        return None if token in self._special_tokens else token

    def bytes_of(self, token_id: int) -> bytes:
        """Return a byte-level tokenizer's token as bytes."""
        token = self.token_of(token_id)
        if token is None:
            return b""
        try:
            return bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token with other letters is what it says
            return token.encode()

    def bytes_in_chain(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that can be part of a character; None if it cannot."""
        if self.is_lossy_by_character:
            return self.bytes_of(token_id)
        if not self._has_byte_fallback:
            return None
        found = _BYTE_TOKEN.fullmatch(self.token_of(token_id) or "")
        return bytes.fromhex(found[1]) if found else None

    def strings_of(self, content: bytes) -> tuple[str, ...]:
        """Return tokens' strings that the decoder makes these bytes of."""
        if self.is_lossy_by_character:
            return ("".join(map(_LETTERS.__getitem__, content)),)
        return tuple(f"<0x{byte:02X}>" for byte in content)

    def decode_strings(self, tokens: list[str]) -> str:
        """Return the text of tokens, as their vocabulary has them."""
        decoder = self._plain.decoder
        text: str = decoder.decode(tokens) if decoder is not None else " ".join(tokens)
        return text


def _decoder_steps(decoder: dict[str, Any] | None) -> list[str]:
    """Return the types of a decoder's steps, in their order."""
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder["type"]]
    return [step for inner in decoder["decoders"] for step in _decoder_steps(inner)]


class Codecs:
    """The tokenizers that were fetched, by fingerprint."""

    def __init__(self) -> None:
        self._codecs: dict[str, Codec | None] = {}

    def has(self, fingerprint: str) -> bool:
        """Whether it was fetched, or is known not to exist."""
        return fingerprint in self._codecs

    def get(self, fingerprint: str) -> Codec | None:
        """Return a fetched tokenizer; None if the model has none.

        Raises:
            LoadingError: It was not fetched yet.
        """
        if fingerprint not in self._codecs:
            raise LoadingError(
                "the tokenizer is being fetched", retry_after_seconds=shortage.RETRY_SECONDS
            )
        return self._codecs[fingerprint]

    async def fetch(self, server: ModelServer) -> None:
        """Fetch the tokenizer of a server's model, unless it is known.

        Raises:
            PacelineError: It could not be fetched or read, or came damaged.
        """
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
            raise InternalError(f"{server.name} sent a tokenizer that is not what it says")
        try:
            self._codecs[fingerprint] = await asyncio.to_thread(Codec, tokenizer_json)
        except Exception as error:  # of the library, which has no class of its own for it
            raise InternalError(f"{server.name}'s tokenizer cannot be read: {error}") from error
