"""Who may call: a file of hashed keys with names and limits, read again when it changes.

    - name: alice
      sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
      requests_at_once: 8
      tokens_per_minute: 60000

A key is a long random word, so a plain hash keeps it secret. Neither keys nor hashes are logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["Caller", "Key", "Keys"]

_log = logging.getLogger(__name__)

_Stamp = tuple[int, int, int]


class Key(BaseModel):
    """One entry of the file; what is left out is not limited."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    requests_at_once: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


class Caller:
    """Who has a key, and what of its limits is used.

    Args:
        key: Its entry.
        clock: A monotonic clock, in seconds.

    Attributes:
        key: Its entry, as the file says now.
    """

    def __init__(self, key: Key, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._clock = clock
        self._running = 0
        self._spent = 0.0  # tokens that the minute has not given back yet
        self._seen = clock()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request in.

        Raises:
            RequestError: The key's limit is reached; says when to come back.
        """
        most = self.key.requests_at_once
        if most is not None and self._running >= most:
            raise _too_much(f"{self._running} requests of this key are running", seconds=1.0)
        self._give_back()
        rate = self.key.tokens_per_minute
        if rate is not None and self._spent >= rate:
            words = f"this key's {rate} tokens per minute are spent"
            raise _too_much(words, seconds=(self._spent - rate + 1) * 60 / rate)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def charge(self, token_count: int) -> None:
        """Count tokens of a prompt or of a text; what runs goes on beyond the limit."""
        self._give_back()
        self._spent += token_count

    def _give_back(self) -> None:
        now = self._clock()
        rate = self.key.tokens_per_minute or 0
        self._spent = max(0.0, self._spent - (now - self._seen) * rate / 60)
        self._seen = now


class Keys:
    """All keys of a file.

    Raises:
        ValueError: The file cannot be read, or is no list of keys.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._callers: dict[str, Caller] = {}
        self._stamp: _Stamp = self._look()
        self._take(self._read())

    def find(self, authorization: str) -> Caller:
        """Return whose key it is, in a time that does not tell how near a wrong one came.

        Raises:
            RequestError: It is nobody's.
        """
        self._refresh()
        scheme, _, word = authorization.partition(" ")
        digest = hashlib.sha256(word.strip().encode()).hexdigest()
        found = None
        for caller in self._callers.values():
            if hmac.compare_digest(caller.key.sha256, digest):
                found = caller
        if scheme.lower() != "bearer" or found is None:
            words = "the API key is wrong" if authorization else "an API key is needed"
            error = RequestError(
                f"{words}: send it as `Authorization: Bearer KEY`",
                status=401,
                code="invalid_api_key",
            )
            error.headers["www-authenticate"] = "Bearer"
            raise error
        return found

    def _refresh(self) -> None:
        """Take a changed file; a broken one leaves the keys as they are."""
        try:
            if (stamp := self._look()) == self._stamp:
                return
            self._stamp = stamp
            self._take(self._read())
        except ValueError as error:
            _log.error("the keys stay as they were: %s", error)

    def _look(self) -> _Stamp:
        try:
            found = self._path.stat()
        except OSError as error:
            raise ValueError(f"{self._path}: {error.strerror}") from error
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> list[Key]:
        try:
            content = yaml.safe_load(self._path.read_text(encoding="utf-8"))
            keys = TypeAdapter(list[Key]).validate_python(content)
        except ValidationError as error:
            problem = error.errors(include_input=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{self._path}: {place}: {problem['msg']}") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{self._path}: not readable as YAML") from error
        names = [key.name for key in keys]
        if len(set(names)) < len(names):
            raise ValueError(f"{self._path}: two keys have the same name")
        return keys

    def _take(self, keys: list[Key]) -> None:
        """Use these from now on; who stays keeps what is used of its limits."""
        before, self._callers = self._callers, {}
        for key in keys:
            caller = before.get(key.name) or Caller(key)
            caller.key = key
            self._callers[key.name] = caller


def _too_much(message: str, *, seconds: float) -> RequestError:
    return RequestError(
        message,
        status=429,
        kind="requests",
        code="rate_limit_exceeded",
        retry_after_seconds=seconds,
    )
