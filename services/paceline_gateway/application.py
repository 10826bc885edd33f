"""The routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from paceline_gateway.completions import chat, complete
from paceline_gateway.errors import RequestError
from paceline_gateway.gateway import Endpoint
from paceline_gateway.live_stream import describe, watch
from paceline_gateway.responses import respond
from paceline_gateway.static_page import page_routes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from paceline import SystemInfo
    from paceline_gateway.connection import Connection
    from paceline_gateway.gateway import Gateway

__all__ = ["application"]


class _Application(Starlette):
    """Takes a path with a slash at its end for the path without it.

    The framework would redirect it, by the scheme that it sees: behind a proxy that ends TLS that
    is http, and clients send no body again.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path: str = scope.get("path", "")
        if path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await super().__call__(scope, receive, send)


def application(gateway: Gateway) -> Starlette:
    """Put the routes together."""

    async def live(_request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def ready(_request: Request) -> Response:
        why_not = gateway.why_not_ready
        return PlainTextResponse(f"{why_not or 'ready'}\n", status_code=503 if why_not else 200)

    def post(path: str, handle: Any, prompt: str) -> Route:
        return Route(path, Endpoint(gateway, path, handle, prompt=prompt), methods=["POST"])

    routed = _Application(
        routes=[
            Route("/health/live", live),
            Route("/health/ready", ready),
            Route("/v1/models", Endpoint(gateway, "/v1/models", _list), methods=["GET"]),
            Route(
                "/v1/models/{model:path}",
                Endpoint(gateway, "/v1/models/{model}", _describe),
                methods=["GET"],
            ),
            post("/v1/completions", complete, "prompt"),
            post("/v1/chat/completions", chat, "messages"),
            post("/v1/responses", respond, "input"),
            Route("/paceline/info", Endpoint(gateway, "/paceline/info", describe), methods=["GET"]),
            post("/paceline/generate", watch, "prompt"),
            *(page_routes() if gateway.settings.page else []),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )
    routed.router.redirect_slashes = False
    return routed


async def _list(
    gateway: Gateway, connection: Connection, _content: bytes, _request_id: str
) -> None:
    info = await gateway.orchestrators.info()
    await connection.answer({"object": "list", "data": [_model(gateway, info)]})


async def _describe(
    gateway: Gateway, connection: Connection, _content: bytes, _request_id: str
) -> None:
    await gateway.model(connection.path.removeprefix("/v1/models/"))
    await connection.answer(_model(gateway, await gateway.orchestrators.info()))


def _model(gateway: Gateway, info: SystemInfo) -> dict[str, Any]:
    return {
        "id": info.model_name,
        "object": "model",
        "created": gateway.began_at,
        "owned_by": "paceline",
        "paceline": {
            "version": info.version,
            "fingerprint": info.model_fingerprint,
            "context_length": info.context_length,
            "vocabulary_size": info.vocabulary_size,
        },
    }


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Say 404 and 405 in OpenAI's form, too."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path[:200]} is not served here"
    refusal = RequestError(words, status=error.status_code, code="unknown_url")
    return JSONResponse(refusal.body, status_code=error.status_code, headers=error.headers)
