"""Many HTTP requests at once, through a gateway that has no queue of its own."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from prometheus_client import CollectorRegistry

from paceline_gateway.process import HttpProcess
from paceline_gateway.settings import GatewaySettings
from support.orchestrating import orchestrating, targets
from support.waiting import until

COUNT = 300


async def test_requests_beyond_what_is_worked_on_wait_and_beyond_the_limit_come_again():
    async with orchestrating(targets=targets(1, latency_seconds=0), request_limit=8) as system:
        settings = GatewaySettings(
            listen="127.0.0.1:0", orchestrators=(system.address,), request_limit=250
        )
        process = HttpProcess(settings, registry=CollectorRegistry())
        await process.begin()
        url = f"http://{process.addresses['address']}"
        limits = httpx.Limits(max_connections=None)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
                model = (await client.get("/v1/models")).json()["data"][0]["id"]
                answers = await asyncio.gather(
                    *(
                        client.post(
                            "/v1/completions",
                            json={"model": model, "prompt": "p", "max_tokens": 1},
                        )
                        for _ in range(COUNT)
                    )
                )
        finally:
            await process.finish(drain=False)
        statuses = Counter(it.status_code for it in answers)
        assert statuses.keys() <= {200, 429}
        assert statuses[200] >= 200, "four fifths of the limit are here at once"
        assert all(it.headers["retry-after"] for it in answers if it.status_code == 429)
        servicer = system.application.servicer
        await until(
            lambda: not (servicer.running_count or servicer.waiting_count), what="none is left"
        )
