"""Refuses requests of other sites' pages to a gateway without keys.

A browser lets every page send requests to any address, also to this machine's. It withholds the
answers of another origin, but the gateway would do the work. And a page whose name is made to lead
to this machine (DNS rebinding) even gets the answers. The headers show both.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING

from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_PORTS = {"http": 80, "https": 443}
# A name, an IPv4 address, or an IPv6 address in brackets; perhaps a port. No user, no path.
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f]*:[0-9a-f:.]*\])(?::(?P<port>[0-9]{1,5}))?")


def refuse_other_pages(
    headers: Mapping[str, str],
    *,
    is_local: bool,
    scheme: str = "http",
    allowed: Collection[str] = (),
) -> None:
    """Refuse a request of another site's page.

    Args:
        headers: The request's headers, with names in lower case; each occurs once.
        is_local: Whether only this machine can reach the gateway, so that it has no other name.
        scheme: The gateway's scheme: http or https.
        allowed: Other origins whose pages may send requests.

    Raises:
        RequestError: The request comes from another origin, or is for another host.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if (
        origin is not None
        and origin not in allowed
        and not _is_own(origin, host=host, scheme=scheme, is_local=is_local)
    ):
        raise _refusal(f"Origin: {origin[:200]} is a page of another site")
    if is_local and not _is_this_machine(host):
        raise _refusal(f"Host: {host[:200]!r} is not a name of this machine, such as localhost")


def _is_own(origin: str, *, host: str, scheme: str, is_local: bool) -> bool:
    """Whether an origin's scheme, name and port are the gateway's.

    A gateway that other machines reach may be behind a proxy that ends TLS: then the page's scheme
    is https, and the gateway's is http.
    """
    its_scheme, _, its_host = origin.partition("://")
    if its_scheme not in _PORTS or (is_local and its_scheme != scheme):
        return False
    own = _name_and_port(host, scheme=its_scheme)
    return own is not None and own == _name_and_port(its_host, scheme=its_scheme)


def _name_and_port(host: str, *, scheme: str) -> tuple[str, int] | None:
    """Split a host into name and port; None if it is malformed."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return None
    return found["name"], int(found["port"] or _PORTS[scheme])


def _is_this_machine(host: str) -> bool:
    """Whether a host is localhost, 127.0.0.0/8 or [::1], with or without a port."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return False
    name = found["name"]
    if name == "localhost":
        return True
    try:
        return ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"{why}; a gateway that demands keys (--api-keys) takes it",
        status=403,
        code="other_origin",
    )
