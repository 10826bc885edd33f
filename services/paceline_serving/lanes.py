"""Who a call's client is, and lanes: the names by which a proxy tells its own clients apart.

Lanes of one sender take turns in the orchestrator's queue. They only divide the sender's share, so
an orchestrator need not trust them.
"""

from __future__ import annotations

import hashlib
import ipaddress
from typing import TYPE_CHECKING, Any

from paceline_serving.security import peer_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_serving.keys import Caller

HEADER = "paceline-lane"

_DIGITS = 16
# A holder of one IPv6 address usually has the whole network of this prefix length.
_IPV6_PREFIX = 64


def client_of(context: Any, caller: Caller | None) -> str:
    """Name the client of a call: by its certificate, or its key, or its address without the port.

    Args:
        context: The call's; a grpc.aio.ServicerContext.
        caller: Whose key came with it; None where no keys are asked for.
    """
    key = f"key:{caller.key.name}" if caller is not None else ""
    return peer_name(context.auth_context()) or key or network_of_peer(context.peer())


def lane_name(identity: str) -> str:
    """Return the name of a client's lane: a digest, so that the client stays unknown."""
    return hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]


def lane_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str:
    """Return the lane that a call's metadata names; empty if there is none."""
    found = dict(metadata or ()).get(HEADER, "")
    return found[:_DIGITS] if isinstance(found, str) else ""


def network_of_peer(peer: str) -> str:
    """Return where a peer is, as gRPC writes it: `ipv4:HOST:PORT`, `ipv6:[HOST]:PORT`, `unix:PATH`.

    An IPv6 client is its network.
    """
    kind, _, place = peer.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return peer
    host = place.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    return network_of(host)


def network_of(host: str) -> str:
    """Return the part of an address that identifies a client: of an IPv6 address its network.

    Other texts are returned unchanged: a proxy may write anything into its headers.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:  # how a socket for both kinds names a client of IPv4
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))
