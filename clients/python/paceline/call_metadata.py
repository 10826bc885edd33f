"""The metadata of a client's calls: headers, and the bearer token."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from paceline.errors import InvalidFieldError

Metadata: TypeAlias = Mapping[str, str | bytes]
MetadataSource: TypeAlias = Metadata | Callable[[], Metadata]
Token: TypeAlias = Callable[[], str]
AsyncToken: TypeAlias = Callable[[], str | Awaitable[str]]

Pairs: TypeAlias = tuple[tuple[str, str | bytes], ...]

_NAME = re.compile(r"[0-9a-z_.-]+")
_TEXT = re.compile(r"[ -~]*")  # printable ASCII, as in gRPC's HTTP/2 headers
_TOKEN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class CallMetadata:
    """A client's headers and token, determined for each call.

    Values are never shown in errors: they may be secret.

    Attributes:
        source: The client's metadata, or a function that returns it.
        token: Returns the bearer token.
    """

    source: MetadataSource
    token: AsyncToken | None

    @classmethod
    def of(cls, source: MetadataSource | None, *, token: AsyncToken | None) -> CallMetadata:
        """Check the metadata that is known before a call.

        Raises:
            InvalidFieldError: A name or value cannot be sent.
        """
        if source is not None and not callable(source):
            checked_metadata(source)
        return cls(source or {}, token)

    def pairs(self, own: Pairs) -> Pairs:
        """Return the metadata of a call, its own included.

        Raises:
            InvalidFieldError: A name or value cannot be sent.
        """
        return self._with_token(own, self.token() if self.token is not None else None)

    async def pairs_async(self, own: Pairs) -> Pairs:
        """Return the same; the token may be an awaitable."""
        token = self.token() if self.token is not None else None
        return self._with_token(own, await token if inspect.isawaitable(token) else token)

    def _with_token(self, own: Pairs, token: object) -> Pairs:
        source = self.source() if callable(self.source) else self.source
        pairs = (*checked_metadata(source), *own)
        if self.token is None:
            return pairs
        if not (isinstance(token, str) and _TOKEN.fullmatch(token)):
            raise InvalidFieldError.of("token", "must be printable ASCII without spaces")
        return (*pairs, ("authorization", f"Bearer {token}"))


def checked_metadata(metadata: Metadata | None) -> Pairs:
    """Check metadata, and return it in gRPC's form.

    Raises:
        InvalidFieldError: A name or value cannot be sent.
    """
    return tuple(_checked(name, value) for name, value in (metadata or {}).items())


def _checked(name: str, value: str | bytes) -> tuple[str, str | bytes]:
    lower = name.lower() if isinstance(name, str) else ""
    if not _NAME.fullmatch(lower) or lower.startswith("grpc-"):
        raise InvalidFieldError.of(
            "metadata",
            f"{name!r} is not a metadata name: use letters, digits, - _ . and no prefix grpc-",
        )
    if lower.endswith("-bin") != isinstance(value, bytes):
        raise InvalidFieldError.of(
            "metadata", f"{name}: a name that ends in -bin takes bytes, every other name takes text"
        )
    if isinstance(value, bytes) or (isinstance(value, str) and _TEXT.fullmatch(value)):
        return lower, value
    raise InvalidFieldError.of("metadata", f"{name}: must be printable ASCII")
