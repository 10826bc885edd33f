"""What the routes share: who may call, how many at once, and how a request ends."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from paceline.channel import is_loopback
from paceline.errors import (
    ClientCancelledError,
    DrainingError,
    OverloadedError,
    PacelineError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnsupportedError,
)
from paceline.panics import taking_panics
from paceline.shares import FairShares
from paceline_gateway.browsers import refuse_other_pages
from paceline_gateway.chat_template import ChatTemplates
from paceline_gateway.connection import Connection
from paceline_gateway.errors import RequestError, no_key, of_paceline, too_much
from paceline_gateway.generations import Choice
from paceline_gateway.json_body import check_shape
from paceline_gateway.metrics import LEFT
from paceline_gateway.request_body import SMALL_BYTES, BodyRules, check_kind
from paceline_gateway.template_processes import NoProcessError
from paceline_serving import lanes, tracing
from paceline_serving.admission import Admission
from paceline_serving.keys import HEADER, Keys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from paceline import GenerateOptions
    from paceline_gateway.metrics import GatewayMetrics
    from paceline_gateway.orchestrators import Orchestrators
    from paceline_gateway.parameter_types import Prompt
    from paceline_gateway.settings import GatewaySettings

__all__ = ["Endpoint", "Gateway"]

_log = logging.getLogger(__name__)

_MOST_NAME = 64  # characters of a request id on the wire
# JSON may write a letter with six bytes that has two in UTF-8, and an id of five with eight.
_JSON_BYTES = 3
# A value takes a microsecond to read, in which the event loop does nothing else.
_LEAST_VALUES = 1 << 18
_PROMPTS_OF_IDS = 4


class Gateway:
    """What is there once, for all routes.

    Args:
        settings: The operator's.
        orchestrators: Where generations run.
        metrics: Where requests are counted.
        spans: Where requests' spans come from; None where nobody collects them.

    Raises:
        ValueError: The file of keys is unusable.

    Attributes:
        began_at: When it began, in seconds since 1970.
        is_leaving: Whether balancers shall look elsewhere, though it still serves.
        requests: Those that are here.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        orchestrators: Orchestrators,
        metrics: GatewayMetrics,
        spans: tracing.Spans | None = None,
    ) -> None:
        self.settings = settings
        self.orchestrators = orchestrators
        self.metrics = metrics
        self.spans = spans
        self.templates = ChatTemplates()
        self.began_at = int(time.time())
        self._keys = Keys(settings.api_keys) if settings.api_keys is not None else None
        self.requests = Admission("this gateway is shutting down")
        self._shares = FairShares(settings.request_limit)
        self._body_shares = FairShares(settings.bodies_limit_bytes)
        self.is_leaving = False

    @property
    def why_not_ready(self) -> str | None:
        """Why balancers shall send no work here; None if they shall."""
        if self.is_leaving:
            return "this gateway is shutting down"
        if self.orchestrators.any_serves:
            return None
        if self.orchestrators.any_refuses:
            return "orchestrators refuse this gateway's own key or certificate"
        return "no orchestrator serves"

    async def look_at_template(self) -> None:
        """Say in the log, before the first conversation, what is wrong with its template."""
        try:
            await self.templates.look_at(await self.orchestrators.chat_template())
        except UnsupportedError:
            pass  # the model continues text
        except (PacelineError, NoProcessError) as error:
            _log.info("the model's chat template was not looked at yet: %s", error)

    @contextmanager
    def let_in(self, connection: Connection, headers: Mapping[str, str]) -> Iterator[None]:
        """Let a client in whose key is good and not used up, and count what it costs.

        Raises:
            RequestError: It has no such key, or the key's limit is reached; or, where none is
                demanded, it is another site's page.
        """
        connection.lane = lanes.lane_name(f"address:{lanes.network_of(connection.host)}")
        if self._keys is None:
            refuse_other_pages(
                headers,
                is_local=is_loopback(self.settings.listen),
                scheme="http" if self.settings.tls_certificate is None else "https",
            )
            yield
            return
        with ExitStack() as stack:
            try:
                caller = self._keys.find(headers.get(HEADER, ""))
                stack.enter_context(caller.admitted())
            except UnauthenticatedError as error:
                raise no_key(error) from None
            except OverloadedError as error:
                raise too_much(error) from None
            connection.charge = caller.charge
            connection.lane = lanes.lane_name(f"key:{caller.key.name}")
            yield

    @contextmanager
    def admitted(self, lane: str) -> Iterator[None]:
        """Count a request in, or refuse it at once: it is orchestrators where requests wait.

        Args:
            lane: Whose it is.

        Raises:
            RequestError: There is no room for it, or it was cut.
        """
        try:
            with self.requests.admitted(), self._place(lane), self.requests.cuttable():
                yield
        except (DrainingError, OverloadedError) as error:
            raise of_paceline(error, prompt="") from None

    @contextmanager
    def _place(self, lane: str) -> Iterator[None]:
        """Hold one of the places, which lanes share.

        Raises:
            OverloadedError: The lane can have none.
        """
        if not self._shares.allows(lane):
            raise OverloadedError(
                f"{self._shares.capacity - self._shares.free} requests are here,"
                f" {self._shares.held_by(lane)} of them this client's",
                retry_after_seconds=1.0,
            )
        self._shares.take(lane)
        try:
            yield
        finally:
            self._shares.give_back(lane)

    @contextmanager
    def room(self, lane: str) -> Iterator[BodyRules]:
        """Count the bytes of a request's body for as long as the request is here.

        Args:
            lane: Whose it is.
        """
        kept = 0

        def keep(byte_count: int) -> None:
            nonlocal kept
            if not self._body_shares.allows(lane, byte_count):
                raise of_paceline(
                    OverloadedError("too many long texts are here", retry_after_seconds=1.0),
                    prompt="",
                )
            self._body_shares.take(lane, byte_count)
            kept += byte_count

        try:
            yield BodyRules(
                ceiling_bytes=self.settings.body_limit_bytes,
                most_bytes=self._most_body_bytes,
                keep=keep,
                mebibyte_seconds=self.settings.slow_reader_seconds,
            )
        finally:
            self._body_shares.give_back(lane, kept)

    async def most_values(self) -> int:
        """Return how many JSON values a body may have: ids of several prompts, and as many others.

        Raises:
            PacelineError: Nobody could say how long the model's context is.
        """
        return _LEAST_VALUES + _PROMPTS_OF_IDS * (await self.orchestrators.info()).context_length

    async def _most_body_bytes(self) -> int:
        return _JSON_BYTES * await self.orchestrators.most_request_bytes()

    async def model(self, asked: str) -> str:
        """Return the model's name, if it is the one that was asked for.

        Raises:
            RequestError: There is another one here.
            PacelineError: Nobody could say.
        """
        name = (await self.orchestrators.info()).model_name
        if asked != name:
            raise RequestError(
                f"there is no model {asked[:200]!r} here; there is {name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def choices(
        self,
        prompts: Sequence[Prompt],
        options: GenerateOptions,
        *,
        count: int,
        request_id: str,
        connection: Connection,
        default_max_tokens: int | None = None,
    ) -> list[Choice]:
        """Make the generations of a request: each prompt so often, with one seed after the other.

        Its client's take turns with those of others, at the orchestrators where they wait.

        Args:
            default_max_tokens: What `max_tokens` is where the options have none, cut to what the
                context leaves; None is the orchestrator's default.

        Raises:
            RequestError: There are too many.
        """
        total = len(prompts) * count
        if total > self.settings.choice_limit:
            raise RequestError(
                f"n: {total} generations (prompts times n) are more than"
                f" {self.settings.choice_limit}",
                param="n",
            )
        choices = []
        for index in range(total):
            prompt_index, number = divmod(index, count)
            name = _name(request_id, index=index, total=total)
            generate = partial(
                self.orchestrators.client.generate,
                prompts[prompt_index],
                timeout=self.settings.call_limit_seconds,
                metadata={lanes.HEADER: connection.lane},
                **_own(options, number=number, request_id=name),
            )
            limited = None
            if default_max_tokens is not None and "max_tokens" not in options:
                limited = generate(max_tokens=default_max_tokens)
            choices.append(
                Choice(
                    index,
                    limited or generate(),
                    without_default=generate if limited else None,
                    prompt_index=prompt_index,
                    resumed=self.metrics.resumed,
                    charge=connection.charge,
                )
            )
        return choices


