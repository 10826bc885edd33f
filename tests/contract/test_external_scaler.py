"""KEDA's external scaler, called as KEDA calls it; and orchestrators that answer for all."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.errors import InvalidFieldError, LoadingError
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from paceline_orchestrator.fleet.discovery import Endpoint, Role, StaticDiscovery
from paceline_orchestrator.scaling.autoscaler import Autoscaler
from paceline_orchestrator.scaling.demand import Demand
from paceline_orchestrator.scaling.external_scaler import REPLICA_DEMAND, ScalerServer
from paceline_orchestrator.scaling.externalscaler import externalscaler_pb2 as keda
from paceline_orchestrator.scaling.externalscaler.externalscaler_pb2_grpc import ExternalScalerStub
from paceline_orchestrator.scaling.peers import Peers
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.transport import pod_channel
from support.fake_models import FakeModelServer, serving
from support.orchestrating import PROMPT, new_orchestrator, orchestrating
from support.waiting import until

DESIRED = "paceline_desired_verifiers"
REFERENCE = keda.ScaledObjectRef(
    name="target", namespace="here", scaler_metadata={"scalerAddress": "scaler:50053"}
)


async def desired(stub):
    request = keda.GetMetricsRequest(scaled_object_ref=REFERENCE, metric_name=DESIRED)
    (value,) = (await stub.GetMetrics(request, timeout=60)).metric_values
    assert value.metric_name == DESIRED
    assert value.metric_value == value.metric_value_float, "older and newer KEDAs see the same"
    return value.metric_value


async def until_desired(system, stub, numbers):
    """Wait until so many verifiers are wanted, and hear it as KEDA does."""
    autoscaler = system.application.autoscaler
    await until(lambda: autoscaler.desired in numbers, what=f"{numbers} are wanted")
    return await desired(stub)


@asynccontextmanager
async def scaled(**settings):
    """Run a system; yield it and its scaler, with a target nine times as slow as the drafter."""
    targets = [FakeModelServer("target", latency_seconds=0.009)]
    drafters = [FakeModelServer("drafter", latency_seconds=0.001)]
    async with orchestrating(
        targets=targets, drafters=drafters, scaler_listen="127.0.0.1:0", **settings
    ) as system:
        address = system.process.addresses["scaler_address"]
        async with grpc.aio.insecure_channel(address) as channel:
            yield system, ExternalScalerStub(channel)


async def test_keda_is_told_what_streams_want_while_they_run_and_for_a_while_after():
    async with scaled(verifier_lookahead=3, scale_down_seconds=0, least_verifiers=1) as (
        system,
        stub,
    ):
        (spec,) = (await stub.GetMetricSpec(REFERENCE, timeout=60)).metric_specs
        assert (spec.metric_name, spec.target_size, spec.target_size_float) == (DESIRED, 1, 1.0)
        pushes = stub.StreamIsActive(REFERENCE)
        assert (await pushes.read()).result is False
        assert await desired(stub) == 1

        stream = system.call(max_tokens=3000, timeout=60, strategy=pb.STRATEGY_DISTRIBUTED)
        await stream.read()
        assert (await pushes.read()).result is True
        assert (await stub.IsActive(REFERENCE, timeout=60)).result is True
        assert await until_desired(system, stub, {3}) == 3
        stream.cancel()
        assert await until_desired(system, stub, {1}) == 1
        assert (await stub.IsActive(REFERENCE, timeout=60)).result is True, "as it was just now"
        pushes.cancel()


async def test_each_stream_counts_and_the_limits_hold():
    async with scaled(most_verifiers=2) as (system, stub):
        streams = [
            system.call(max_tokens=3000, timeout=60, strategy=pb.STRATEGY_AUTOREGRESSIVE)
            for _ in range(3)
        ]
        for stream in streams:
            await stream.read()
        assert await until_desired(system, stub, {2}) == 2
        for stream in streams:
            stream.cancel()


async def test_it_is_known_when_keda_last_asked_and_a_replica_that_asks_is_not_taken_for_it():
    async with scaled() as (system, stub):
        autoscaler = system.application.autoscaler

        def age():
            return autoscaler._asked_age.collect()[0].samples[0].value

        await until(lambda: age() > 0, what="nobody has asked since the start")
        asked_at = autoscaler._asked_at
        await stub.GetMetrics(keda.GetMetricsRequest(metric_name=REPLICA_DEMAND), timeout=60)
        assert autoscaler._asked_at == asked_at
        await desired(stub)
        assert autoscaler._asked_at > asked_at


async def test_a_metric_of_another_name_is_refused():
    async with scaled() as (_, stub):
        for name in ("", "s0-paceline_desired_verifiers"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetMetrics(keda.GetMetricsRequest(metric_name=name), timeout=60)
            assert isinstance(decode(refused.value), InvalidFieldError)


async def test_the_bytes_are_those_of_kedas_contract():
    """Written by hand from the contract: field 1 strings and lists, 2 integers, 3 doubles."""
    reference = b"\x0a\x06target\x12\x04here"
    name = b"\x0a\x1a" + DESIRED.encode()
    one = b"\x10\x01\x19\x00\x00\x00\x00\x00\x00\xf0\x3f"
    async with scaled() as (system, _):
        address = system.process.addresses["scaler_address"]
        async with grpc.aio.insecure_channel(address) as channel:

            async def call(method, request):
                path = f"/externalscaler.ExternalScaler/{method}"
                return await channel.unary_unary(path)(request, timeout=60)

            assert await call("IsActive", reference) == b""
            entry = b"\x0a" + bytes([len(name + one)]) + name + one
            assert await call("GetMetricSpec", reference) == entry
            request = b"\x0a" + bytes([len(reference)]) + reference + b"\x12\x1a" + DESIRED.encode()
            assert await call("GetMetrics", request) == entry


async def test_it_answers_before_there_is_a_target_and_a_refused_request_is_demand(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.shortage.WAIT_SECONDS", 0.05)
    target = FakeModelServer("target")
    async with serving(target):
        await target.set_serving(False)
        settings = OrchestratorSettings(
            listen="127.0.0.1:0",
            health_listen="",
            targets=(target.address,),
            scaler_listen="127.0.0.1:0",
        )
        process, _ = new_orchestrator(settings)
        beginning = asyncio.create_task(process.begin())
        await until(lambda: "scaler_address" in process.addresses, what="the scaler listens")
        async with (
            grpc.aio.insecure_channel(process.addresses["scaler_address"]) as scaler,
            grpc.aio.insecure_channel(process.addresses["address"]) as channel,
        ):
            stub, orchestrator = ExternalScalerStub(scaler), OrchestratorServiceStub(channel)
            pushes = stub.StreamIsActive(REFERENCE)
            assert (await pushes.read()).result is False
            status = ""
            while status != "NOT_SERVING":
                info = await orchestrator.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=60)
                status = info.servers[0].status if info.servers else ""
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in orchestrator.Generate(request, timeout=60):
                    pass
            error = decode(refused.value)
            assert isinstance(error, LoadingError)
            assert "NOT_SERVING): try again if it is still loading" in error.message
            assert (await pushes.read()).result is True
            await target.set_serving(True)
            await beginning
        await process.finish()


# --- several orchestrators ---------------------------------------------------------------------


class Replica:
    """An orchestrator, as far as it asks for verifiers."""

    def __init__(self, replica_id, **demand):
        self.replica_id = replica_id
        self.now = Demand(**demand)
        self.woken = asyncio.Event()

    def demand(self):
        return self.now


@asynccontextmanager
async def replicas(*meters, addresses):
    """Run an autoscaler and its server for each; every one knows all, and `addresses` beside."""
    settings = OrchestratorSettings(
        targets=("127.0.0.1:1",), scaler_listen="127.0.0.1:0", scale_down_seconds=0
    )
    cluster = SimpleNamespace(known=asyncio.get_running_loop().create_future())

    class Everyone:
        async def endpoints(self):
            yield await cluster.known
            await asyncio.Event().wait()

    def open_channel(endpoint):
        return pod_channel(endpoint.address, credentials=None)

    async with _entered(
        [
            Peers(Everyone(), open_channel=open_channel, replica_id=meter.replica_id)
            for meter in meters
        ]
    ) as peers:
        scalers = [
            Autoscaler(
                meter,
                settings=settings,
                registry=CollectorRegistry(),
                replica_id=meter.replica_id,
                others=peer.demand,
            )
            for meter, peer in zip(meters, peers, strict=True)
        ]
        async with (
            _entered(scalers),
            _entered([ScalerServer(it, settings) for it in scalers]) as it,
        ):
            everyone = [*(server.address for server in it), *addresses]
            cluster.known.set_result(
                frozenset(Endpoint(address, address, Role.ORCHESTRATOR) for address in everyone)
            )
            yield scalers


@asynccontextmanager
async def _entered(managers):
    for manager in managers:
        await manager.__aenter__()
    try:
        yield managers
    finally:
        for manager in managers:
            await manager.__aexit__(None, None, None)


async def test_each_replica_answers_for_all_of_them_and_counts_none_twice():
    meters = [Replica(1, stream_verifiers=3, is_active=True), Replica(2, stream_verifiers=4)]
    async with replicas(*meters, addresses=[]) as scalers:
        await until(lambda: {it.desired for it in scalers} == {7}, what="both say 7")
        assert all(it.is_active for it in scalers)
        meters[0].now = Demand(stream_verifiers=1)
        await until(lambda: {it.desired for it in scalers} == {5}, what="both say 5")
        assert not any(it.is_active for it in scalers)


async def test_a_replica_with_two_addresses_counts_once():
    meters = [
        Replica(1),
        Replica(2, stream_verifiers=3),
        Replica(2, stream_verifiers=3),
        Replica(3, stream_verifiers=1),
    ]
    async with replicas(*meters, addresses=[]) as scalers:
        await until(lambda: scalers[0].desired == 4, what="it says 4")
        assert scalers[0].desired == 4


async def test_another_process_at_an_address_speaks_for_itself_alone():
    here, there = Replica(1), Replica(2, stream_verifiers=8, is_active=True)
    async with replicas(here, there, addresses=[]) as scalers:
        await until(lambda: scalers[0].desired == 8, what="it says 8")
        scalers[1].replica_id, there.now = 3, Demand(stream_verifiers=2)
        await until(lambda: scalers[0].desired == 2, what="it says 2")
        assert not scalers[0].is_active


async def test_a_replica_that_does_not_answer_holds_up_nobody():
    meters = [Replica(1, stream_verifiers=3)]
    async with replicas(*meters, addresses=["127.0.0.1:1"]) as scalers:
        await until(lambda: scalers[0].desired == 3, what="it says 3")


async def test_a_replica_that_goes_just_when_it_is_asked_counts_nothing():
    channel, reached = grpc.aio.insecure_channel("127.0.0.1:1"), asyncio.Event()
    await channel.close()

    def open_channel(_endpoint):
        reached.set()
        return channel

    here = StaticDiscovery((Endpoint("a", "127.0.0.1:1", Role.ORCHESTRATOR),))
    async with Peers(here, open_channel=open_channel, replica_id=1) as peers:
        await reached.wait()
        assert await peers.demand() == Demand()


async def test_a_static_list_of_peers_may_be_this_replica_alone():
    peers = Peers(StaticDiscovery(()), open_channel=lambda _: None, replica_id=1)
    async with peers:
        assert await peers.demand() == Demand()
