"""The promises of the protos that drafters and targets serve.

Each test runs against the real host with the simulated backend, behind the real servicers,
interceptors and gRPC: by RPCs, and by messages of a stream. A test that knows no more of a server
than the wire says runs against the fake servers of the orchestrator's tests, too, unless it is
marked with a capability that they leave out. With --target or --drafter it runs against a server at
an address instead.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.fake_models import Capability, FakeModelServer
from support.fake_models import serving as fakes_serving
from support.model_contract import PROMPT, a_host, connected
from support.model_servers import DRAFTER, TARGET, ModelClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROLES = {"target": TARGET, "drafter": DRAFTER}
STALLING = {f"stalling_{role}": kind for role, kind in ROLES.items()}
HOST, BY_MESSAGES, FAKE_SERVER = "host", "host, by messages", "fake server"
KINDS = (HOST, BY_MESSAGES, FAKE_SERVER)


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "needs(capability): skipped for the fake servers, which leave that out"
    )


def pytest_generate_tests(metafunc):
    """Let `target` and `drafter` be one of each kind, or the one that is at an address."""
    for role in ROLES.keys() & metafunc.fixturenames:
        address = metafunc.config.getoption(f"--{role}")
        metafunc.parametrize(role, [address] if address else KINDS, indirect=True)
    for fixture in STALLING.keys() & metafunc.fixturenames:
        metafunc.parametrize(fixture, KINDS, indirect=True)


@pytest.fixture(autouse=True)
def _only_what_can_be_tested_at_an_address(request):
    asked_for = {role for role in ROLES if request.config.getoption(f"--{role}")}
    used = ROLES.keys() & set(request.fixturenames)
    if asked_for and not used:
        pytest.skip("it needs the inside of a server")
    if asked_for and not used <= asked_for:
        pytest.skip(f"no address was given for a {', '.join(used - asked_for)}")


@pytest.fixture
async def target(request) -> AsyncIterator[ModelClient]:
    async with found(TARGET, request) as client:
        yield client


@pytest.fixture
async def drafter(request) -> AsyncIterator[ModelClient]:
    async with found(DRAFTER, request) as client:
        yield client


@pytest.fixture
async def stalling_target(request) -> AsyncIterator[ModelClient]:
    """A target that answers about the prompt, and about nothing that is longer."""
    async with found(TARGET, request, stalls=True) as client:
        yield client


@pytest.fixture
async def stalling_drafter(request) -> AsyncIterator[ModelClient]:
    """A drafter that drafts one token after the prompt, and no more."""
    async with found(DRAFTER, request, stalls=True) as client:
        yield client


@asynccontextmanager
async def found(role: Any, request: Any, *, stalls: bool = False) -> AsyncIterator[ModelClient]:
    """Connect to a new server of a kind, or to the one at an address, and leave nothing there."""
    if request.param in {HOST, BY_MESSAGES}:
        by_messages = request.param == BY_MESSAGES
        async with connected(role, a_host(stalls=stalls), by_messages=by_messages) as client:
            yield client
    elif request.param == FAKE_SERVER:
        for marker in request.node.iter_markers("needs"):
            (capability,) = marker.args
            assert isinstance(capability, Capability)
            pytest.skip(f"fake servers leave it out: {capability.value}")
        fake = FakeModelServer(role.name, stalls=lambda text: stalls and len(text) != len(PROMPT))
        async with fakes_serving(fake), at_address(role, fake.address) as client:
            yield client
    else:
        async with at_address(role, request.param) as client:
            yield client


@asynccontextmanager
async def at_address(role: Any, address: str) -> AsyncIterator[ModelClient]:
    client = await ModelClient(role, address).learn()
    if client.info.role != role.wire:
        pytest.fail(f"{address} is no {role.name}", pytrace=False)
    try:
        yield client
    finally:
        for session in client.opened:
            await client.close(session)
        await client.channel.close()
