"""The sessions of a request are kept, whatever one of their servers does."""

from __future__ import annotations

import asyncio

from paceline_orchestrator.decoding import request_servers

ROUNDS = 20


class Session:
    """Counts its renewals; they hang while it is told to."""

    def __init__(self):
        self.answers = asyncio.Event()
        self.answers.set()
        self.under_way = self.begun = self.most_at_once = 0

    async def renew(self, *, idle_seconds):
        self.begun += 1
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        await self.answers.wait()
        self.under_way -= 1


async def let_others_run():
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


async def test_sessions_are_renewed_at_once_and_each_once_at_a_time(monkeypatch):
    monkeypatch.setattr(request_servers, "_RENEW_SECONDS", 0)
    sessions = [Session() for _ in range(3)]
    hung = sessions[0]
    hung.answers.clear()
    renewing = asyncio.create_task(request_servers.renew_sessions(lambda: sessions))
    await let_others_run()
    assert [it.begun for it in sessions] == [1, 1, 1]
    hung.answers.set()
    await let_others_run()
    assert all(it.begun > 1 for it in sessions)
    assert all(it.most_at_once == 1 for it in sessions)
    renewing.cancel()
    await asyncio.wait([renewing])
