"""Panics of libraries that are written in Rust, such as the tokenizer's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class PanicError(RuntimeError):
    """A library in Rust panicked; its objects stay usable."""


@contextmanager
def taking_panics() -> Iterator[None]:
    """Turn a panic into an ordinary exception.

    The library's own class derives from BaseException, so no `except Exception` catches it: a panic
    would end a task or a thread, and callers would get no answer.

    Raises:
        PanicError: There was a panic.
    """
    try:
        yield
    except BaseException as error:
        # No module exports the class: each library in Rust has its own.
        if type(error).__name__ != "PanicException":
            raise
        raise PanicError(str(error)) from None
