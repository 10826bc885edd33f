"""EndpointSlices of a Kubernetes API, kept up to date: one list, then one watch after another.

A loop of our own, because the client's informer asks again without a pause while the API is down,
and never gives up a connection that has died silently.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from paceline_orchestrator.fleet.discovery.metrics import WatchMetrics

_log = logging.getLogger(__name__)

# A watch ends after so many seconds, at random, so that many watchers do not come back at once. It
# bounds for how long a connection that has died silently is believed.
_WATCH_SECONDS = (30, 60)
# One that ends sooner than this without an event did not work, though nobody said so.
_SHORTEST_WATCH_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.1
_LAST_PAUSE_SECONDS = 10.0
LONGEST_WAIT_SECONDS = 60.0
"""What an API that is overloaded may ask for: without a limit a wrong clock could stop it all."""
MOST_OBJECTS = 1024
"""The most EndpointSlices that are kept; a full slice of a Service has 100 endpoints or more."""
_GONE = 410
# It cannot answer now, or not us: that says nothing of the version, and a list would cost it more.
_BUSY = frozenset({401, 429, 503})
_MOST_REFUSALS_OF_A_WATCH = 5


class ApiRefusalError(Exception):
    """The API answered with an error, or with what makes no sense.

    Attributes:
        code: The HTTP status; 0 without one.
        retry_after_seconds: When to come again, if it said so.
    """

    def __init__(self, message: str, *, code: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_seconds = retry_after_seconds


def too_many_objects() -> ApiRefusalError:
    """Return the refusal of more than are kept."""
    return ApiRefusalError(
        f"more than {MOST_OBJECTS} EndpointSlices, which are not read: the servers that are known"
        " stay"
    )


class SliceApi(Protocol):
    """The two calls that this needs.

    Raises:
        ApiRefusalError: The API would not.
        OSError: It was not reached, or the connection broke.
        TimeoutError: It did not answer in time.
    """

    async def list(self) -> Mapping[str, Any]:
        """Return an EndpointSliceList."""

    def watch(self, version: str, *, seconds: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield watch events from a resource version on, for so long."""


class ListWatch:
    """Follows one collection of objects.

    Args:
        api: How to reach it.
        metrics: Told of what happens.
        sleep: Waits between attempts.
    """

    def __init__(
        self,
        api: SliceApi,
        *,
        metrics: WatchMetrics,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._metrics = metrics
        self._sleep = sleep
        self._objects: dict[str, Mapping[str, Any]] = {}
        self._version = ""  # empty: list first
        self._early_ends = 0  # watches in a row that told something and ended at once
        self._failures = 0  # since a watch last worked; a list alone does not count

    async def snapshots(self) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """Yield all objects at once and after each change, for ever; nothing while the API is away.

        After a break it goes on where it was, and lists again only where the API refuses that: then
        the new list replaces what was known.
        """
        while True:
            try:
                if not self._version:
                    await self._list()
                    yield list(self._objects.values())
                async with aclosing(self._watch()) as changes:
                    async for _ in changes:
                        yield list(self._objects.values())
            except (ApiRefusalError, OSError, TimeoutError) as error:
                await self._sleep(self._pause_after(error))

    async def _list(self) -> None:
        answer = await self._api.list()
        self._objects = {_uid(each): each for each in answer.get("items") or ()}
        self._version = _version(answer)
        self._metrics.listed()
        self._metrics.heard()

    async def _watch(self) -> AsyncGenerator[None, None]:
        """Watch once, and yield after each change."""
        started, heard = time.monotonic(), False
        seconds = random.randint(*_WATCH_SECONDS)  # noqa: S311 - no secret
        async with aclosing(self._api.watch(self._version, seconds=seconds)) as events:
            async for event in events:
                changed = self._take(event)
                heard = True
                self._works()
                if changed:
                    yield
        early_seconds = started + _SHORTEST_WATCH_SECONDS - time.monotonic()
        if not heard and early_seconds > 0:
            raise ApiRefusalError("a watch ended at once")
        self._works()
        self._early_ends = self._early_ends + 1 if early_seconds > 0 else 0
        if self._early_ends > 1:  # it may tell the same each time
            await self._sleep(early_seconds)

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Take in an event; tell whether objects changed."""
        kind, each = str(event.get("type")), event.get("object")
        if not isinstance(each, dict):
            raise ApiRefusalError(f"an event of type {kind!r} without an object")
        match kind:
            case "ADDED" | "MODIFIED":
                if len(self._objects) >= MOST_OBJECTS and _uid(each) not in self._objects:
                    raise too_many_objects()
                self._objects[_uid(each)] = each
            case "DELETED":
                self._objects.pop(_uid(each), None)
            case "BOOKMARK":
                pass
            case _:
                raise _refusal(each, f"an event of type {kind!r}")
        self._version = _version(each)
        return kind != "BOOKMARK"

    def _works(self) -> None:
        self._failures = 0
        self._metrics.heard()

    def _pause_after(self, error: Exception) -> float:
        """Return how many seconds to wait before the next attempt: ever more, at random."""
        longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 20), _LAST_PAUSE_SECONDS)
        pause = longest * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        self._failures += 1
        code, what = 0, type(error).__name__
        if isinstance(error, ApiRefusalError):
            if error.code not in _BUSY or self._failures > _MOST_REFUSALS_OF_A_WATCH:
                self._version = ""
            pause = max(pause, error.retry_after_seconds)
            code, what = error.code, str(error.code or "refused")
        if code != _GONE:  # which is no failure: the API keeps its history for minutes only
            self._metrics.failed(what)
            _log.warning("the cluster's API: %s; again in %.1f s", str(error) or what, pause)
        return pause


def _refusal(status: Mapping[str, Any], what: str) -> ApiRefusalError:
    """Read the Status object that an API server ends a running watch with."""
    details = status.get("details")
    wait = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    code = status.get("code")
    return ApiRefusalError(
        str(status.get("message") or what),
        code=code if isinstance(code, int) else 0,
        retry_after_seconds=min(max(0.0, wait), LONGEST_WAIT_SECONDS)
        if isinstance(wait, int | float)
        else 0.0,
    )


def _uid(each: Mapping[str, Any]) -> str:
    return _metadata(each, "uid")


def _version(each: Mapping[str, Any]) -> str:
    return _metadata(each, "resourceVersion")


def _metadata(each: Mapping[str, Any], key: str) -> str:
    metadata = each.get("metadata") if isinstance(each, dict) else None
    value = metadata.get(key) if isinstance(metadata, dict) else None
    if not value:
        raise ApiRefusalError(f"an object without metadata.{key}")
    return str(value)
