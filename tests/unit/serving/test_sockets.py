"""A socket that is somebody's stays theirs, and an address that cannot be had says why."""

from __future__ import annotations

import socket

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline_serving.lifecycle import bind
from paceline_serving.metrics_endpoint import MetricsEndpoint
from paceline_serving.sockets import claimed, listen


async def begun(address):
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    bound = bind(server, address, credentials=None)
    await server.start()
    return server, bound


async def test_a_second_server_leaves_the_first_ones_socket_where_it_is(tmp_path):
    path = tmp_path / "paceline.sock"
    first, _ = await begun(f"unix:{path}")
    inode = path.stat().st_ino
    for form in (f"unix:{path}", f"unix://{path}"):
        with pytest.raises(OSError, match="another process listens there"):
            await begun(form)
    assert path.stat().st_ino == inode
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        await channel.channel_ready()
    await first.stop(None)


async def test_the_socket_of_a_process_that_is_dead_is_replaced(tmp_path):
    path = tmp_path / "paceline.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()
    assert path.exists()
    server, _ = await begun(f"unix:{path}")
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        await channel.channel_ready()
    await server.stop(None)
    assert sorted(tmp_path.iterdir()) == []


async def test_a_socket_that_has_no_room_for_one_more_is_somebodys(tmp_path):
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waits:
        busy.bind(str(path))
        busy.listen(0)
        waits.connect(str(path))
        with pytest.raises(OSError, match="another process"), claimed(f"unix:{path}"):
            pass


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(OSError, match="a file there is not a socket"):
        await begun(f"unix:{path}")
    assert path.read_text() == "mine"


async def test_a_path_that_cannot_be_looked_at_is_named_with_the_cause(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    other = tmp_path / "datagrams.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(other))
        cases = {
            tmp_path / "notes.txt" / "a.sock": "Not a directory",
            tmp_path / ("x" * 300): "File name too long",
            other: "Protocol wrong type for socket",
        }
        for path, cause in cases.items():
            with pytest.raises(OSError, match=rf"^cannot listen on unix:{path}: {cause}$"):
                await begun(f"unix:{path}")
    assert other.exists()


async def test_an_address_that_cannot_be_had_is_named_with_the_cause(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        cases = {
            used: "Address already in use",
            "203.0.113.1:1": "Cannot assign requested address",
            "no.such.host.invalid:1": "(Name or service|Temporary failure|nodename)",
        }
        for address, cause in cases.items():
            for attempt in (begun, _listens, _shows_metrics):
                with pytest.raises(OSError, match=f"cannot listen on {address}: {cause}"):
                    await attempt(address)
    for missing in (tmp_path / "nowhere" / "a.sock", tmp_path / ("x" * 200)):
        with pytest.raises(OSError, match=r"cannot listen on unix:.*: .*(No such|too long)"):
            await begun(f"unix:{missing}")


async def _listens(address):
    listen(address).close()


async def _shows_metrics(address):
    MetricsEndpoint(address, registry=CollectorRegistry(), pages={}).close()
