"""Files that are read again when they change, as a mounted secret's do."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

# Reading and parsing so many bytes takes a few milliseconds. Larger files are read on a thread,
# because the caller is often an event loop.
_SHORT_BYTES = 16 * 1024

_T = TypeVar("_T")
_Stamp: TypeAlias = tuple[int, int, int]

_WANTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class FollowedFiles(Generic[_T]):
    """What some files say together; if they break later, what they said before stays in use.

    Nothing watches them: they are looked at whenever somebody asks for their content. Files that
    are broken are logged once, until they change again. Files that cannot be read for want of
    descriptors or memory are not broken: they are read the next time. Large ones are read on a
    thread of their own, and what they said before counts until that is done.

    Args:
        paths: Whose changes count.
        read: Reads them. What it raises is logged: nothing secret.

    Raises:
        InvalidFieldError, OSError, ValueError: They cannot be used to begin with.
    """

    def __init__(self, paths: Sequence[Path | str], read: Callable[[], _T]) -> None:
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._reading: threading.Thread | None = None
        self._stamps: list[_Stamp | None] = self._look()
        self._content = read()

    def content(self) -> _T:
        """Return what they say: the same object until they change."""
        if self._reading is not None and self._reading.is_alive():
            return self._content  # changes since then are noticed after it
        if (stamps := self._look()) != self._stamps:
            self._stamps = stamps
            if sum(each[1] for each in stamps if each is not None) <= _SHORT_BYTES:
                self._take()
            else:
                self._reading = threading.Thread(
                    target=self._take, name="paceline-files", daemon=True
                )
                self._reading.start()
        return self._content

    def _take(self) -> None:
        """Read them; what nobody can use leaves everything as it was."""
        try:
            self._content = self._read()
        except (InvalidFieldError, OSError, ValueError) as error:
            if _is_the_process_own(error):
                self._stamps = []  # other ones than any that are found next
                return
            _log.error("the contents read before stay in use: %s", error)

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _is_the_process_own(error: BaseException) -> bool:
    """Whether a file could not be read for want of what has nothing to do with it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _WANTS:
            return True
        cause = cause.__cause__
    return False


def _stamp(path: Path) -> _Stamp | None:
    """Return what is another for another file, or None where reading would say why."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
