"""Connections to a server: TLS, and transport settings that notice a dead peer."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from paceline.credentials import Credentials
from paceline.errors import InvalidFieldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc

    from paceline.credentials import Tls

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
    # Without it a new channel would use the connection of the channel before.
    ("grpc.use_local_subchannel_pool", 1),
)
_LOOPBACK_OPTIONS = (*_OPTIONS, ("grpc.enable_http_proxy", 0))
# All addresses of a name are connected to, and take turns. DNS is asked again when a connection
# ends. gRPC's default waits 30 s between two queries: new pods would not be found for so long.
_SPREAD_OPTIONS: _Options = (
    ("grpc.lb_policy_name", "round_robin"),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class Route:
    """A checked address with its credentials; any event loop can open channels to it at any time.

    Attributes:
        credentials: The channels' credentials; None: plaintext.
        leads_to_one: Whether one server is at the address; a name can lead to several.
    """

    address: str
    credentials: Credentials | None
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
                    "give TLS options, or allow plaintext with the option insecure (on a command"
                    " line --insecure)",
                )
            return cls(address, None, options=tuple(options.items()), leads_to_one=leads_to_one)
        if tls.server_name:
            options["grpc.ssl_target_name_override"] = tls.server_name
        return cls(
            address,
            Credentials(tls),
            options=tuple(options.items()),
            leads_to_one=leads_to_one,
        )

    def renewal(self) -> Callable[[], bool]:
        """Return a function that says whether the current credentials were renewed since."""
        credentials = self.credentials
        if credentials is None:
            return lambda: False
        used = credentials.current()
        return lambda: credentials.current() is not used

    def open(self) -> grpc.Channel:
        """Open a channel; the connection itself is made by the first call."""
        import grpc

        if self.credentials is None:
            return grpc.insecure_channel(self.address, options=self.options)
        return grpc.secure_channel(self.address, self.credentials.current(), options=self.options)

    def open_async(self) -> grpc.aio.Channel:
        """Open a channel for the running event loop."""
        import grpc.aio

        if self.credentials is None:
            return grpc.aio.insecure_channel(self.address, options=self.options)
        credentials = self.credentials.current()
        return grpc.aio.secure_channel(self.address, credentials, options=self.options)


def open_async_channel(
    address: str, *, tls: Tls | None = None, insecure: bool = False
) -> grpc.aio.Channel:
    """Open a channel for the running event loop; see `Route.to`."""
    return Route.to(address, tls=tls, insecure=insecure).open_async()


def is_loopback(address: str) -> bool:
    """Whether every endpoint of a gRPC target is on this machine.

    Raises:
        InvalidFieldError: An endpoint has no port, or there is no endpoint.
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
        InvalidFieldError: An endpoint has no port, or there is no endpoint.
    """
    scheme, colon, rest = address.partition(":")
    if scheme in {"dns", "ipv4", "ipv6", "passthrough"} and colon:
        address = rest.rpartition("/")[2]
    return [_host(endpoint) for endpoint in address.split(",")]


def _host(endpoint: str) -> str:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidFieldError.of("address", f"{endpoint!r} must be HOST:PORT")
    return host.removeprefix("[").removesuffix("]")


def _is_loopback_host(host: str) -> bool:
    ip = _ip(host)  # None for a name: its addresses are not known here
    return host == "localhost" or (ip is not None and ip.is_loopback)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