class Endpoint:
    """An ASGI application for one route.

    Args:
        gateway: What is there once.
        route: Its path, for metrics and logs.
        handle: Answers a request: its connection, its body, its id.
        prompt: What a prompt is called there.
    """

    def __init__(
        self,
        gateway: Gateway,
        route: str,
        handle: Callable[[Gateway, Connection, bytes, str], Awaitable[None]],
        *,
        prompt: str = "prompt",
    ) -> None:
        self._gateway = gateway
        self._route = route
        self._handle = handle
        self._prompt = prompt

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = [
            (name.decode("latin-1"), text.decode("latin-1")) for name, text in scope["headers"]
        ]
        method = f"{scope['method']} {self._route}"
        call = tracing.enter(method, headers, spans=self._gateway.spans)
        connection = Connection(
            scope,
            receive,
            send,
            headers={"x-request-id": call.request_id},
            stall_seconds=self._gateway.settings.slow_reader_seconds,
            has_cut=self._gateway.requests.has_cut,
        )
        with (
            self._gateway.metrics.request(self._route, lambda: connection.status),
            call.recorded(lambda: str(connection.status or LEFT)),
        ):
            try:
                await self._serve(connection, call.request_id, headers=dict(headers))
            except ClientCancelledError as error:
                _log.info("not answered to the end: %s", error.message)
            else:
                _log.info("answered", extra={"status": connection.status})

    async def _serve(
        self, connection: Connection, request_id: str, *, headers: Mapping[str, str]
    ) -> None:
        try:
            with (
                self._gateway.let_in(connection, headers),
                self._gateway.admitted(connection.lane),
                self._gateway.room(connection.lane) as rules,
            ):
                if connection.has_body:
                    check_kind(headers)
                content = await self._body(connection, rules, headers=headers)
                await connection.while_connected(self._answer(connection, content, request_id))
        except RequestError as error:
            await connection.refuse(error)

    async def _body(
        self, connection: Connection, rules: BodyRules, *, headers: Mapping[str, str]
    ) -> bytes:
        try:
            content = await connection.body(rules, headers=headers)
            if len(content) > SMALL_BYTES:
                await check_shape(content, most_values=await self._gateway.most_values())
            return content
        except ClientCancelledError:
            raise
        except PacelineError as error:
            raise of_paceline(error, prompt=self._prompt) from error

    async def _answer(self, connection: Connection, content: bytes, request_id: str) -> None:
        try:
            with taking_panics():
                await self._handle(self._gateway, connection, content, request_id)
        except (RequestError, ClientCancelledError):
            raise
        except PacelineError as error:
            if isinstance(error, PermissionDeniedError):
                self._gateway.orchestrators.doubt()
            refusal = of_paceline(error, prompt=self._prompt)
            if refusal.status == 500:
                _log.error("a generation failed: %s", error.message)
            elif refusal.status == 503:
                _log.info("a request found no orchestrator: %s", error.message)
            raise refusal from error
        except Exception as error:
            _log.exception("a request failed")
            raise of_paceline(PacelineError("a bug"), prompt=self._prompt) from error


def _own(options: GenerateOptions, *, number: int, request_id: str) -> GenerateOptions:
    """Return a choice's options: a seed and a name of its own."""
    own = options.copy()
    if "seed" in own:
        own["seed"] = (own["seed"] + number) % (1 << 53)
    own["request_id"] = request_id
    return own


def _name(request_id: str, *, index: int, total: int) -> str:
    """Name a choice in the servers' logs after its request."""
    suffix = f"-{index}" if total > 1 else ""
    return request_id[: _MOST_NAME - len(suffix)] + suffix
