"""Orchestrators are watched for as long as the gateway lives, whatever is wrong for a while."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace

from paceline.errors import InvalidFieldError
from paceline_gateway import watch
from paceline_gateway.watch import Watch


async def test_a_tls_file_that_is_away_for_a_while_ends_no_watch_and_is_told_once(
    monkeypatch, caplog
):
    monkeypatch.setattr(watch, "_RECONNECT_SECONDS", 0.0)
    attempts, enough = [], asyncio.Event()

    def connect():
        attempts.append(None)
        if len(attempts) == 3:
            enough.set()
        raise InvalidFieldError("tls.pem: No such file or directory")

    async def knock():
        raise AssertionError("nobody serves")

    watched = Watch(
        SimpleNamespace(address="a:1", serves=False),
        connect=connect,
        knock=knock,
        changed=lambda: None,
    )
    watching = asyncio.create_task(watched.follow())
    waiting = asyncio.create_task(enough.wait())
    await asyncio.wait([watching, waiting], return_when=asyncio.FIRST_COMPLETED)
    assert enough.is_set()
    assert not watching.done()
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    assert caplog.text.count("tls.pem") == 1
