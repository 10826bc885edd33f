"""What browsers may do where no key is demanded: serve the gateway's own page, and no other.

A browser lets every page send requests to any address, this machine's included. It withholds the
answers of another origin, but the work is done. And a page whose name is made to lead to this
machine (DNS rebinding) has the answers, too. Both give themselves away by their headers.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import TYPE_CHECKING

from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_PORTS = {"http": 80, "https": 443}
# A name, an IPv4 address, or an IPv6 address in brackets; perhaps a port. No user, no path.
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f]*:[0-9a-f:.]*\])(?::(?P<port>[0-9]{1,5}))?")


def refuse_other_pages(headers: Mapping[str, str], *, is_local: bool, scheme: str = "http") -> None:
    """Refuse a request that another site's page has sent.

    Args:
        headers: The request's, with names in small letters; none of these twice.
        is_local: Only this machine can reach the gateway, so it goes by no other name.
        scheme: How the gateway is reached: http or https.

    Raises:
        RequestError: It comes from another origin, or asks for another host.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and not _is_own(origin, host=host, scheme=scheme, is_local=is_local):
        raise _refusal(f"Origin: {origin[:200]} is a page of another site")
    if is_local and not _is_this_machine(host):
        raise _refusal(f"Host: {host[:200]!r} is not a name of this machine, such as localhost")


def _is_own(origin: str, *, host: str, scheme: str, is_local: bool) -> bool:
    """Whether scheme, name and port are those that were asked for.

    A gateway that other machines reach may stand behind a proxy that speaks TLS for it: then the
    page's scheme is https, and the one here http.
    """
    its_scheme, _, its_host = origin.partition("://")
    if its_scheme not in _PORTS or (is_local and its_scheme != scheme):
        return False
    own = _name_and_port(host, scheme=its_scheme)
    return own is not None and own == _name_and_port(its_host, scheme=its_scheme)


def _name_and_port(host: str, *, scheme: str) -> tuple[str, int] | None:
    """Take a host apart; None for what is none."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return None
    return found["name"], int(found["port"] or _PORTS[scheme])


def _is_this_machine(host: str) -> bool:
    """Whether it is localhost, 127.0.0.0/8 or [::1], with or without a port."""
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
