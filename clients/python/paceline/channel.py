"""Connections to a server: TLS, and transport settings that notice a dead peer."""

from __future__ import annotations

import ipaddress
import ssl
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import grpc

__all__ = ["ChannelOptions", "Route", "Tls", "is_loopback", "open_async_channel"]

_Options: TypeAlias = "tuple[tuple[str, int | str], ...]"
ChannelOptions: TypeAlias = "Sequence[tuple[str, int | str]]"

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
# All that a name leads to are connected to, and take turns.
_SPREAD_OPTIONS: _Options = (("grpc.lb_policy_name", "round_robin"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How to trust the server, and how to be trusted by it (mTLS): PEM, in files or as bytes.

    Attributes:
        ca_file: Whom to trust. Default: the system's certificate authorities.
        certificate_file: The client's own certificate, for mTLS.
        key_file: Its private key.
        server_name: The name in the server's certificate, where it is not the address's.
        ca: What a ca_file would hold.
        certificate: What a certificate_file would hold.
        key: What a key_file would hold.
    """

    ca_file: Path | str | None = None
    certificate_file: Path | str | None = None
    key_file: Path | str | None = None
    server_name: str | None = None
    ca: bytes | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Route:
    """A checked way to a server: channels over it can be opened at any time, by any event loop.

    Attributes:
        leads_to_one: Whether one server is there; a name can lead to several.
    """

    address: str
    credentials: grpc.ChannelCredentials | None
    options: _Options
    leads_to_one: bool

    @classmethod
    def to(
        cls,
        address: str,
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        channel_options: ChannelOptions = (),
    ) -> Route:
        """Check everything that can be checked without connecting.

        Raises:
            InvalidFieldError: The address is malformed, a TLS file is unusable, or the connection
                would be plaintext off loopback and `insecure` does not allow that.
        """
        local = is_loopback(address)
        options = dict(_LOOPBACK_OPTIONS if local else _OPTIONS)
        leads_to_one = _leads_to_one(address)
        if not leads_to_one:
            options.update(_SPREAD_OPTIONS)
        options.update(channel_options)
        if tls is None:
            if not (local or insecure):
                raise InvalidFieldError.of(
                    "address",
                    f"{address} is not on this machine and there is no TLS: "
                    "give TLS options, or say insecure to allow plaintext",
                )
            return cls(address, None, tuple(options.items()), leads_to_one)
        if tls.server_name:
            options["grpc.ssl_target_name_override"] = tls.server_name
        return cls(address, _credentials(tls), tuple(options.items()), leads_to_one)

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
    return _is_socket(address) or all(_is_loopback_host(host) for host in _hosts(address))


def _leads_to_one(address: str) -> bool:
    """Whether a gRPC target is one server: a socket, or one IP address."""
    if _is_socket(address):
        return True
    hosts = _hosts(address)
    return len(hosts) == 1 and (hosts[0] == "localhost" or _ip(hosts[0]) is not None)


def _is_socket(address: str) -> bool:
    return address.startswith(("unix:", "unix-abstract:"))


def _hosts(address: str) -> list[str]:
    """Return the hosts of a gRPC target's endpoints.

    Raises:
        InvalidFieldError: An endpoint has no port, or there is none.
    """
    scheme, colon, rest = address.partition(":")
    if scheme in {"dns", "ipv4", "ipv6", "passthrough"} and colon:
        address = rest.rpartition("/")[2]
    return [_host(endpoint) for endpoint in address.split(",")]


def _credentials(tls: Tls) -> grpc.ChannelCredentials:
    import grpc

    has_certificate = tls.certificate_file is not None or tls.certificate is not None
    if has_certificate != (tls.key_file is not None or tls.key is not None):
        raise InvalidFieldError.of("tls", "a certificate and its key belong together")
    authorities = _content("ca", path=tls.ca_file, content=tls.ca)
    certificate = _content("certificate", path=tls.certificate_file, content=tls.certificate)
    key = _content("key", path=tls.key_file, content=tls.key)
    _check_authorities(tls, authorities)
    if certificate is not None and key is not None:
        _check_own(tls, certificate, key)
    return grpc.ssl_channel_credentials(
        root_certificates=authorities, private_key=key, certificate_chain=certificate
    )


def _check_authorities(tls: Tls, authorities: bytes | None) -> None:
    """Refuse what TLS cannot use: gRPC would try to connect with it, again and again."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if authorities is not None:
            context.load_verify_locations(cadata=authorities.decode(errors="replace"))
    except (ssl.SSLError, ValueError) as error:
        what = f"{tls.ca_file}: " if tls.ca_file is not None else ""
        field_name = "tls.ca_file" if tls.ca_file is not None else "tls.ca"
        raise InvalidFieldError.of(field_name, f"{what}has no usable certificate") from error


def _check_own(tls: Tls, certificate: bytes, key: bytes) -> None:
    """Refuse a certificate and a key that TLS cannot use, or that do not go together."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        with _as_files(certificate, key) as (own, private):
            # A password, so that an encrypted key does not ask the terminal for one.
            context.load_cert_chain(own, private, password="")
    except (ssl.SSLError, ValueError) as error:
        from_file = tls.certificate_file is not None
        what = f"{tls.certificate_file} and {tls.key_file}: " if from_file else ""
        raise InvalidFieldError.of(
            "tls.certificate_file" if from_file else "tls.certificate",
            f"{what}are no usable certificate and key",
        ) from error


@contextmanager
def _as_files(*contents: bytes) -> Iterator[list[Path]]:
    """Lend files that only this user can read: Python's ssl takes no other."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{index}.pem") for index in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.touch(mode=0o600)
            path.write_bytes(content)
        yield paths


def _content(name: str, *, path: Path | str | None, content: bytes | None) -> bytes | None:
    if path is None:
        if not isinstance(content, bytes | None):
            raise InvalidFieldError.of(f"tls.{name}", "must be bytes; a path goes into the file's")
        return content
    if content is not None:
        raise InvalidFieldError.of(f"tls.{name}", f"is there, and {name}_file too: give one")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidFieldError.of(f"tls.{name}_file", f"{path}: {error.strerror}") from error


def _host(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidFieldError.of("address", f"{endpoint!r} must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]")


def _is_loopback_host(host: str) -> bool:
    ip = _ip(host)  # None for a name: where it leads to is not ours to know
    return host == "localhost" or (ip is not None and ip.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
