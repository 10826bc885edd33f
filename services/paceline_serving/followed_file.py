"""A text file that is read again when it changes, such as a mounted secret."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.followed_files import FollowedFiles
from paceline.plain_files import read_plain_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_T = TypeVar("_T")


class FollowedFile(FollowedFiles[_T], Generic[_T]):
    """A file's content; if the file breaks later, the content stays, and the log says so.

    Args:
        parse: Reads the text. The text of its ValueErrors is logged: it must have no secrets.
        most_bytes: The largest allowed size.

    Raises:
        ValueError: The file cannot be read; the text names it.
    """

    def __init__(self, path: Path, parse: Callable[[str], _T], *, most_bytes: int) -> None:
        super().__init__([path], partial(_parsed, path, parse, most_bytes=most_bytes))


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
