"""From a command's options to a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import AsyncClient, Tls

if TYPE_CHECKING:
    from paceline_cli.options import ClientTlsSettings, ConnectionSettings

__all__ = ["open_client", "tls_of"]


def open_client(options: ConnectionSettings) -> AsyncClient:
    """Open a client of the orchestrator that the options name."""
    return AsyncClient(
        options.address,
        tls=tls_of(options),
        insecure=options.insecure,
        timeout=options.timeout_seconds,
    )


def tls_of(options: ClientTlsSettings) -> Tls | None:
    """Return how to trust the server; None is plaintext."""
    if options.tls_authority is None and options.tls_certificate is None:
        return None
    return Tls(
        ca_file=options.tls_authority,
        certificate_file=options.tls_certificate,
        key_file=options.tls_key,
    )
