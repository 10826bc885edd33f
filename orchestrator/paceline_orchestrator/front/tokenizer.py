"""The target's tokenizer: fetched once from a model server, slow work done off the event loop."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from paceline.errors import LoadingError, UnsupportedError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.wire import fetch_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_orchestrator.fleet.server import ModelServer

__all__ = ["Codec", "Codecs"]

_MOST_WORDS = 256  # of what the library says of a tokenizer: it quotes it
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
        """
        tokenizer = self._parsing if parse_special_tokens else self._plain
        (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens; special ones have none."""
        return self._plain.decode(token_ids, skip_special_tokens=True)

    def decode_many(self, token_ids: Sequence[int]) -> str:
        """Do the same, and let other threads run meanwhile, which costs more for a few tokens."""
        (text,) = self._plain.decode_batch([list(token_ids)], skip_special_tokens=True)
        return text


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
            BadAnswerError: It came damaged, or cannot be read.
            PacelineError: It could not be fetched.
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
        self._codecs[fingerprint] = await asyncio.to_thread(
            _read, tokenizer_json, fingerprint=fingerprint, name=server.name
        )


def _read(tokenizer_json: bytes, *, fingerprint: str, name: str) -> Codec:
    """Read what the server of this name sent; on a thread, for hundreds of megabytes are hashed."""
    if hashlib.sha256(tokenizer_json).hexdigest() != fingerprint:
        raise BadAnswerError(f"{name} sent a tokenizer that is not what it says")
    try:
        return Codec(tokenizer_json)
    # Of the library, which has no class of its own for it; where its own code panics it is no
    # Exception either. Nothing cancels a thread.
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
        raise BadAnswerError(f"{name}'s tokenizer cannot be read: {words}") from error
