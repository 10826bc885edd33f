"""Connections to a server: TLS, and transport settings that notice a dead peer."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    import grpc

__all__ = ["Route", "Tls", "is_loopback", "open_async_channel"]

_Options: TypeAlias = "tuple[tuple[str, int | str], ...]"

# A frozen peer is noticed in about 25 s: without ping_timeout_ms keepalive alone does not bound it.
# A server that comes back is found again within half a second. min_reconnect_backoff_ms is, despite
# its name, the limit of a connection attempt, TLS and the first HTTP/2 frame included: 10 s are
# four round trips of 600 ms and two lost packets. The receive limit has room for the timeline of a
# long request.
_OPTIONS: _Options = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # Else a new channel would go on with the connection of the one before.
    ("grpc.use_local_subchannel_pool", 1),
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


@dataclass(frozen=True, slots=True)
class Route:
    """A checked way to a server: channels over it can be opened at any time, by any event loop."""

    address: str
    credentials: grpc.ChannelCredentials | None
    options: _Options

    @classmethod
    def to(cls, address: str, *, tls: Tls | None = None, insecure: bool = False) -> Route:
        """Check everything that can be checked without connecting.

        Raises:
            InvalidFieldError: The address is malformed, a TLS file is unusable, or the connection
                would be plaintext off loopback and `insecure` does not allow that.
        """
        local = is_loopback(address)
        options: _Options = _LOOPBACK_OPTIONS if local else _OPTIONS
        if tls is None:
            if not (local or insecure):
                raise InvalidFieldError.of(
                    "address",
                    f"{address} is not on this machine and there is no TLS: "
                    "give TLS options, or say insecure to allow plaintext",
                )
            return cls(address, None, options)
        if tls.server_name:
            options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
        return cls(address, _credentials(tls), options)

    def open(self) -> grpc.Channel:
        """Open a channel; the connection itself is made by the first call."""
        import grpc

        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=self.options)
        return grpc.secure_channel(self.address, self.credentials, options=self.options)

    def open_async(self) -> grpc.aio.Channel:
        """Open a channel for the running event loop."""
        import grpc.aio

        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, options=self.options)
        return grpc.aio.secure_channel(self.address, self.credentials, options=self.options)


def open_async_channel(
    address: str, *, tls: Tls | None = None, insecure: bool = False
) -> grpc.aio.Channel:
    """Open a channel for the running event loop; see `Route.to`."""
    return Route.to(address, tls=tls, insecure=insecure).open_async()


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


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    import grpc

    if (tls.certificate_file is None) != (tls.key_file is None):
        raise InvalidFieldError.of("tls", "certificate_file and key_file belong together")
    authorities = _read("tls.ca_file", tls.ca_file)
    certificate = _read("tls.certificate_file", tls.certificate_file)
    key = _read("tls.key_file", tls.key_file)
    _check_pem(tls, authorities)
    return grpc.ssl_channel_credentials(
        root_certificates=authorities, private_key=key, certificate_chain=certificate
    )


def _check_pem(tls: Tls, authorities: bytes | None) -> None:
    """Refuse what TLS cannot use: gRPC would try to connect with it, again and again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if authorities is not None:
            context.load_verify_locations(cadata=authorities.decode(errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidFieldError.of(
            "tls.ca_file", f"{tls.ca_file}: has no usable certificate"
        ) from error
    try:
        if tls.certificate_file is not None:
            # A password, so that an encrypted key does not ask the terminal for one.
            context.load_cert_chain(tls.certificate_file, tls.key_file, password="")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidFieldError.of(
            "tls.certificate_file",
            f"{tls.certificate_file} and {tls.key_file}: are no usable certificate and key",
        ) from error


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
