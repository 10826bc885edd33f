"""The page at `/`: files of this package, with a policy that limits what they may do."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request

_FOLDER = "paceline_gateway.page"
_KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Scripts and styles are the page's own files, and the page connects to this gateway only. So a
# model's text or a link cannot make it do anything else.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[Route]:
    """Return the routes of the page and of its files under /paceline/page/. They need no key."""
    return [
        _file("/" if name == "index.html" else f"/paceline/page/{name}", name, content)
        for name, content in _contents().items()
    ]


def _contents() -> dict[str, bytes]:
    """Read all files once; a file that is added later is not served."""
    found = files(_FOLDER).joinpath("files").iterdir()
    return {
        each.name: each.read_bytes()
        for each in sorted(found, key=lambda it: it.name)
        if each.name.rpartition(".")[2] in _KINDS
    }


def _file(path: str, name: str, content: bytes) -> Route:
    kind = _KINDS[name.rpartition(".")[2]]

    async def serve(_request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return Route(path, serve)
