"""The life of a server: loading, draining, its health, its end."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from functools import partial
from itertools import chain, repeat

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.errors import DrainingError, LoadingError, SessionNotFoundError
from paceline.v1 import target_service_pb2
from paceline_serving import lifecycle
from support.model_contract import PROMPT, a_host, is_running, until
from support.model_servers import DRAFTER, TARGET, ModelClient, serving
from support.ports import free_address


async def health_of(client: ModelClient, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
    return answer.status


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_server_that_loads_says_so_and_is_not_serving():
    loaded = threading.Event()
    host = a_host(loaded=loaded)
    async with serving(TARGET, host, begin=False) as process:
        beginning = asyncio.create_task(process.begin())
        await until(lambda: "address" in process.addresses)
        client = ModelClient(TARGET, process.addresses["address"])
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(
            health_pb2.HealthCheckRequest(service="paceline.v1.TargetService"),
            timeout=60,
            wait_for_ready=True,
        )
        seen = aiter(watch)
        assert (await anext(seen)).status == NOT_SERVING
        for attempt in (client.learn(), client.open(), client.renew("x")):
            error = await client.error_of(attempt)
            assert isinstance(error, LoadingError | SessionNotFoundError)
        assert isinstance(await client.error_of(client.learn()), LoadingError)
        assert await health_of(client, "liveness") == SERVING
        loaded.set()
        await beginning
        assert (await anext(seen)).status == SERVING
        for name in ("Model", "Session", "Target"):
            assert await health_of(client, f"paceline.v1.{name}Service") == SERVING
        assert await health_of(client) == SERVING
        await process.finish(drain=False)
        await client.channel.close()


async def test_the_metrics_port_holds_its_reserve_of_descriptors_before_anybody_comes(monkeypatch):
    order = []
    kind = type(grpc.aio.server())
    start = kind.start

    class Endpoint(lifecycle.MetricsEndpoint):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            order.append("metrics")

    async def starting(server):
        order.append("server")
        await start(server)

    monkeypatch.setattr(kind, "start", starting)
    monkeypatch.setattr(lifecycle, "MetricsEndpoint", Endpoint)
    async with serving(TARGET, a_host(), metrics_listen=free_address()):
        assert order == ["metrics", "server", "server"]  # the main port, and that of health


async def test_a_draining_server_refuses_new_sessions_and_ends_open_ones():
    async with serving(TARGET, a_host(), drain_seconds=20) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        session = await target.open()
        draining = asyncio.create_task(process.finish())
        await asyncio.sleep(0)
        watch = health_pb2_grpc.HealthStub(target.channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        assert (await anext(aiter(watch))).status == NOT_SERVING
        assert isinstance(await target.error_of(target.open()), DrainingError)
        assert (await target.verify(target.call(session, 1, new=PROMPT))).held_length == 4
        await target.close(session)
        await draining
        await target.channel.close()


@pytest.mark.parametrize("role", [TARGET, DRAFTER], ids=lambda role: role.name)
async def test_what_runs_and_what_waits_at_the_end_of_a_drain_hears_draining(role):
    host = a_host(stalls=True)
    async with serving(role, host, drain_seconds=0.01) as process:
        client = await ModelClient(role, process.addresses["address"]).learn()
        work = client.verify if role is TARGET else partial(client.draft, max_tokens=1)
        sessions = [await client.open() for _ in range(3)]
        for session in sessions:
            await work(client.call(session, 1, new=PROMPT))
        async with asyncio.TaskGroup() as group:
            cut = [
                group.create_task(client.error_of(work(client.call(it, 2, held=PROMPT, new=(1,)))))
                for it in sessions
            ]
            for session in sessions:
                await until(lambda it=session: host.live_sequence(it, caller="") == 2)
            await process.finish()
        assert [type(it.result()) for it in cut] == [DrainingError] * 3
        await client.channel.close()


async def test_during_the_drain_delay_a_server_that_says_not_serving_still_serves():
    async with serving(TARGET, a_host(), drain_delay_seconds=600) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        draining = asyncio.create_task(process.finish())
        watch = health_pb2_grpc.HealthStub(target.channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=60
        )
        async for answer in watch:
            if answer.status == NOT_SERVING:
                break
        session = await target.open()
        assert (await target.verify(target.call(session, 1, new=PROMPT))).held_length == 4
        draining.cancel()
        await asyncio.wait([draining])
        await target.channel.close()


async def test_health_answers_while_a_forward_runs():
    host = a_host(stalls=True)
    async with serving(TARGET, host) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        probe = ModelClient(TARGET, process.addresses["health_address"])
        session = await target.open()
        await target.verify(target.call(session, 1, new=PROMPT))
        stalled = target.stub.Verify(
            target_service_pb2.VerifyRequest(call=target.call(session, 2, held=PROMPT, new=(1,))),
            timeout=60,
        )
        await until(lambda: is_running(host))
        assert await health_of(target) == SERVING
        assert await health_of(probe) == SERVING
        stalled.cancel()
        await target.channel.close()
        await probe.channel.close()


async def test_health_says_no_while_the_model_hangs(caplog):
    host = a_host()
    async with (
        serving(TARGET, host) as process,
        grpc.aio.insecure_channel(process.addresses["address"]) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="paceline.v1.TargetService")
        watch = health.Watch(request, timeout=60)
        states = [(await watch.read()).status]
        host.overdue_seconds = lambda: 12.0
        states.append((await watch.read()).status)
        alive = await health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)
        host.overdue_seconds = lambda: 0.0
        states.append((await watch.read()).status)
        watch.cancel()
    yes, no = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert states == [yes, no, yes]
    assert alive.status == yes
    assert "a forward has taken 12 s" in caplog.text
    assert "answers again" in caplog.text


@pytest.mark.parametrize(
    ("looks", "hung"),
    [
        ([12, 131, 132], "120 s"),
        ([400, 519, 520], "120 s"),  # patience is not part of it, however long it was
        ([12, 131, 0, 50, 169, 171], "121 s"),  # each forward is given all of it
    ],
)
async def test_a_model_that_hangs_for_long_ends_the_process(looks, hung):
    host = a_host()
    overdue = chain(looks, repeat(looks[-1] + 1000))
    async with serving(TARGET, host, hang_limit_seconds=120) as process:
        host.overdue_seconds = lambda: float(next(overdue))
        async with asyncio.timeout(30):
            assert await process.stopping() == f"a forward has hung for {hung}"


async def test_without_a_limit_a_model_may_hang_for_ever():
    host = a_host()
    overdue = chain([12.0, 1e9], repeat(0.0))
    async with serving(TARGET, host, hang_limit_seconds=None) as process:
        async with grpc.aio.insecure_channel(process.addresses["address"]) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=60
            )
            states = [(await watch.read()).status]
            host.overdue_seconds = lambda: next(overdue)
            async with asyncio.timeout(30):
                states += [(await watch.read()).status for _ in range(2)]
            watch.cancel()
        process.stop_soon("it was asked to")
        assert await process.stopping() == "it was asked to", "and nobody had before"
    assert states == [SERVING, NOT_SERVING, SERVING]


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


async def test_connections_that_never_call_leave_descriptors_to_probes_and_scrapers(monkeypatch):
    monkeypatch.setattr("paceline_serving.process._MOST_CONNECTIONS", 6)
    async with serving(TARGET, a_host(), metrics_listen="127.0.0.1:0") as process:
        host, port = process.addresses["address"].split(":")
        idle = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(PREFACE)
            idle.append((reader, writer))
            try:
                greeting = await reader.read(9)
            except ConnectionError:
                greeting = b""
            assert bool(greeting) == (len(idle) <= 3)  # half of six
        async with grpc.aio.insecure_channel(process.addresses["health_address"]) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
        page = f"http://{process.addresses['metrics_address']}/metrics"
        metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(page, timeout=60).read())
        assert b"process_open_fds" in metrics
        for _, writer in idle:
            writer.close()


async def test_a_server_whose_device_broke_ends_without_waiting_for_its_sessions():
    async with serving(TARGET, a_host(), drain_seconds=600) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        await target.open()
        process.stop_soon("the device is lost")
        process.stop_soon()
        assert await process.stopping() == "the device is lost"
        await process.finish(drain=False)
        await target.channel.close()
