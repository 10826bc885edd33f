"""Transport security: TLS on both ends, roles by certificate, plaintext on this machine only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from paceline.channel import is_loopback
from paceline.credentials import MOST_PEM_BYTES, Credentials, Tls
from paceline.errors import InvalidFieldError, PermissionDeniedError
from paceline.plain_files import read_plain_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

ROLES = frozenset({"client", "operator", "orchestrator"})

# The roles that may call each service. A service that is not listed cannot be called.
_ROLES_OF_SERVICE: Mapping[str, frozenset[str]] = {
    "grpc.health.v1.Health": ROLES,
    "grpc.reflection.v1alpha.ServerReflection": frozenset({"operator"}),
    "paceline.v1.CallService": frozenset({"operator", "orchestrator"}),
    "paceline.v1.DrafterService": frozenset({"operator", "orchestrator"}),
    "paceline.v1.ModelService": frozenset({"operator", "orchestrator"}),
    "paceline.v1.OrchestratorService": frozenset({"client", "operator"}),
    "paceline.v1.SessionService": frozenset({"operator", "orchestrator"}),
    "paceline.v1.TargetService": frozenset({"operator", "orchestrator"}),
}


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection.

    Attributes:
        certificate: This end's certificate chain; a server needs one, a client only for mTLS.
        key: Its private key.
        authority: The certificates that the other end's must descend from. On a server it turns
            mTLS on; on a client None means the system's.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """Load a server's credentials; None, which is plaintext, if there is no certificate.

    Certificates are short-lived: each handshake looks at the files again, so a renewed certificate
    is used without a restart.

    Raises:
        OSError: a file cannot be read.
    """
    if files.certificate is None:
        return None
    loaded = _server_configuration(files)
    stamp = _stamp(files)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal stamp
        try:
            if (now := _stamp(files)) == stamp:
                return None
            configuration = _server_configuration(files)
        except OSError:  # in the middle of a renewal: go on with the old, look again next time
            return None
        stamp = now
        return configuration

    return grpc.dynamic_ssl_server_credentials(
        loaded,
        renewed,  # type: ignore[arg-type]  # None is "no change", which the stubs do not know
        require_client_authentication=files.authority is not None,
    )


def channel_credentials(files: TlsFiles | None) -> Credentials | None:
    """Load a client's credentials, which follow the files; None, which is plaintext, for None.

    Raises:
        ValueError: a file is unusable.
    """
    if files is None:
        return None
    tls = Tls(ca_file=files.authority, certificate_file=files.certificate, key_file=files.key)
    try:
        return Credentials(tls)
    except InvalidFieldError as error:
        raise ValueError(error.message) from error


def refuse_plaintext(address: str, *, flag: str) -> None:
    """Refuse an address that other machines can reach, for a connection without TLS.

    Args:
        address: The address to listen on, or to connect to.
        flag: The option that would allow it, for the message.

    Raises:
        ValueError: the address is not on this machine's loopback.
    """
    if not is_loopback(address):
        raise ValueError(
            f"{address} is reachable from other machines, so it needs TLS; {flag} allows plaintext"
        )


def peer_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Name a peer as its certificate does; empty without one.

    The name is the same for a renewed certificate, and for all replicas that share an identity.
    """
    for key in ("peer_spiffe_id", "x509_subject_alternative_name", "x509_common_name"):
        if names := [name.decode(errors="replace") for name in auth_context.get(key, ())]:
            return ",".join(sorted(names))
    return ""


class AccessPolicy:
    """The roles that peers have by the SPIFFE id in their certificate. Deny by default.

    Args:
        role_of_peer: SPIFFE id (a URI) to one of ROLES.
        roles_of_service: Full name of a service to the roles that may call it.
    """

    def __init__(
        self,
        role_of_peer: Mapping[str, str],
        *,
        roles_of_service: Mapping[str, frozenset[str]] = _ROLES_OF_SERVICE,
    ) -> None:
        self._role_of_peer = dict(role_of_peer)
        self._roles_of_service = roles_of_service

    def check(self, service: str, auth_context: Mapping[str, Iterable[bytes]]) -> None:
        """Check that a peer may call a service.

        Raises:
            PermissionDeniedError: The peer's certificate gives it no role that may.
        """
        allowed = self._roles_of_service.get(service, frozenset())
        for identity in auth_context.get("peer_spiffe_id", ()):
            if self._role_of_peer.get(identity.decode(errors="replace")) in allowed:
                return
        raise PermissionDeniedError(f"the certificate's SPIFFE id may not call {service}")

    @staticmethod
    def require_known(services: Iterable[str]) -> None:
        """Refuse to serve a service that the table does not list.

        Raises:
            ValueError: a service has no row, so every call would be denied.
        """
        for service in services:
            if service not in _ROLES_OF_SERVICE:
                raise ValueError(f"{service} has no row in the table of roles")


def _server_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    assert files.key is not None, "ServerTlsSettings demands both"
    assert files.certificate is not None, "ServerTlsSettings demands both"
    return grpc.ssl_server_certificate_configuration(
        [(_pem(files.key), _pem(files.certificate))],
        root_certificates=_pem(files.authority) if files.authority is not None else None,
    )


def _stamp(files: TlsFiles) -> tuple[int, ...]:
    return tuple(
        path.stat().st_mtime_ns
        for path in (files.certificate, files.key, files.authority)
        if path is not None
    )


def _pem(path: Path) -> bytes:
    return read_plain_file(path, most_bytes=MOST_PEM_BYTES)
