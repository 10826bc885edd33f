"""What browsers may do where no key is demanded: serve the gateway's own page, and no other.

A browser lets every page send requests to any address, this machine's included. It withholds the
answers of another origin, but the work is done. And a page whose name is made to lead to this
machine (DNS rebinding) has the answers, too. Both give themselves away by their headers.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["refuse_other_pages"]


def refuse_other_pages(headers: Mapping[str, str], *, is_local: bool) -> None:
    """Refuse a request that another site's page has sent.

    Args:
        headers: The request's, with names in small letters.
        is_local: Only this machine can reach the gateway, so it goes by no other name.

    Raises:
        RequestError: It comes from another origin, or asks for another host.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        raise _refusal(f"Origin: {origin[:200]} is another site's page")
    if is_local and not _is_this_machine(host):
        raise _refusal(f"Host: {host[:200]!r} is no name of this machine, such as localhost")


def _is_this_machine(host: str) -> bool:
    """Whether it is localhost, 127.0.0.0/8 or [::1], with or without a port."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _refusal(why: str) -> RequestError:
    return RequestError(
        f"{why}; a gateway that demands keys (--api-keys) takes it",
        status=403,
        code="other_origin",
    )
