"""A gateway in this process, over fake orchestrators, and OpenAI's own client of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import openai
from prometheus_client import CollectorRegistry

from paceline.v1.model_service_pb2 import ChatTemplate
from paceline_gateway.process import HttpProcess
from paceline_gateway.settings import GatewaySettings
from support.fake_orchestrator import FakeOrchestrator, serving
from support.ports import free_address
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TEMPLATE = ChatTemplate(
    fingerprint="t-1",
    source=(
        "{% if messages[0].role == 'assistant' %}"
        "{{ raise_exception('the user speaks first') }}{% endif %}"
        "{{ bos_token }}{% for it in messages %}<{{ it.role }}>{{ it.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    named_tokens={"bos_token": "<s>"},
    special_tokens=["<s>", "</s>"],
)


@dataclass
class GatewayUnderTest:
    """One gateway.

    Attributes:
        fakes: Its orchestrators.
        url: Where it is.
        client: OpenAI's client, which tries nothing twice.
        http: A plain client.
    """

    process: HttpProcess
    registry: CollectorRegistry
    fakes: list[FakeOrchestrator]
    url: str
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def requests(self) -> list[Any]:
        """What the orchestrators were asked."""
        return [request for fake in self.fakes for request in fake.requests]

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": "fake", **body})

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect, to say what no HTTP client would."""
        host, _, port = self.process.addresses["address"].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()


@asynccontextmanager
async def gateway_over(
    *fakes: FakeOrchestrator, **settings: Any
) -> AsyncIterator[GatewayUnderTest]:
    """Run a gateway over these orchestrators, by default one with a chat template."""
    used = list(fakes) or [FakeOrchestrator(chat_template=TEMPLATE)]
    async with AsyncExitStack() as stack:
        for fake in used:
            await stack.enter_async_context(serving(fake))
        values = GatewaySettings(
            **{
                "listen": free_address(),
                "orchestrators": tuple(fake.address for fake in used),
                "drain_seconds": 2,
                **settings,
            }
        )
        registry = CollectorRegistry()
        process = HttpProcess(values, registry=registry)
        await process.begin()
        stack.push_async_callback(process.finish, drain=False)
        await until(
            lambda: all(each.serves for each in process.orchestrators.client.endpoints),
            what="all orchestrators are known",
        )
        url = f"http://{process.addresses['address']}"
        # In plaintext: it takes a while to read all authorities of the machine.
        plain = openai.DefaultAsyncHttpxClient(verify=False)
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain
            )
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=90, verify=False)
        )
        yield GatewayUnderTest(process, registry, used, url, client, http)
