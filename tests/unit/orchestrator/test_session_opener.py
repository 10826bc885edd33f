"""Sessions are opened and closed apart from requests: what goes wrong there ends none of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from paceline import errors
from paceline_orchestrator.decoding import session_opener as module
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.decoding.session_opener import SessionOpener
from support.virtual_time import virtually

SPEC = SessionSpec(fingerprint="it", reserve_length=1)


def a_server():
    return SimpleNamespace(name="target-0", handles=set())


async def break_down(*_, **__):
    raise ValueError("nobody thought of this")


async def open_well(*_, **__):
    return "a session"


@virtually
async def test_an_unexpected_error_in_opening_a_session_is_answered_and_logged_once(
    monkeypatch, caplog
):
    monkeypatch.setattr(module, "open_session", break_down)
    server = a_server()
    async with SessionOpener() as opener:
        opened = await opener.open(server, SPEC)
        assert isinstance(opened.error, errors.InternalError)
        assert "nobody thought" not in opened.error.message
        monkeypatch.setattr(module, "open_session", open_well)
        assert (await opener.open(server, SPEC)).session_id == "a session", "it goes on"
    assert caplog.messages == ["a session could not be opened at target-0"]


@virtually
async def test_an_unexpected_error_in_closing_a_session_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(module, "open_session", open_well)
    monkeypatch.setattr(module, "close_session", break_down)
    server = a_server()
    async with SessionOpener() as opener:
        opening = opener.open(server, SPEC)
        opener.close(server, opening)
        assert (await opening).session_id == "a session"
    assert caplog.messages == ["a session could not be closed at target-0"]


@virtually
async def test_a_server_may_name_a_session_as_one_that_is_closed_or_lost_and_as_no_other(
    monkeypatch,
):
    async def close_well(*_, **__):
        pass

    monkeypatch.setattr(module, "open_session", open_well)
    monkeypatch.setattr(module, "close_session", close_well)
    server = a_server()
    async with SessionOpener() as opener:
        for end in (opener.close, opener.forget):
            opening = opener.open(server, SPEC)
            assert (await opening).session_id == "a session"
            assert (await opener.open(server, SPEC)).error is not None, "it is open"
            end(server, opening)
            await asyncio.sleep(0.1)
        assert (await opener.open(server, SPEC)).session_id == "a session"
