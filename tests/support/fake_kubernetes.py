"""A Kubernetes API that knows EndpointSlices only: list and watch over real HTTP, faults on demand.

It runs on a thread of its own, and is told what to do from any other.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from support.ports import free_address

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable
    from pathlib import Path

TOKEN = "the token of this pod's service account"
_LABEL = "kubernetes.io/service-name"
_END: dict[str, Any] = {"type": "END"}


@dataclass
class Pod:
    """A pod behind a Service; what it is good for is what the endpoints controller says."""

    name: str
    address: str
    port: int
    ready: bool = True
    terminating: bool = False
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))

    @property
    def endpoint(self) -> dict[str, Any]:
        return {
            "addresses": [self.address],
            "conditions": {
                "ready": self.ready and not self.terminating,
                "serving": self.ready,
                "terminating": self.terminating,
            },
            "targetRef": {"kind": "Pod", "name": self.name, "uid": self.uid},
        }


class FakeKubernetes:
    """The API server; inside the block it answers.

    Args:
        namespace: The only one there is.
        ssl_context: With its certificate; None is plaintext.

    Attributes:
        namespace: See above.
        port: Where it listens; it keeps it.
        faults: For the next requests, one each: a status; "slow" answers never; "garbage" is no
            JSON, "nested" a deeply nested list; "cut" ends the connection after the first event,
            "half" in the middle of it.
        retry_after: What refusals have as Retry-After; empty: nothing.
        token: The one that it lets in.
        gone_status: Whether a version that is gone is answered with status 410, and not with an
            event as API servers do.
        watch_seconds: When watches end, whatever they ask for; None is as they ask.
        requests: The queries so far.
    """

    def __init__(
        self, *, namespace: str = "paceline", ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self.namespace = namespace
        self._ssl_context = ssl_context
        self.faults: deque[int | str] = deque()
        self.retry_after = ""
        self.token = TOKEN
        self.gone_status = False
        self.watch_seconds: float | None = None
        self.requests: list[dict[str, str]] = []
        self._objects: dict[str, dict[str, Any]] = {}
        self._history: list[dict[str, Any]] = []
        self._version = 100
        self._forgotten = 0  # versions up to this one cannot be watched from
        self._watches: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self.port = int(free_address().rpartition(":")[2])

    def __enter__(self) -> Self:
        running = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live(running)), name="fake API server"
        )
        self._thread.start()
        assert running.wait(90)
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._run(self._over.set)
        self._thread.join()

    # --- what an operator sees ----------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kubeconfig(self, path: Path) -> Path:
        """Write how to reach it."""
        named = {
            "clusters": [{"name": "it", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [
                {
                    "name": "here",
                    "context": {"cluster": "it", "user": "me", "namespace": self.namespace},
                }
            ],
        }
        path.write_text(json.dumps({"kind": "Config", "current-context": "here", **named}))
        return path

    def publish(self, service: str, pods: list[Pod], *, name: str = "") -> None:
        """Make a slice say that these pods are behind a Service."""
        ports = {pod.port for pod in pods} or {1}
        assert len(ports) == 1, "the pods of a slice share their ports"
        name = name or f"{service}-abcde"
        self.apply(
            {
                "metadata": {"name": name, "labels": {_LABEL: service}},
                "addressType": "IPv4",
                "endpoints": [pod.endpoint for pod in pods],
                "ports": [{"name": "grpc", "protocol": "TCP", "port": ports.pop()}],
            }
        )

    def apply(self, each: dict[str, Any]) -> None:
        """Create or replace an EndpointSlice."""

        def act() -> None:
            name = each["metadata"]["name"]
            old = self._objects.get(name)
            uid = old["metadata"]["uid"] if old else str(uuid.uuid4())
            metadata = {**each["metadata"], "namespace": self.namespace, "uid": uid}
            self._objects[name] = {**each, "metadata": metadata}
            self._record("MODIFIED" if old else "ADDED", self._objects[name])

        self._run(act)

    def delete(self, name: str) -> None:
        """Delete an EndpointSlice."""
        self._run(lambda: self._record("DELETED", self._objects.pop(name)))

    def bookmark(self) -> None:
        """Tell watchers the version, without a change."""

        def act() -> None:
            self._version += 1
            metadata = {"resourceVersion": str(self._version)}
            self._send({"type": "BOOKMARK", "object": {"metadata": metadata}})

        self._run(act)

    # --- what can go wrong --------------------------------------------------------------------

    def forget(self) -> None:
        """Compact the history: no earlier version can be watched from."""

        def act() -> None:
            self._version += 1
            self._forgotten = self._version
            self._history.clear()

        self._run(act)

    def cut(self) -> None:
        """Break every watch."""
        self._run(lambda: self._send(None))

    def end_watches(self) -> None:
        """End every watch in good order, as when its time is over."""
        self._run(lambda: self._send(_END))

    def stop(self) -> None:
        """Go away, as an API server that is being replaced."""
        self.cut()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(90)

    def start(self) -> None:
        """Come back, where it was."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(90)

    @property
    def watch_count(self) -> int:
        return len(self._watches)

    # --- how it answers -----------------------------------------------------------------------

    async def _live(self, running: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        running.set()
        await self._over.wait()

    async def _start(self) -> None:
        application = web.Application()
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        application.router.add_get(path, self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner,
            "127.0.0.1",
            self.port,
            ssl_context=self._ssl_context,
            reuse_address=True,
        )
        await site.start()

    async def _stop(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        fault = self.faults.popleft() if self.faults else None
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if (scheme.lower(), token) != ("bearer", self.token):
            fault = 401
        if isinstance(fault, int):
            headers = {"Retry-After": self.retry_after} if self.retry_after else {}
            return web.json_response(_status(fault, "refused"), status=fault, headers=headers)
        if fault == "slow":
            await asyncio.sleep(3600)
        if fault == "garbage":
            return web.Response(text="<html>it works</html>\n")
        if fault == "nested":
            return web.Response(text="[" * 200_000 + "\n")
        if request.query.get("watch") == "true":
            return await self._watch(request, fault=fault)
        return self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        """Answer a page; the rest of a list is of the version in which it began."""
        version, first = self._version, 0
        if token := request.query.get("continue"):
            version, first = map(int, token.split(":"))
            if version < self._forgotten:
                return web.json_response(_status(410, "the continue token is gone"), status=410)
        items = [it for it in self._objects.values() if _selects(request, it)]
        end = first + int(request.query.get("limit", len(items)))
        metadata = {"resourceVersion": str(version)}
        if end < len(items):
            metadata["continue"] = f"{version}:{end}"
        return web.json_response(
            {"kind": "EndpointSliceList", "metadata": metadata, "items": items[first:end]}
        )

    async def _watch(self, request: web.Request, *, fault: str | None) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        is_gone = since < self._forgotten
        if is_gone and self.gone_status:
            return web.json_response(_status(410, "too old"), status=410)
        response = web.StreamResponse()
        response.content_type = "application/json"
        await response.prepare(request)
        if is_gone:
            message = f"too old resource version: {since} ({self._forgotten})"
            await _write(response, {"type": "ERROR", "object": _status(410, message)})
            return response
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for event in self._history:
            if int(event["object"]["metadata"]["resourceVersion"]) > since:
                events.put_nowait(event)
        self._watches.add(events)
        try:
            async with asyncio.timeout(
                self.watch_seconds or float(request.query["timeoutSeconds"])
            ):
                await self._stream(request, response, events, fault=fault)
        except TimeoutError:
            pass
        finally:
            self._watches.discard(events)
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        events: asyncio.Queue[dict[str, Any] | None],
        *,
        fault: str | None,
    ) -> None:
        while (event := await events.get()) is not _END:
            if event is not None and (
                event["type"] == "BOOKMARK" or _selects(request, event["object"])
            ):
                if fault == "half":
                    await response.write(json.dumps(event).encode()[:100])
                    return  # in good order, as far as HTTP can tell
                await _write(response, event)
            if (event is None or fault == "cut") and request.transport is not None:
                request.transport.abort()
                return

    def _record(self, kind: str, each: dict[str, Any]) -> None:
        self._version += 1
        each = {**each, "metadata": {**each["metadata"], "resourceVersion": str(self._version)}}
        if kind != "DELETED":
            self._objects[each["metadata"]["name"]] = each
        event = {"type": kind, "object": each}
        self._history.append(event)
        self._send(event)

    def _send(self, event: dict[str, Any] | None) -> None:
        for events in self._watches:
            events.put_nowait(event)

    def _run(self, action: Callable[[], object]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (action(), done.set()))
        assert done.wait(90)


def _selects(request: web.Request, each: dict[str, Any]) -> bool:
    """Whether the request's label selector fits an object."""
    selector = request.query.get("labelSelector", "")
    found = re.fullmatch(rf"{re.escape(_LABEL)} in \(([^)]*)\)", selector)
    assert found, f"a selector that this API does not know: {selector!r}"
    return each["metadata"]["labels"].get(_LABEL) in found[1].split(",")


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "status": "Failure", "message": message, "code": code}


async def _write(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(json.dumps(event).encode() + b"\n")
