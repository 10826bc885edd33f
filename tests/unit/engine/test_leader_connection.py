"""How a helping node notices that the node that serves is gone."""

from __future__ import annotations

import socket

import pytest

from paceline_engine.vllm_backend.leader_connection import connect_to_leader


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the platform has no such option")
def test_a_node_without_power_is_noticed_within_half_a_minute():
    with socket.create_server(("127.0.0.1", 0)) as server:
        leader = connect_to_leader(*server.getsockname())
        with leader:
            assert leader.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, interval, count = (
                leader.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * count <= 30
            assert leader.gettimeout() is None  # the first node may be silent for days
