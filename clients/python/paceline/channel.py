"""Connections to a server: TLS, and transport settings that notice a dead peer."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    import grpc

__all__ = ["Tls", "is_loopback", "open_async_channel", "open_channel"]

# A frozen peer is noticed in about 25 s: without ping_timeout_ms keepalive alone does not bound it.
# A server that comes back is found again within half a second. The receive limit has room for the
# timeline of a long request.
_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
_LOOPBACK_OPTIONS = (*_OPTIONS, ("grpc.enable_http_proxy", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How to trust the server, and how to be trusted by it (mTLS); the files are PEM.

    Attributes:
        ca_file: Whom to trust. Default: the system's certificate authorities.
        certificate_file: The client's own certificate, for mTLS.
        key_file: Its private key.
        server_name: The name in the server's certificate, where it is not the address's.
    """

    ca_file: Path | str | None = None
    certificate_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None


def open_async_channel(
    address: str, *, tls: Tls | None = None, insecure: bool = False
) -> grpc.aio.Channel:
    """Open a channel for asyncio; the connection itself is made by the first call.

    Raises:
        InvalidFieldError: The address is malformed, a TLS file cannot be read, or the connection
            would be plaintext off loopback and `insecure` does not allow that.
    """
    import grpc.aio

    credentials, options = _check(address, tls=tls, insecure=insecure)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_channel(address: str, *, tls: Tls | None = None, insecure: bool = False) -> grpc.Channel:
    """Open a channel; see `open_async_channel`."""
    import grpc

    credentials, options = _check(address, tls=tls, insecure=insecure)
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def is_loopback(address: str) -> bool:
    """Whether every endpoint of a gRPC target is on this machine.

    Raises:
        InvalidFieldError: An endpoint has no port, or there is none.
    """
    scheme, colon, rest = address.partition(":")
    if scheme in {"unix", "unix-abstract"} and colon:
        return True
    if scheme in {"dns", "ipv4", "ipv6", "passthrough"} and colon:
        address = rest.rpartition("/")[2]
    return all(_is_loopback_host(_host(endpoint)) for endpoint in address.split(","))


def _check(
    address: str, *, tls: Tls | None, insecure: bool
) -> tuple[grpc.ChannelCredentials | None, tuple[tuple[str, int | str], ...]]:
    local = is_loopback(address)
    options: tuple[tuple[str, int | str], ...] = _LOOPBACK_OPTIONS if local else _OPTIONS
    if tls is None:
        if not (local or insecure):
            raise InvalidFieldError.of(
                "address",
                f"{address} is not on this machine and there is no TLS: "
                "give TLS options, or say insecure to allow plaintext",
            )
        return None, options
    if tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return _credentials(tls), options


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    import grpc

    if (tls.certificate_file is None) != (tls.key_file is None):
        raise InvalidFieldError.of("tls", "certificate_file and key_file belong together")
    return grpc.ssl_channel_credentials(
        root_certificates=_read("tls.ca_file", tls.ca_file),
        private_key=_read("tls.key_file", tls.key_file),
        certificate_chain=_read("tls.certificate_file", tls.certificate_file),
    )


def _read(field: str, path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidFieldError.of(field, f"{path}: {error.strerror}") from error


def _host(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidFieldError.of("address", f"{endpoint!r} must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]")


def _is_loopback_host(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: where it leads to is not ours to know
