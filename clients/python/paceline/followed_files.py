"""Files that are read again when they change, such as a mounted secret's."""

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
    """The content of some files; if they break later, the content before stays in use.

    Nothing watches the files: each call of `content` looks at them. Broken files are logged once,
    until they change again. Files that cannot be read because descriptors or memory are used up
    are not broken: they are read the next time. Large files are read on a thread of their own;
    until it is done, the content before counts.

    Args:
        paths: The files.
        read: Reads them. Its exceptions are logged, so they must have nothing secret.

    Raises:
        InvalidFieldError, OSError, ValueError: The files cannot be used at the start.
    """

    def __init__(self, paths: Sequence[Path | str], read: Callable[[], _T]) -> None:
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._reading: threading.Thread | None = None
        self._stamps: list[_Stamp | None] = self._look()
        self._content = read()

    def content(self) -> _T:
        """Return the content: the same object until a file changes."""
        if self._reading is not None and self._reading.is_alive():
            return self._content  # later changes are noticed after it
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
        """Read the files; if they cannot be used, keep the content."""
        try:
            self._content = self._read()
        except (InvalidFieldError, OSError, ValueError) as error:
            if _is_the_process_own(error):
                self._stamps = []  # differs from all that are found next
                return
            _log.error("the contents read before stay in use: %s", error)

    def _look(self) -> list[_Stamp | None]:
        return [_stamp(path) for path in self._paths]


def _is_the_process_own(error: BaseException) -> bool:
    """Whether the cause is this process, not the file: no descriptors, no memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _WANTS:
            return True
        cause = cause.__cause__
    return False


def _stamp(path: Path) -> _Stamp | None:
    """Return a value that differs for another file; None if the file cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)
