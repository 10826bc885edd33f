"""What an orchestrator tells of a system, with one fact or another."""

from __future__ import annotations

from typing import Any

from paceline import ServerInfo, SystemInfo


def a_server(name: str = "target-0", **facts: Any) -> ServerInfo:
    """Make a target that is ready; facts are fields of `ServerInfo`."""
    usual = {
        "address": "127.0.0.1:50051",
        "role": "target",
        "ready": True,
        "status": "",
        "model_fingerprint": "f",
        "decode_step_ns": 0,
    }
    return ServerInfo(name=name, **{**usual, **facts})


def a_system(*servers: ServerInfo, **facts: Any) -> SystemInfo:
    """Make a system of some servers; facts are fields of `SystemInfo`."""
    usual = {
        "version": "1",
        "model_name": "fake",
        "model_fingerprint": "f",
        "tokenizer_fingerprint": "t",
        "vocabulary_size": 10,
        "context_length": 10,
        "running_request_count": 0,
    }
    return SystemInfo(servers=servers, **{**usual, **facts})
