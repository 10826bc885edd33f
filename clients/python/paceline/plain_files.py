"""Reads regular files of a bounded size whole, and no file on which a reader can hang.

A path comes from settings, or from a folder that a stranger made. It may lead to a FIFO, which
waits for a writer at opening; to a device, which has no end; or to a file larger than memory. So
every file that Paceline reads whole is read by `read_plain_file`.

Symbolic links are followed: mounted secrets and the Hugging Face cache consist of them. The opened
file is checked, not the path, so the file cannot be exchanged between the check and the reading.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import io
    from pathlib import Path


class UnusableFileError(OSError):
    """A file that cannot be read whole; `strerror` says why, and the text names the file, too."""

    def __str__(self) -> str:
        """Name the file, then the fault."""
        return f"{self.filename}: {self.strerror}"


def open_plain_file(
    path: Path | str, *, most_bytes: int | None = None, allow_pipe: bool = False
) -> io.BufferedReader:
    """Open a regular file for reading, without waiting for a writer.

    Args:
        path: The file's path; links are followed.
        most_bytes: The largest allowed size; None: any size.
        allow_pipe: Take a FIFO, too, and wait for its writer.

    Raises:
        UnusableFileError: The file is not regular, or larger.
        OSError: The file cannot be opened.
    """
    # O_NONBLOCK: opening a FIFO returns at once. It changes nothing for a regular file.
    waiting = 0 if allow_pipe else os.O_NONBLOCK
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | waiting)
    except OSError as error:
        # A socket, or a device without a driver, cannot even be opened.
        if error.errno != errno.ENXIO:
            raise
        raise _not_regular(path) from None
    try:
        found = os.fstat(descriptor)
        if not (stat.S_ISREG(found.st_mode) or (allow_pipe and stat.S_ISFIFO(found.st_mode))):
            raise _not_regular(path)
        if most_bytes is not None and found.st_size > most_bytes:
            raise _too_large(path, most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain_file(path: Path | str, *, most_bytes: int, allow_pipe: bool = False) -> bytes:
    """Read a regular file whole.

    Args:
        path: The file's path; links are followed.
        most_bytes: The largest allowed size.
        allow_pipe: Read a FIFO, too, until its writers close it: for a path on a command line,
            where the shell's `<(...)` is a FIFO.

    Raises:
        UnusableFileError: The file is not regular, or larger.
        OSError: The file cannot be read.
    """
    with open_plain_file(path, most_bytes=most_bytes, allow_pipe=allow_pipe) as file:
        # A file may grow while it is read, and files in /proc have a size of 0.
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise _too_large(path, most_bytes)
    return content


def read_plain_text(path: Path | str, *, most_bytes: int, allow_pipe: bool = False) -> str:
    r"""Read a file of UTF-8 whole, as `read_plain_file` does; all its lines end in `\n`.

    Raises:
        UnicodeDecodeError: The file is not UTF-8.
        UnusableFileError: The file is not regular, or larger.
        OSError: The file cannot be read.
    """
    text = read_plain_file(path, most_bytes=most_bytes, allow_pipe=allow_pipe).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _not_regular(path: Path | str) -> UnusableFileError:
    return UnusableFileError(errno.EINVAL, "is not a regular file", str(path))


def _too_large(path: Path | str, most_bytes: int) -> UnusableFileError:
    return UnusableFileError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
