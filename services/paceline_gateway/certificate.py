"""A gateway's own certificate: a renewed one is shown from the next connection on."""

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
    """Make what connections are accepted with; the files are looked at again at each handshake.

    Files that do not go together, as in the middle of a renewal, leave it as it was.

    Raises:
        OSError: The files are unusable to begin with.
    """
    files = FollowedFiles([certificate, key], partial(_loaded, certificate, key))
    context = _loaded(certificate, key)

    def show(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = files.content()

    context.sni_callback = show  # called also where the client names no server
    return context


def _loaded(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        for path in (certificate, key):
            # Python's ssl opens paths itself, and would wait for a FIFO's writer.
            read_plain_file(path, most_bytes=MOST_PEM_BYTES)
        # A password, so that an encrypted key does not ask the terminal for one.
        context.load_cert_chain(certificate, key, password="")
    except OSError as error:  # of which ssl's are
        raise OSError(
            f"{certificate} and {key} are no usable certificate and key: {error.strerror or error}"
        ) from error
    return context
