"""The API keys of allowed callers: a file of hashes, names and limits, read when it changes.

    - name: alice
      sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
      requests_at_once: 8
      tokens_per_minute: 60000

HTTP and gRPC use the same keys: `authorization: Bearer KEY`, as a header or as metadata. A key is a
long random word, so a plain hash keeps it secret. Neither keys nor hashes are logged.
"""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from paceline.errors import OverloadedError, UnauthenticatedError
from paceline.followed_files import FollowedFiles
from paceline.plain_files import read_plain_file
from paceline_serving.plain_yaml import MOST_YAML_BYTES, parse_yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from paceline.errors import PacelineError

HEADER = "authorization"

_T = TypeVar("_T")

_SCHEME = "Bearer"
_MOST_KEY_BYTES = 64 * 1024  # of one key; HTTP servers limit headers to less
_WORD = re.compile(r"[!-~]+")
# The error metadata of a limit that is the key's, not the server's.
_OWN_LIMIT = {"limit": "key"}
_caller: ContextVar[Caller | None] = ContextVar("paceline_caller", default=None)


class Key(BaseModel):
    """One entry of the file; a limit that is left out does not apply."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_at_once: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


class Caller:
    """The holder of a key, with the used part of its limits.

    Args:
        key: The key's entry.
        clock: A monotonic clock, in seconds.

    Attributes:
        key: The key's entry in the file's current version.
    """

    def __init__(self, key: Key, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._running = 0
        self._spent = 0.0  # tokens that time has not given back yet
        self._seen = clock()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in.

        Raises:
            OverloadedError: The key's limit is reached; the error has the time of a retry.
        """
        most = self.key.requests_at_once
        if most is not None and self._running >= most:
            raise OverloadedError(
                f"{self._running} requests of this key are running",
                metadata=dict(_OWN_LIMIT),
                retry_after_seconds=1.0,
            )
        self._give_back()
        rate = self.key.tokens_per_minute
        if rate is not None and self._spent >= rate:
            raise OverloadedError(
                f"this key's {rate} tokens per minute are used up",
                metadata=dict(_OWN_LIMIT),
                retry_after_seconds=(self._spent - rate + 1) * 60 / rate,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def charge(self, token_count: int) -> None:
        """Count tokens of a prompt or of a text; running requests may exceed the limit."""
        self._give_back()
        if self.key.tokens_per_minute is not None:
            self._spent += token_count

    def _give_back(self) -> None:
        """Give back tokens for the time that passed; without a limit none are used."""
        now, rate = self._clock(), self.key.tokens_per_minute
        given_back = self._spent if rate is None else (now - self._seen) * rate / 60
        self._spent = max(0.0, self._spent - given_back)
        self._seen = now


def _follow(path: Path, parse: Callable[[str], _T], *, most_bytes: int) -> FollowedFiles[_T]:
    """Follow a file's content. If the file breaks later, the content stays, and the log says so.

    Args:
        parse: Reads the text. The text of its ValueErrors is logged: it must have no secrets.
        most_bytes: The largest allowed size.

    Raises:
        ValueError: The file cannot be read; the text names it.
    """
    return FollowedFiles([path], partial(_parsed, path, parse, most_bytes=most_bytes))


def _parsed(path: Path, parse: Callable[[str], _T], *, most_bytes: int) -> _T:
    try:
        text = read_plain_file(path, most_bytes=most_bytes).decode()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not readable as UTF-8") from None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


class Keys:
    """All keys of a file.

    Raises:
        ValueError: The file cannot be read, or is not a list of keys.
    """

    def __init__(self, path: Path) -> None:
        self._file = _follow(path, _parse, most_bytes=MOST_YAML_BYTES)
        self._entries: list[Key] = []
        self._callers: dict[str, Caller] = {}  # by name
        self._by_digest: dict[str, Caller] = {}
        self._refresh()

    def find(self, authorization: str) -> Caller:
        """Return a key's holder.

        Cost: the same for one key and for 25,000; it is asked for on the event loop.

        Raises:
            UnauthenticatedError: The key is missing or wrong.
        """
        self._refresh()
        word = key_in(authorization)
        # A look-up's time tells of the key's hash alone, of which nobody can choose a part.
        found = self._by_digest.get(hashlib.sha256((word or "").encode()).hexdigest())
        if word is None or found is None:
            words = "the API key is wrong" if authorization else "an API key is missing"
            raise UnauthenticatedError(f"{words}: send it as `{HEADER}: {_SCHEME} KEY`")
        return found

    def enter(self, authorization: str) -> None:
        """Make the key's holder the current caller, for the rest of a call.

        Raises:
            UnauthenticatedError: The key is missing or wrong.
        """
        _caller.set(self.find(authorization))

    def _refresh(self) -> None:
        """Take the file's current entries; keys that stay keep the used part of their limits."""
        entries = self._file.content()
        if entries is self._entries:
            return
        before, self._entries, self._callers = self._callers, entries, {}
        for key in entries:
            caller = before.get(key.name) or Caller(key)
            caller.key = key
            self._callers[key.name] = caller
        self._by_digest = {caller.key.sha256: caller for caller in self._callers.values()}


def current_caller() -> Caller | None:
    """Return the caller of the call that is being served; None if no keys are needed."""
    return _caller.get()


def counted_reason(error: PacelineError) -> str:
    """Return the reason to count an error by; a key's own limit is not the server's overload."""
    return "KEY_LIMIT" if error.metadata.get("limit") == "key" else error.reason


def key_in(authorization: str) -> str | None:
    """Return the key in an `authorization`; None if its scheme is not Bearer, in any case."""
    scheme, _, word = authorization.partition(" ")
    return word.strip() if scheme.lower() == _SCHEME.lower() else None


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the `authorization` of a call's metadata; empty if there is none.

    Raises:
        UnauthenticatedError: There are two: a proxy before this process may have checked the
            other one.
    """
    found = [value for name, value in metadata or () if name == HEADER]
    if len(found) > 1:
        raise UnauthenticatedError(f"there is more than one `{HEADER}`: send one key")
    return found[0] if found and isinstance(found[0], str) else ""


def follow_key(path: Path) -> Callable[[], str]:
    """Return a function that returns the key in a file, with which this process calls others.

    Raises:
        ValueError: The file cannot be read, or has no key.
    """
    return _follow(path, _parse_key, most_bytes=_MOST_KEY_BYTES).content


def _parse(text: str) -> list[Key]:
    try:
        keys = TypeAdapter(list[Key]).validate_python(parse_yaml(text))
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{place}: {problem['msg']}") from None
    names = [key.name for key in keys]
    if len(set(names)) < len(names):
        raise ValueError("two keys have the same name")
    return keys


def _parse_key(text: str) -> str:
    word = text.strip()
    if not _WORD.fullmatch(word):
        raise ValueError("must hold one key: printable ASCII without spaces")
    return word
