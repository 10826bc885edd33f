"""Pods behind headless Services, from a watch on the cluster's EndpointSlices.

Needs a Role with get, list and watch on endpointslices (discovery.k8s.io), and nothing more. The
client library takes 0.2 s and 22 MB to import, so that this module is imported only where it is
used.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import aclosing, asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from kubernetes.aio import client, config

from paceline_orchestrator.fleet.discovery.list_watch import (
    LONGEST_WAIT_SECONDS,
    MOST_OBJECTS,
    ApiRefusalError,
    ListWatch,
    too_many_objects,
)
from paceline_orchestrator.fleet.discovery.slices import SERVICE_LABEL, read_slices

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from paceline_orchestrator.fleet.discovery.endpoints import Endpoint
    from paceline_orchestrator.fleet.discovery.metrics import WatchMetrics
    from paceline_orchestrator.fleet.discovery.services import Service

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# For a connection, an answer's headers, and a whole list.
_ANSWER_SECONDS = 5.0
# A watch that the API forgot to end is given up so long after its time.
_WATCH_MARGIN_SECONDS = 5.0
# More than any object of an API server has.
_MOST_EVENT_BYTES = 16 << 20
# A slice has 100 endpoints unless the cluster says otherwise, and some 50 KB: a page has 5 MB.
_PAGE_SLICES = 100
# Of all pages together: some 30,000 pods.
_MOST_LIST_BYTES = 16 << 20
_REMEDIES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "it does not know this pod's service account token",
    HTTPStatus.FORBIDDEN: "this pod's service account may not get, list and watch endpointslices"
    " (discovery.k8s.io) in its namespace",
}


class KubernetesDiscovery:
    """Follows the pods of some Services.

    Args:
        services: Which, in the pod's own namespace.
        metrics: Told of what happens.
    """

    def __init__(self, services: Sequence[Service], *, metrics: WatchMetrics) -> None:
        self._services = services
        self._metrics = metrics

    async def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yield the pods; see Discovery."""
        last: frozenset[Endpoint] | None = None
        api = ClusterApi([service.name for service in self._services])
        following = ListWatch(api, metrics=self._metrics)
        try:
            async with aclosing(following.snapshots()) as snapshots:
                async for slices in snapshots:
                    found = read_slices(slices, services=self._services)
                    if found != last:
                        last = found
                        yield found
        finally:
            await api.close()


class ClusterApi:
    """The EndpointSlices of some Services; connects when it is first asked.

    Where KUBECONFIG is set, as that says; in a pod, as its service account; else as kubectl does.

    Args:
        services: Names of the Services.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._selector = f"{SERVICE_LABEL} in ({','.join(services)})"
        self._client: client.ApiClient | None = None
        self._namespace = ""

    async def close(self) -> None:
        """Close the connections; the next call reads our identity and the authorities anew."""
        if self._client is not None:
            before, self._client = self._client, None
            await before.close()

    async def list(self) -> Mapping[str, Any]:
        """Return an EndpointSliceList, put together from its pages; see SliceApi."""
        items: list[Any] = []
        left, page_token = _MOST_LIST_BYTES, ""
        async with asyncio.timeout(_ANSWER_SECONDS):
            while True:
                more = {"_continue": page_token} if page_token else {}
                async with self._get(limit=_PAGE_SLICES, **more) as response:
                    content = await _read(response, most_bytes=left)
                left -= len(content)
                page = _parse(content)
                own, metadata = page.get("items") or [], page.get("metadata")
                if not (isinstance(own, list) and isinstance(metadata, dict)):
                    raise ApiRefusalError("an answer that is no list")
                items += own
                if len(items) > MOST_OBJECTS:
                    raise too_many_objects()
                page_token = str(metadata.get("continue") or "")
                if not page_token:
                    return {**page, "items": items}

    async def watch(self, version: str, *, seconds: int) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield watch events; see SliceApi."""
        ends = asyncio.get_running_loop().time() + seconds + _WATCH_MARGIN_SECONDS
        async with self._get(
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
        ) as response:
            buffer = bytearray()
            while True:
                # Around each part and not around all: a timeout must not hold while this yields.
                async with asyncio.timeout_at(ends):
                    part = await response.content.readany()
                if not part:
                    break
                # The stream's own lines are short; an EndpointSlice of 1000 pods is not.
                buffer += part
                if len(buffer) > _MOST_EVENT_BYTES:
                    raise ApiRefusalError(f"an event of more than {_MOST_EVENT_BYTES} bytes")
                *lines, rest = buffer.split(b"\n") if b"\n" in part else (buffer,)
                for line in lines:
                    yield _parse(bytes(line))
                buffer = rest
            if buffer:
                raise ConnectionError("a watch broke in the middle of an event")

    @asynccontextmanager
    async def _get(self, **parameters: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and check the answer's status."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                api = client.DiscoveryV1Api(await self._connect())
                call = api.list_namespaced_endpoint_slice_without_preload_content
                response: aiohttp.ClientResponse = await call(
                    self._namespace, label_selector=self._selector, **parameters
                )
            async with response:
                if response.status != HTTPStatus.OK:
                    raise _refusal(response)
                yield response
        except ApiRefusalError as refusal:
            if refusal.code == HTTPStatus.UNAUTHORIZED:
                await self.close()
            raise
        except aiohttp.ClientSSLError as error:
            await self.close()
            raise ConnectionError(str(error)) from None
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from None
        except config.ConfigException as error:  # a token's file is empty while it is renewed
            raise ConnectionError(f"no way to reach it: {error}") from None

    async def _connect(self) -> client.ApiClient:
        if self._client is None:
            settings = client.Configuration()
            self._namespace = await _configure(settings)
            self._client = client.ApiClient(settings)
        return self._client


async def _configure(settings: client.Configuration) -> str:
    """Say where the API is and who we are; return the namespace."""
    if "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(settings)
        return _NAMESPACE_FILE.read_text().strip()  # noqa: ASYNC240 - it lies in memory
    loader = await config.load_kube_config(
        os.environ.get("KUBECONFIG"), client_configuration=settings
    )
    return str(loader.current_context["context"].get("namespace") or "default")


async def _read(response: aiohttp.ClientResponse, *, most_bytes: int) -> bytes:
    """Read an answer.

    Raises:
        ApiRefusalError: It is longer.
    """
    content = bytearray()
    while part := await response.content.readany():
        content += part
        if len(content) > most_bytes:
            raise ApiRefusalError(
                f"a list of more than {_MOST_LIST_BYTES} bytes, which is not read: the servers"
                " that are known stay"
            )
    return bytes(content)


def _refusal(response: aiohttp.ClientResponse) -> ApiRefusalError:
    text = _REMEDIES.get(response.status, response.reason or "refused")
    return ApiRefusalError(
        f"{text} ({response.status})",
        code=response.status,
        retry_after_seconds=_wait_seconds(response.headers.get("Retry-After", "")),
    )


def _wait_seconds(retry_after: str) -> float:
    """Read Retry-After: seconds, or a date, as proxies before the API may say; 0 for anything else.

    No longer than is worth waiting for: an API that asked for an hour may be back in a minute.
    """
    text = retry_after.strip()
    if text.isdecimal() and text.isascii():
        seconds = float(text)
    else:
        try:
            date = parsedate_to_datetime(text)
        except ValueError:
            return 0.0
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - time.time()
    return min(max(0.0, seconds), LONGEST_WAIT_SECONDS)


def _parse(text: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ApiRefusalError("an answer that is no JSON") from None
    if not isinstance(value, dict):
        raise ApiRefusalError("an answer that is no object")
    return value
