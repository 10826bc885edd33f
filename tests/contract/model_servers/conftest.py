"""The promises of the protos that drafters and targets serve.

Each test runs against a fake host and the real one with the simulated backend, both behind the real
servicers, interceptors and gRPC. With --target or --drafter it runs against a server at an address
instead, if it needs to know no more of it than what the wire says.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from support.model_contract import HOST_MAKERS, connected
from support.model_servers import DRAFTER, TARGET, ModelClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ROLES = {"target": TARGET, "drafter": DRAFTER}


def pytest_generate_tests(metafunc):
    """Let `target` and `drafter` be one of each kind, or the one that is at an address."""
    for role in ROLES.keys() & metafunc.fixturenames:
        address = metafunc.config.getoption(f"--{role}")
        metafunc.parametrize(role, [address] if address else [*HOST_MAKERS], indirect=True)


@pytest.fixture(autouse=True)
def _only_what_can_be_tested_at_an_address(request):
    asked_for = {role for role in ROLES if request.config.getoption(f"--{role}")}
    used = ROLES.keys() & set(request.fixturenames)
    if asked_for and not used:
        pytest.skip("it needs the inside of a server")
    if asked_for and not used <= asked_for:
        pytest.skip(f"no address was given for a {', '.join(used - asked_for)}")


@pytest.fixture(params=[*HOST_MAKERS])
def new_host(request) -> Callable[..., Any]:
    return HOST_MAKERS[request.param]


@asynccontextmanager
async def found(role: Any, kind_or_address: str) -> AsyncIterator[ModelClient]:
    """Connect to a new server of a kind, or to the one at an address, and leave nothing there."""
    if kind_or_address in HOST_MAKERS:
        async with connected(role, HOST_MAKERS[kind_or_address]()) as client:
            yield client
        return
    client = await ModelClient(role, kind_or_address).learn()
    if client.info.role != role.wire:
        pytest.fail(f"{kind_or_address} is no {role.name}", pytrace=False)
    try:
        yield client
    finally:
        for session in client.opened:
            await client.close(session)
        await client.channel.close()


@pytest.fixture
async def target(request) -> AsyncIterator[ModelClient]:
    async with found(TARGET, request.param) as client:
        yield client


@pytest.fixture
async def drafter(request) -> AsyncIterator[ModelClient]:
    async with found(DRAFTER, request.param) as client:
        yield client
