"""Serves one route: admits a request, reads its body, calls the handler, answers errors."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.errors import ClientCancelledError, PacelineError, PermissionDeniedError
from paceline.panics import taking_panics
from paceline_gateway.bodies.json_body import HERE_BYTES, check_shape
from paceline_gateway.errors import RequestError, of_paceline
from paceline_gateway.http.connection import Connection
from paceline_gateway.http.request_body import SMALL_BYTES, check_kind
from paceline_gateway.metrics import LEFT
from paceline_serving import tracing

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Mapping

    from starlette.types import Receive, Scope, Send

    from paceline_gateway.access import Access
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.http.request_body import BodyRules
    from paceline_gateway.metrics import GatewayMetrics

Handler: TypeAlias = "Callable[[Connection, bytes], Awaitable[None]]"
"""Answers a request: its connection and its body."""

_log = logging.getLogger(__name__)

# Reading a value takes a microsecond of the event loop's time.
_LEAST_VALUES = 1 << 18
_PROMPTS_OF_IDS = 4


class Endpoint:
    """An ASGI application for one route.

    Args:
        route: The route's path, for metrics and logs.
        handler: Answers the route's requests.
        prompt: The name of the prompt's parameter.
        speak: Prepares a connection for the route's interface, unless that is OpenAI's.
        access: Admits requests.
        orchestrators: Know how large a body may be; checked again if they refuse this gateway.
        metrics: Count requests.
        spans: Makes the requests' spans; None: requests are not traced.
        stall_seconds: How long a client may read nothing.
        strict: Whether unknown fields are refused.
        has_cut: Set when the gateway ends, and no longer waits for clients.
    """

    def __init__(
        self,
        route: str,
        handler: Handler,
        *,
        prompt: str = "prompt",
        speak: Callable[[Connection], None] = lambda _: None,
        access: Access,
        orchestrators: Orchestrators,
        metrics: GatewayMetrics,
        spans: tracing.Spans | None,
        stall_seconds: float,
        strict: bool,
        has_cut: asyncio.Event,
    ) -> None:
        self._route = route
        self._handler = handler
        self._prompt = prompt
        self._speak = speak
        self._access = access
        self._orchestrators = orchestrators
        self._metrics = metrics
        self._spans = spans
        self._stall_seconds = stall_seconds
        self._strict = strict
        self._has_cut = has_cut

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = [
            (name.decode("latin-1"), text.decode("latin-1")) for name, text in scope["headers"]
        ]
        call = tracing.enter(f"{scope['method']} {self._route}", headers, spans=self._spans)
        connection = Connection(
            scope,
            receive,
            send,
            request_id=call.request_id,
            stall_seconds=self._stall_seconds,
            has_cut=self._has_cut,
        )
        connection.ignored = None if self._strict else []
        self._speak(connection)
        with (
            self._metrics.request(self._route, lambda: connection.status),
            call.recorded(lambda: str(connection.status or LEFT)),
        ):
            try:
                await self._serve(connection, dict(headers))
            except ClientCancelledError as error:
                _log.info("not answered to the end: %s", error.message)
            else:
                told: dict[str, Any] = {"status": connection.status}
                if connection.ignored:
                    told["ignored"] = connection.shown_ignored
                _log.info("answered", extra=told)

    async def _serve(self, connection: Connection, headers: Mapping[str, str]) -> None:
        try:
            with self._access.admitted(connection, headers) as rules:
                if connection.has_body:
                    check_kind(headers)
                content = await self._body(connection, rules, headers=headers)
                await connection.while_connected(self._answer(connection, content))
        except RequestError as error:
            await connection.refuse(error)

    async def _body(
        self, connection: Connection, rules: BodyRules, *, headers: Mapping[str, str]
    ) -> bytes:
        try:
            content = await connection.body(rules, headers=headers)
            if len(content) > HERE_BYTES:
                is_small = len(content) <= SMALL_BYTES
                most = len(content) if is_small else await self._most_values()
                await check_shape(content, most_values=most)
            return content
        except ClientCancelledError:
            raise
        except PacelineError as error:
            raise of_paceline(error, prompt=self._prompt) from error

    async def _most_values(self) -> int:
        """Return how many JSON values a body may have: ids of several prompts, and as many others.

        Raises:
            PacelineError: No orchestrator answered how long the model's context is.
        """
        return _LEAST_VALUES + _PROMPTS_OF_IDS * (await self._orchestrators.info()).context_length

    async def _answer(self, connection: Connection, content: bytes) -> None:
        try:
            with taking_panics():
                await self._handler(connection, content)
        except (RequestError, ClientCancelledError):
            raise
        except PacelineError as error:
            if isinstance(error, PermissionDeniedError):
                self._orchestrators.doubt()
            refusal = of_paceline(error, prompt=self._prompt)
            if refusal.status == 500:
                _log.error("a generation failed: %s", error.message)
            elif refusal.status == 503:
                _log.info("a request found no orchestrator: %s", error.message)
            raise refusal from error
        except Exception as error:
            _log.exception("a request failed")
            raise of_paceline(PacelineError("a bug"), prompt=self._prompt) from error
