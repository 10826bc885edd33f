"""Where servers of tests listen."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from support.fake_models import FakeModelServer
from support.orchestrating import orchestrating
from support.ports import free_address

_SYSTEM_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not _SYSTEM_RANGE.exists(), reason="the system does not tell them")
async def test_no_server_takes_a_port_that_the_system_could_give_to_another_test():
    target = FakeModelServer("target")
    async with orchestrating(targets=[target]) as system:
        addresses = {target.address, system.address}
    assert len(addresses) == 2
    system_first, system_last = _range_of_the_system()
    for address in addresses:
        port = int(address.rpartition(":")[2])
        assert not system_first <= port <= system_last


def test_an_address_in_use_is_passed_over():
    host, port = free_address().split(":")
    following = f"{host}:{int(port) + 1}"
    with socket.create_server((host, int(port) + 1)):
        assert free_address() != following


def _range_of_the_system():
    return map(int, _SYSTEM_RANGE.read_text().split())
