"""The routes."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from paceline_gateway.access import Access
from paceline_gateway.anthropic.errors import PATH as MESSAGES
from paceline_gateway.anthropic.errors import MessagesError, speak_anthropics
from paceline_gateway.anthropic.messages import answer_messages, count_tokens
from paceline_gateway.dialects.dialect import Dialects
from paceline_gateway.endpoint import Endpoint
from paceline_gateway.errors import RequestError
from paceline_gateway.generating.generations import Generations
from paceline_gateway.generating.sampling_defaults import SamplingDefaults
from paceline_gateway.generating.turns import Turns
from paceline_gateway.http.cors import allow_origins
from paceline_gateway.openai.completions import chat, complete
from paceline_gateway.openai.models import describe_model, list_models
from paceline_gateway.openai.responses import respond
from paceline_gateway.openai.tokenizing import detokenize, tokenize, version
from paceline_gateway.page.live_stream import describe, watch
from paceline_gateway.page.static_page import page_routes

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from paceline_gateway.endpoint import Handler
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.metrics import GatewayMetrics
    from paceline_gateway.readiness import Readiness
    from paceline_gateway.settings import GatewaySettings
    from paceline_gateway.templates.chat_template import ChatTemplates
    from paceline_serving import tracing
    from paceline_serving.admission import Admission


class _Application(Starlette):
    """Treats a path with a slash at its end like the path without it.

    The framework would redirect it, with the scheme that it sees: http behind a proxy that ends
    TLS. And clients would not send their body again.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path: str = scope.get("path", "")
        if path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await super().__call__(scope, receive, send)


def application(
    settings: GatewaySettings,
    *,
    orchestrators: Orchestrators,
    templates: ChatTemplates,
    requests: Admission,
    readiness: Readiness,
    metrics: GatewayMetrics,
    spans: tracing.Spans | None,
) -> Starlette:
    """Make the application: each path, its handler, and the objects that the handler needs.

    Raises:
        ValueError: The file of keys is unusable.
    """
    defaults = SamplingDefaults(orchestrators, source=settings.generation_config)
    generations = Generations(
        orchestrators.client,
        defaults=defaults,
        choice_limit=settings.choice_limit,
        call_limit_seconds=settings.call_limit_seconds,
        resumed=metrics.resumed,
    )
    dialects = Dialects(
        tool_parser=settings.tool_parser, reasoning_parser=settings.reasoning_parser
    )
    turns = Turns(
        orchestrators=orchestrators,
        templates=templates,
        dialects=dialects,
        generations=generations,
    )
    endpoint = partial(
        Endpoint,
        access=Access(settings, orchestrators=orchestrators, requests=requests),
        orchestrators=orchestrators,
        metrics=metrics,
        spans=spans,
        stall_seconds=settings.slow_reader_seconds,
        strict=settings.strict,
        has_cut=requests.has_cut,
    )
    about_models: dict[str, Any] = {
        "orchestrators": orchestrators,
        "defaults": defaults,
        "began_at": int(time.time()),
    }

    def get(path: str, handler: Handler) -> Route:
        shown = path.replace(":path}", "}")
        return Route(path, endpoint(shown, handler), methods=["GET"])

    def post(path: str, handler: Handler, *, prompt: str, **more: Any) -> Route:
        return Route(path, endpoint(path, handler, prompt=prompt, **more), methods=["POST"])

    routed = _Application(
        routes=[
            *_health_routes(readiness),
            get("/v1/models", partial(list_models, **about_models)),
            get("/v1/models/{model:path}", partial(describe_model, **about_models)),
            get("/version", partial(version, orchestrators=orchestrators)),
            post(
                "/tokenize",
                partial(tokenize, orchestrators=orchestrators, templates=templates),
                prompt="prompt",
            ),
            post("/detokenize", partial(detokenize, orchestrators=orchestrators), prompt="tokens"),
            post(
                "/v1/completions",
                partial(complete, orchestrators=orchestrators, generations=generations),
                prompt="prompt",
            ),
            post(
                "/v1/chat/completions",
                partial(chat, turns=turns, generations=generations),
                prompt="messages",
            ),
            post(
                "/v1/responses",
                partial(respond, turns=turns),
                prompt="input",
            ),
            post(
                MESSAGES,
                partial(answer_messages, turns=turns),
                prompt="messages",
                speak=speak_anthropics,
            ),
            post(
                f"{MESSAGES}/count_tokens",
                partial(count_tokens, turns=turns),
                prompt="messages",
                speak=speak_anthropics,
            ),
            get("/paceline/info", partial(describe, orchestrators=orchestrators)),
            post(
                "/paceline/generate",
                partial(
                    watch, orchestrators=orchestrators, templates=templates, generations=generations
                ),
                prompt="prompt",
            ),
            *(page_routes() if settings.page else []),
        ],
        exception_handlers={HTTPException: _no_such_route},
    )
    routed.router.redirect_slashes = False
    allow_origins(routed, settings.cors_origin)
    return routed


def _health_routes(readiness: Readiness) -> list[Route]:
    async def live(_request: Request) -> Response:
        return PlainTextResponse("alive\n")

    async def ready(_request: Request) -> Response:
        why_not = readiness.why_not
        return PlainTextResponse(f"{why_not or 'ready'}\n", status_code=503 if why_not else 200)

    return [
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/health", ready),  # the name that other servers have, and tools ask for
    ]


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Answer 404 and 405 in the interface's form, too."""
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path[:200]} is not served here"
    refusal = RequestError(words, status=error.status_code, code="unknown_url")
    if request.url.path.startswith(MESSAGES):
        refusal = MessagesError(refusal, request_id="")
    return JSONResponse(refusal.body, status_code=error.status_code, headers=error.headers)
