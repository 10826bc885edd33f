"""Reads a request's body in bounded time and space.

The limit of a body follows from the orchestrators' limit, which follows from their model's context.
A small body is read without asking the orchestrators; a larger one is not.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ClientCancelledError
from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive

ENCODINGS = ("gzip", "deflate", "identity")
"""The allowed encodings of a body."""

_JSON_KIND = "application/json"
_PART_BYTES = 1 << 18

TOO_SLOW = 408
"""The status for a body that did not arrive in time."""

SMALL_BYTES = 1 << 20
"""The size that is read for every model; a client has `mebibyte_seconds` for each such size."""


@dataclass(frozen=True, slots=True)
class BodyRules:
    """The limits of a body.

    Attributes:
        ceiling_bytes: The largest body for any model.
        most_bytes: Returns the largest body for the model's context.
        keep: Called with the number of bytes before they are kept; raises if there is no room.
        mebibyte_seconds: Most seconds for each mebibyte, also for an incomplete one.
    """

    ceiling_bytes: int
    most_bytes: Callable[[], Awaitable[int]]
    keep: Callable[[int], None]
    mebibyte_seconds: float


def check_kind(headers: Mapping[str, str]) -> None:
    """Check the headers of a body's type and encoding; without them it is plain JSON.

    Raises:
        RequestError: The type is not JSON, or the encoding is not supported.
    """
    kind, _, parameters = headers.get("content-type", _JSON_KIND).partition(";")
    if kind.strip().lower() != _JSON_KIND:
        raise RequestError(
            f"content-type: must be {_JSON_KIND}, not {kind[:100]!r}",
            status=415,
            param="content-type",
        )
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if charset not in {"", "utf-8", "utf8"}:
        raise RequestError(
            f"content-type: JSON is UTF-8, not {parameters[:100]!r}",
            status=415,
            param="content-type",
        )
    if (encoding := _encoding_of(headers)) not in ENCODINGS:
        refusal = RequestError(
            f"content-encoding: must be {', '.join(ENCODINGS)}, not {encoding[:100]!r}",
            status=415,
            param="content-encoding",
        )
        refusal.headers["accept-encoding"] = ", ".join(ENCODINGS)
        raise refusal


async def read_body(receive: Receive, rules: BodyRules, *, headers: Mapping[str, str]) -> bytes:
    """Read a whole body, and inflate it; both sizes are limited.

    Raises:
        RequestError: The body is too large or too slow, or there is no room for it now, or it is
            not compressed as its header says.
        ClientCancelledError: The client left.
        PacelineError: The body is not small, and no orchestrator reported the limit.
    """
    return await _Reader(receive, rules).read(headers)


class _Reader:
    """Reads one body."""

    def __init__(self, receive: Receive, rules: BodyRules) -> None:
        self._receive = receive
        self._rules = rules
        self._limit_bytes = min(SMALL_BYTES, rules.ceiling_bytes)
        self._is_told = False
        self._content = bytearray()
        self._inflater: _Inflater | None = None

    async def read(self, headers: Mapping[str, str]) -> bytes:
        encoding = _encoding_of(headers)
        if encoding != "identity":
            self._inflater = _Inflater(encoding)
        await self._allow(int(headers.get("content-length", "0")))
        received = 0
        seconds = self._rules.mebibyte_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientCancelledError("the client went away")
                    piece: bytes = message.get("body", b"")
                    begun = received // SMALL_BYTES
                    received += len(piece)
                    await self._allow(received)  # a body that inflates to nothing must end, too
                    if more := received // SMALL_BYTES - begun:
                        limit.reschedule((limit.when() or 0.0) + more * seconds)
                    await self._take(piece)
                    if not message.get("more_body"):
                        self._check_end()
                        return bytes(self._content)
        except TimeoutError:
            raise RequestError(
                "the body did not arrive in time", status=TOO_SLOW, code="timeout"
            ) from None

    async def _take(self, piece: bytes) -> None:
        """Keep a piece, inflated part by part; other requests run between two parts."""
        if self._inflater is None:
            await self._keep(piece)
            return
        self._inflater.feed(piece)
        while part := self._inflater.next_part():
            await self._keep(part)
            await asyncio.sleep(0)

    def _check_end(self) -> None:
        if self._inflater is not None and not self._inflater.is_whole:
            raise _broken(self._inflater.encoding)

    async def _keep(self, piece: bytes) -> None:
        await self._allow(len(self._content) + len(piece))
        self._rules.keep(len(piece))
        self._content += piece

    async def _allow(self, byte_count: int) -> None:
        """Refuse a body of so many bytes if it is too large; ask for the limit once."""
        if byte_count > self._rules.ceiling_bytes:
            raise _too_large(self._rules.ceiling_bytes)
        if byte_count > self._limit_bytes and not self._is_told:
            self._limit_bytes = min(await self._rules.most_bytes(), self._rules.ceiling_bytes)
            self._is_told = True
        if byte_count > self._limit_bytes:
            raise _too_large(self._limit_bytes)


class _Inflater:
    """Inflates a body as it arrives, at most one part at a time.

    Attributes:
        encoding: gzip, or deflate: zlib's form, as in the standard, or without its frame, as some
            clients send it.
    """

    def __init__(self, encoding: str) -> None:
        self.encoding = encoding
        self._rest = b""
        self._has_more = False  # after a full part the library may hold more
        self._stream: zlib._Decompress | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the compressed body is complete."""
        return self._stream is not None and self._stream.eof and not self._rest

    def feed(self, piece: bytes) -> None:
        """Add received bytes."""
        self._rest += piece

    def next_part(self) -> bytes:
        """Return the next inflated part; empty if more bytes have to come first.

        Raises:
            RequestError: The body is not compressed as its header says.
        """
        try:
            while self._rest or self._has_more:
                if self._stream is None or self._stream.eof:  # a gzip file may have many members
                    self._stream = zlib.decompressobj(self._window_bits())
                part = self._stream.decompress(self._rest, _PART_BYTES)
                self._has_more = len(part) == _PART_BYTES and not self._stream.eof
                self._rest = self._stream.unconsumed_tail or self._stream.unused_data
                if part:
                    return part
        except zlib.error:
            raise _broken(self.encoding) from None
        return b""

    def _window_bits(self) -> int:
        if self.encoding == "gzip":
            return 16 + zlib.MAX_WBITS
        has_frame = self._rest[0] & 0x0F == zlib.DEFLATED
        return zlib.MAX_WBITS if has_frame else -zlib.MAX_WBITS


def _encoding_of(headers: Mapping[str, str]) -> str:
    """Return a body's encoding; `identity` without a header."""
    named = headers.get("content-encoding", "").strip().lower()
    return {"": "identity", "x-gzip": "gzip"}.get(named, named)


def _broken(encoding: str) -> RequestError:
    return RequestError(
        f"content-encoding: the body is no whole {encoding}", param="content-encoding"
    )


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"the body has more than {limit_bytes} bytes, the most that is taken here",
        status=413,
        code="too_large",
    )
