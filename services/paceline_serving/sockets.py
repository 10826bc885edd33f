"""Listens on HOST:PORT without gRPC, and finds the causes that gRPC's listening does not report."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_UNIX = "unix:"
# Another server that begins in the same directory needs some milliseconds.
_CLAIM_SECONDS, _CLAIM_AGAIN_SECONDS = 1.0, 0.02


def listen(address: str, *, backlog: int | None = None) -> socket.socket:
    """Listen on HOST:PORT or [IPV6]:PORT; port 0 is any free one.

    Raises:
        OSError: The process cannot listen on the address; the text says which, and why.
    """
    family, place = _place(address)
    try:
        return socket.create_server(place, family=family, backlog=backlog)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {_cause(error)}") from error


def bound_address(listener: socket.socket) -> str:
    """Return a socket's address, in the form that `listen` takes."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_not(address: str) -> str:
    """Say why the process cannot listen on an address, since gRPC does not; empty if it can."""
    if address.startswith(_UNIX):
        return _why_no_socket(_path(address))
    family, place = _place(address)
    try:
        socket.create_server(place, family=family).close()
    except OSError as error:
        return _cause(error)
    return ""


@contextmanager
def claimed(address: str) -> Iterator[None]:
    """Make sure that no process listens on a socket file while this process begins to.

    gRPC removes an existing file and makes its own, even if another process listens on it. A file
    that an ended process has left may be replaced.

    Raises:
        OSError: Another process listens there, or the file is not a socket, or cannot be looked at.
    """
    if not address.startswith(_UNIX):
        yield
        return
    path = _path(address)
    with _alone_in(path.parent):
        try:
            is_taken = _is_listened_on(path)
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {_cause(error)}") from error
        if is_taken:
            raise OSError(f"cannot listen on {address}: another process listens there")
        yield


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Begin one server at a time in a directory: two at once would not see each other."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield  # an unusable directory is reported by the listening itself
        return
    try:
        until = time.monotonic() + _CLAIM_SECONDS
        while not _locks(descriptor) and time.monotonic() < until:
            time.sleep(_CLAIM_AGAIN_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _locks(descriptor: int) -> bool:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _is_listened_on(path: Path) -> bool:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError("a file there is not a socket")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.setblocking(False)
        try:
            knocking.connect(str(path))
        except BlockingIOError:
            return True  # a listener is there, and its backlog is full
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def _why_no_socket(path: Path) -> str:
    """Find out by a socket beside the path: the path itself may be in use."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with socket.socket(socket.AF_UNIX) as tried:
            tried.bind(str(beside))
    except OSError as error:
        return _cause(error)
    finally:
        with suppress(OSError):
            beside.unlink()
    return ""


def _path(address: str) -> Path:
    path = address.removeprefix(_UNIX)
    return Path(path.removeprefix("//"))


def _place(address: str) -> tuple[socket.AddressFamily, tuple[str, int]]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return family, (host, int(port))


def _cause(error: OSError) -> str:
    """Return the system's words, without Python's words around them."""
    if not error.errno or error.errno < 0:  # a name that leads nowhere
        return (error.strerror or str(error)).partition(" (while ")[0]
    return os.strerror(error.errno)
