"""A file that is read again when it changes, as a mounted secret does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FollowedFile"]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


class FollowedFile(Generic[_T]):
    """What a file says now; one that breaks later leaves it as it was, and the log says so.

    Args:
        parse: Reads its text. What it raises a ValueError with is logged: nothing secret.

    Raises:
        ValueError: It cannot be read; names the file.
    """

    def __init__(self, path: Path, parse: Callable[[str], _T]) -> None:
        self._path = path
        self._parse = parse
        self._stamp = self._look()
        self._content = self._read()

    def content(self) -> _T:
        """Return what it says: the same object until it changes."""
        try:
            if (stamp := self._look()) != self._stamp:
                self._stamp = stamp
                self._content = self._read()
        except ValueError as error:
            _log.error("what was read before stays in use: %s", error)
        return self._content

    def _look(self) -> tuple[int, int, int] | None:
        """Return what is another for another file, or None where reading would say why."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino)

    def _read(self) -> _T:
        try:
            text = self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{self._path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ValueError(f"{self._path}: not readable as UTF-8") from None
        try:
            return self._parse(text)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None
