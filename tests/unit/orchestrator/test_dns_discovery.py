"""Endpoints from DNS: what vanishes is taken as terminating, and an outage changes nothing."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from paceline_orchestrator.fleet.discovery import Availability, Role, Service
from paceline_orchestrator.fleet.discovery.dns import DnsDiscovery, resolve
from paceline_orchestrator.fleet.discovery.metrics import DiscoveryMetrics, WatchMetrics

READY, NOT_READY = Availability.READY, Availability.NOT_READY
TERMINATING = Availability.TERMINATING


async def views(*answers):
    """Return what is known after each answer that changes it; the time between two is 2 s."""
    pending = list(answers)
    now = 0.0

    class OverError(Exception):
        pass

    async def look_up(_name):
        if not pending:
            raise OverError
        answer = pending.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return frozenset(answer)

    async def sleep(seconds):
        nonlocal now
        now += seconds

    metrics = WatchMetrics(DiscoveryMetrics(CollectorRegistry()), of="models")
    discovery = DnsDiscovery(
        [Service("targets.here.svc", Role.TARGET)],
        metrics=metrics,
        look_up=look_up,
        sleep=sleep,
        clock=lambda: now,
    )
    seen = []
    try:
        async for endpoints in discovery.endpoints():
            seen.append({it.address: it.availability for it in endpoints})  # noqa: PERF401
    except OverError:
        return seen


async def test_addresses_come_vanish_and_are_forgotten_after_a_minute():
    seen = await views(["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], *[["10.0.0.2"]] * 40)
    one, two = "10.0.0.1:50051", "10.0.0.2:50051"
    assert seen == [
        {one: READY},
        {one: READY, two: READY},
        {one: TERMINATING, two: READY},
        {two: READY},
    ]


async def test_a_name_without_an_address_is_told_of_once(caplog):
    nobody = "targets.here.svc has no address: it does not exist, or no pod behind it is ready"
    broken = "cannot look up targets.here.svc: no answer"
    await views(*[[]] * 3, *[OSError("no answer")] * 3, ["10.0.0.1"], [])
    assert caplog.messages == [nobody, broken, nobody]


async def test_an_address_that_is_back_is_ready_again():
    seen = await views(["10.0.0.1"], [], ["10.0.0.1"], *[["10.0.0.1"]] * 40)
    assert [list(view.values()) for view in seen] == [[READY], [NOT_READY], [READY]]


async def test_addresses_that_vanish_all_at_once_are_not_taken_as_terminating():
    one, two = "10.0.0.1", "10.0.0.2"
    assert await views([one, two], [], [one], []) == [
        {f"{one}:50051": READY, f"{two}:50051": READY},
        {f"{one}:50051": NOT_READY, f"{two}:50051": NOT_READY},
        {f"{one}:50051": READY, f"{two}:50051": TERMINATING},
        {f"{one}:50051": NOT_READY, f"{two}:50051": NOT_READY},
    ]


async def test_the_last_view_survives_an_outage():
    down = socket.gaierror(socket.EAI_AGAIN, "try again")
    assert await views(["10.0.0.1"], *[down] * 100) == [{"10.0.0.1:50051": READY}]


async def test_several_services_are_one_view_each_with_its_port_role_and_certificate():
    services = (
        Service("targets.here.svc", Role.TARGET, 7),
        Service("drafters.here.svc", Role.DRAFTER),
    )
    metrics = WatchMetrics(DiscoveryMetrics(CollectorRegistry()), of="models")

    async def look_up(name):
        return frozenset({"10.0.0.1"} if name.startswith("t") else {"fd00::1"})

    async for endpoints in DnsDiscovery(services, metrics=metrics, look_up=look_up).endpoints():
        found = {it.role: it for it in endpoints}
        break
    assert found[Role.TARGET].address == "10.0.0.1:7"
    assert found[Role.DRAFTER].address == "[fd00::1]:50051"
    assert found[Role.DRAFTER].tls_name == "drafters.here.svc"


async def test_a_name_that_nobody_answers_holds_up_no_other(monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.discovery.dns._PATIENCE_SECONDS", 0.01)
    asked = Counter()
    answered = asyncio.Event()

    async def look_up(name):
        asked[name] += 1
        if name.startswith("drafters"):
            await answered.wait()
        return frozenset({f"10.0.0.{min(3, asked[name])}"})

    services = [Service(f"{role}s.here", role) for role in (Role.DRAFTER, Role.TARGET)]
    metrics = WatchMetrics(DiscoveryMetrics(CollectorRegistry()), of="models")
    found = DnsDiscovery(
        services, metrics=metrics, look_up=look_up, sleep=lambda _: asyncio.sleep(0)
    )
    seen = []
    async with aclosing(found.endpoints()) as views:
        async for endpoints in views:
            seen.append({it.address for it in endpoints if it.availability is READY})
            if len(seen) == 3:
                answered.set()
            if any(it.role is Role.DRAFTER for it in endpoints):
                break
    assert seen[:3] == [{"10.0.0.1:50051"}, {"10.0.0.2:50051"}, {"10.0.0.3:50051"}]
    assert asked["drafters.here"] == 1
    assert not [it for it in asyncio.all_tasks() if it.get_name().startswith("look up")]


async def test_a_name_is_resolved_without_keeping_the_loop():
    assert await resolve("localhost") in ({"127.0.0.1"}, {"::1"})


@pytest.mark.parametrize("code", ["EAI_NONAME", "EAI_NODATA"])
async def test_a_service_without_a_ready_pod_has_no_address(monkeypatch, code):
    def nobody(*_arguments, **_options):
        raise socket.gaierror(getattr(socket, code), "nobody")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    assert await resolve("targets.here.svc") == frozenset()


async def test_a_resolver_that_cannot_tell_says_so(monkeypatch):
    def away(*_arguments, **_options):
        raise socket.gaierror(socket.EAI_AGAIN, "away")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    with pytest.raises(OSError, match="away"):
        await resolve("targets.here.svc")
