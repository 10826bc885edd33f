"""Lets the pages of listed origins read answers (CORS), and no others.

Without a list a browser shows no other site's page an answer. What a page may do follows from its
origin and from the key in its own Authorization header. Cookies and other credentials of the
browser are never allowed (`Access-Control-Allow-Credentials`), since no answer depends on them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.applications import Starlette

ANY = "*"
# As browsers write it: small letters, no path, no default port. Not only http: tools have schemes.
_ORIGIN = re.compile(
    r"(?!http://[^/]*:80$|https://[^/]*:443$)"
    r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
)
_EXPOSED = ("retry-after", "x-request-id", "x-paceline-ignored")
_SECONDS = 600


def check_origins(origins: Sequence[str], *, needs_keys: bool) -> None:
    """Check a list of origins.

    Args:
        needs_keys: Whether a request needs a key.

    Raises:
        ValueError: One is no origin; or all are allowed where no key is needed.
    """
    for origin in origins:
        if origin == ANY and not needs_keys:
            raise ValueError(
                "cors_origin * needs --api-keys: without them every page that somebody visits could"
                " use this gateway"
            )
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"cors_origin {origin[:200]!r} is no origin as browsers write it, such as"
                " https://app.example or http://localhost:3000"
            )


def allow_origins(application: Starlette, origins: Sequence[str]) -> None:
    """Let pages of these origins send requests and read answers; none: nothing changes."""
    if origins:
        application.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=(ANY,),  # the headers that a page asks for: packages have their own
            allow_private_network=True,
            expose_headers=_EXPOSED,
            max_age=_SECONDS,
        )
