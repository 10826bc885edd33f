"""A gateway's own certificate: the next connection uses a renewed one."""

from __future__ import annotations

import ssl
from functools import partial
from typing import TYPE_CHECKING

from paceline.credentials import MOST_PEM_BYTES
from paceline.followed_files import FollowedFiles
from paceline.plain_files import read_plain_file

if TYPE_CHECKING:
    from pathlib import Path


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Make the TLS context of connections; each handshake looks at the files again.

    While the files do not match, as in the middle of a renewal, the certificate before stays.

    Raises:
        OSError: The files are unusable at the start.
    """
    files = FollowedFiles([certificate, key], partial(_loaded, certificate, key))
    context = _loaded(certificate, key)

    def show(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = files.content()

    context.sni_callback = show  # also called if the client names no server
    return context


def _loaded(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for path in (certificate, key):
            # Python's ssl opens paths itself, and would wait for a FIFO's writer.
            read_plain_file(path, most_bytes=MOST_PEM_BYTES)
        # A password, so that an encrypted key does not ask the terminal for one.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # also ssl's errors
        raise OSError(
            f"{certificate} and {key} are no usable certificate and key: {error.strerror or error}"
        ) from error
    return context
