"""Where a case is played: a scripted orchestrator, or a live system of real processes."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import grpc

from support.conformance.relay import Relay
from support.conformance.scripted import Call, ScriptedOrchestrator
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from paceline_serving.security import TlsFiles
    from support.system import System

_GENERATE = "paceline.v1.OrchestratorService/Generate"
_IDLE = (
    "paceline_sessions_active",
    "paceline_calls_live",
    "paceline_num_requests_waiting",
    "paceline_kv_cache_usage_perc",
)


class LoopThread:
    """An event loop on a thread of its own, for servers beside blocking tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted servers")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()


class ScriptedStage:
    """The scripted orchestrators of one case: one, or several that share a script."""

    def __init__(self, thread: LoopThread, server: dict[str, Any], *, files: TlsFiles) -> None:
        self._thread = thread
        cuts = any("cut" in step for script in server.get("script", ()) for step in script)
        line = server.get("relay")
        self._relay = Relay(**(line or {})) if cuts or line is not None else None
        calls: list[Call] = []
        self._fakes = [
            ScriptedOrchestrator(
                server,
                credentials=_credentials(server.get("tls"), files),
                relay=self._relay,
                calls=calls,
                number=number,
            )
            for number in range(server.get("orchestrators", 1))
        ]

    @contextmanager
    def playing(self) -> Iterator[ScriptedStage]:
        for fake in self._fakes:
            self._thread.run(fake.start())
        if self._relay is not None:
            self._relay.upstream = self._fakes[0].address
            self._thread.run(self._relay.__aenter__())
        try:
            yield self
        finally:
            if self._relay is not None:
                self._thread.run(self._relay.__aexit__())
            for fake in self._fakes:
                self._thread.run(fake.stop())

    @property
    def address(self) -> str:
        return self._fakes[0].address if self._relay is None else self._relay.address

    @property
    def addresses(self) -> dict[str, str]:
        """What stands for each orchestrator's address."""
        return {f"${fake.number}": fake.address for fake in self._fakes}

    def restart(self) -> None:
        self._thread.run(self._fakes[0].stop())
        self._thread.run(self._fakes[0].start())

    def drain(self) -> None:
        """End the orchestrator as one that is told to, beside the next one."""
        self._thread.run(self._fakes[0].drain())

    def saw(self) -> dict[str, Any]:
        """Wait until every call is over, and return what was seen."""
        eventually(
            lambda: all(call.ended for call in self._fakes[0].calls), what="every call has ended"
        )
        return self._fakes[0].saw()


class LiveStage:
    """A live system for one case; afterwards nothing of it may be left at the servers."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._before = self._ends()

    @property
    def address(self) -> str:
        return self._system.orchestrators[0].address

    @property
    def addresses(self) -> dict[str, str]:
        """What stands for each orchestrator's address."""
        return {"$0": self.address}

    def restart(self) -> None:
        orchestrator = self._system.orchestrators[0]
        orchestrator.kill()
        orchestrator.revive()
        self._before = self._ends()

    def saw(self) -> dict[str, Any]:
        """Wait until the servers are idle, and return how generations ended."""
        eventually(self._is_idle, what="sessions, calls, queue and requests are gone")
        now = self._ends()
        return {"ends": {code: now[code] - self._before[code] for code in now}}

    def _is_idle(self) -> bool:
        orchestrator = self._system.orchestrators[0]
        return not (
            orchestrator.metric("paceline_num_requests_running")
            or orchestrator.metric("paceline_rpcs_in_flight", method=_GENERATE)
            or any(server.metric(name) for server in self._system.models for name in _IDLE)
        )

    def _ends(self) -> dict[str, float]:
        orchestrator = self._system.orchestrators[0]
        return {
            code: orchestrator.metric("paceline_rpcs_total", method=_GENERATE, code=code)
            for code in ("OK", "CANCELLED", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT")
        }


@contextmanager
def refusing_address() -> Iterator[str]:
    """Hold a port on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def _credentials(kind: str | None, files: TlsFiles) -> grpc.ServerCredentials | None:
    if kind is None:
        return None
    assert files.certificate is not None
    assert files.key is not None
    assert files.authority is not None
    mutual = kind == "mutual"
    return grpc.ssl_server_credentials(
        [(files.key.read_bytes(), files.certificate.read_bytes())],
        root_certificates=files.authority.read_bytes() if mutual else None,
        require_client_auth=mutual,
    )
