"""A session that its request leaves alone for longer than its lease is there afterwards."""

from __future__ import annotations

import asyncio

import pytest

from paceline_orchestrator.decoding import request_servers
from support.clock import Clock
from support.gated import Gate, gated_host
from support.in_process import in_process_system
from support.streams import PROMPT
from support.waiting import until

TOKENS = 12
OPTIONS = {"strategy": "speculative", "lookahead": 2, "max_tokens": TOKENS}


@pytest.fixture
def _hasty(monkeypatch):
    """Renewals come soon: the clock of the leases moves only after them."""
    monkeypatch.setattr(request_servers, "_RENEW_SECONDS", 0.02)


def has_whole_leases(host, clock):
    sessions = list(host._sessions)
    return sessions and all(
        session.expires_at == clock() + session.spec.lease_seconds for session in sessions
    )


@pytest.mark.usefixtures("_hasty")
@pytest.mark.parametrize(("idle", "busy"), [("drafter", "target"), ("target", "drafter")])
async def test_an_idle_session_outlives_many_leases_while_its_request_goes_on(idle, busy):
    clock = Clock()
    gates = {"drafter": Gate(), "target": Gate()}
    hosts = {role: gated_host(gate, clock=clock) for role, gate in gates.items()}
    async with in_process_system(drafters=[hosts["drafter"]], targets=[hosts["target"]]) as system:
        gates[idle].open()
        running = asyncio.create_task(system.client.generate(PROMPT, **OPTIONS).collect())
        # Its first forward: an answer after a prompt may take as long as the request may.
        await until(lambda: hosts[busy].statistics().forwards_running, what="one is busy")
        await until(lambda: has_whole_leases(hosts[idle], clock), what="the other has a session")
        await until(lambda: not hosts[idle].statistics().calls_live, what="the other is idle")
        for _ in range(4):
            clock.now += 10
            await until(lambda: has_whole_leases(hosts[idle], clock), what="it is renewed")
        gates[busy].open()
        done = await running
        assert "session_lost" not in done.finished.statistics.fallbacks
        assert hosts[idle].statistics().sessions_expired == 0
        plain = system.client.generate(PROMPT, max_tokens=TOKENS, strategy="autoregressive")
        assert done.token_ids == (await plain.collect()).token_ids
        await system.settled()
