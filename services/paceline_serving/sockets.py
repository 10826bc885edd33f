"""Listening on HOST:PORT where not gRPC does it, and what gRPC does not say where it does."""

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
        OSError: The address cannot be had; says which, and why.
    """
    family, place = _place(address)
    try:
        return socket.create_server(place, family=family, backlog=backlog)
    except OSError as error:
        raise OSError(f"cannot listen on {address}: {_cause(error)}") from error


def bound_address(listener: socket.socket) -> str:
    """Return where a socket listens, as `listen` takes it."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def why_not(address: str) -> str:
    """Say why an address cannot be listened on, of which gRPC says nothing; empty if it can be."""
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
    """Make sure that nobody listens on a socket of a path, while this process begins to.

    gRPC removes the file that is there, whoever listens on it, and makes its own. What a process
    has left that ended without removing it may be replaced so.

    Raises:
        OSError: Somebody listens there, or there is something else than a socket.
    """
    if not address.startswith(_UNIX):
        yield
        return
    path = _path(address)
    with _alone_in(path.parent):
        if _is_listened_on(path):
            raise OSError(f"cannot listen on {address}: another process listens there")
        yield


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Begin one server at a time in a directory: two that look at once would both see nobody."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield  # what is wrong with the directory is said by whoever listens in it
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
            raise OSError(f"cannot listen on {_UNIX}{path}: a file there is not a socket")
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.setblocking(False)
        try:
            knocking.connect(str(path))
        except BlockingIOError:
            return True  # it is there, and has no room for one more
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def _why_no_socket(path: Path) -> str:
    """Try it beside the place: the place itself may be somebody's."""
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
    """Say it in the system's words, without those that Python puts around them."""
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)
