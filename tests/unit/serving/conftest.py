"""Fixtures of the tests of gRPC itself: a bare server, near and far, and channels to it."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest

from support import bare_server
from support.bare_server import BareServer


@pytest.fixture
async def service():
    return BareServer()


@pytest.fixture
async def channel(service):
    async with service.running() as address, grpc.aio.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def far_address():
    """A server in another process: what that one loses is not lost here."""
    with subprocess.Popen(
        (sys.executable, bare_server.__file__),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.fixture
async def far_channel(far_address):
    async with grpc.aio.insecure_channel(far_address) as channel:
        yield channel
