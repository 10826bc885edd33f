"""The servers' metrics pages: finds their addresses and reads them."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp

from paceline.errors import InvalidFieldError
from paceline_local.metrics_samples import Samples, parse_page
from paceline_orchestrator.fleet.discovery.dns import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable


class PageError(Exception):
    """A page cannot be read; the text says why in a few words."""


@dataclass(frozen=True, slots=True)
class Source:
    """A value of --metrics: one server, or a name with an address for each of several servers.

    Attributes:
        name: The name to show; empty: the orchestrator's name for it.
        host: A name or an address.
        port: The port; None: the scheme's.
        scheme: http or https.
        path: The page's path.
    """

    name: str
    host: str
    port: int | None
    scheme: str = "http"
    path: str = "/metrics"


@dataclass(frozen=True, slots=True)
class Page:
    """One server's page.

    Attributes:
        source: The source whose name has this address.
        host: One of the source's addresses.
    """

    source: Source
    host: str

    @property
    def address(self) -> str:
        """The host and the port, as people write them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.source.port}" if self.source.port is not None else host

    @property
    def url(self) -> str:
        """The page's URL."""
        return f"{self.source.scheme}://{self.address}{self.source.path}"


def parse_sources(texts: Iterable[str]) -> tuple[Source, ...]:
    """Read addresses of pages.

    Raises:
        InvalidFieldError: An address is malformed.
    """
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Source:
    name, equals, place = text.partition("=")
    if not equals or "/" in name:  # the = is part of a URL
        name, place = "", text
    try:
        parts = urlsplit(place if "://" in place else f"http://{place}")
        port, host = parts.port, parts.hostname
    except ValueError:
        port = host = None
    is_whole = "://" in place or port is not None
    if not host or not is_whole or parts.scheme not in {"http", "https"}:
        problem = f"{text!r} must be HOST:PORT, NAME=HOST:PORT or a URL"
        raise InvalidFieldError.of("metrics", problem)
    path = parts.path if parts.path.strip("/") else "/metrics"
    query = f"?{parts.query}" if parts.query else ""
    return Source(name, host, port, scheme=parts.scheme, path=path + query)


async def pages_of(source: Source) -> list[Page]:
    """Return the pages of a source: one for each address that its host has now.

    Raises:
        PageError: The host has no address.
    """
    if source.scheme == "https":
        return [Page(source, source.host)]  # certificates are for names
    try:
        hosts = await resolve(source.host)
    except OSError as error:
        raise PageError((error.strerror or "its name cannot be looked up").lower()) from None
    if not hosts:
        raise PageError("its name has no address")
    return [Page(source, host) for host in sorted(hosts)]


async def read_page(session: aiohttp.ClientSession, page: Page) -> Samples:
    """Read a page.

    Raises:
        PageError: The page cannot be read, or has no metrics.
    """
    try:
        async with session.get(page.url) as response:
            if response.status != 200:
                raise PageError(f"HTTP {response.status}")
            return parse_page(await response.text(errors="replace"))
    except TimeoutError:
        raise PageError("no answer in time") from None
    except aiohttp.ClientConnectorError as error:
        raise PageError(os.strerror(error.os_error.errno or errno.ENOTCONN).lower()) from None
    except aiohttp.ClientError:
        raise PageError("the connection broke") from None
    except ValueError:
        raise PageError("no page of metrics") from None
