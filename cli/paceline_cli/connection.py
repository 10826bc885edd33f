"""Opens a client by a command's options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import AsyncClient, Tls
from paceline.errors import InvalidFieldError
from paceline_serving.keys import follow_key

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.call_metadata import Token
    from paceline_local.options import CallerSettings, ClientTlsSettings


def open_client(options: CallerSettings) -> AsyncClient:
    """Open a client of the orchestrator that the options name.

    Raises:
        InvalidFieldError: A file that an option names is unusable.
    """
    return AsyncClient(
        options.address,
        tls=tls_of(options),
        insecure=options.insecure,
        timeout=options.timeout_seconds,
        token=_token(options.api_key_file),
    )


def _token(key_file: Path | None) -> Token | None:
    if key_file is None:
        return None
    try:
        return follow_key(key_file)
    except ValueError as error:
        raise InvalidFieldError.of("api_key_file", str(error)) from None


def tls_of(options: ClientTlsSettings) -> Tls | None:
    """Return how to trust the server; None is plaintext."""
    if options.tls_authority is None and options.tls_certificate is None:
        return None
    return Tls(
        ca_file=options.tls_authority,
        certificate_file=options.tls_certificate,
        key_file=options.tls_key,
    )
