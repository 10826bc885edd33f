"""Panics of libraries that are written in Rust, such as the one that tokenises."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class PanicError(RuntimeError):
    """A library in Rust gave up; what it worked on stays usable."""


@contextmanager
def taking_panics() -> Iterator[None]:
    """Turn a panic into an exception like others.

    The library's own class for it derives from BaseException, so no `except Exception` takes it: it
    would end a task, or a thread, and nobody would be answered.

    Raises:
        PanicError: There was a panic.
    """
    try:
        yield
    except BaseException as error:
        # No module exports the class: each library in Rust has one of its own.
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError(str(error)) from None
