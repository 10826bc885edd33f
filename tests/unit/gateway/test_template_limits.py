"""A template is a stranger's: what it takes of time and memory costs its own request alone."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress

import psutil
import pytest

from paceline_gateway.templates import processes
from paceline_gateway.templates.chat_template import ChatTemplates
from support.fake_orchestrator import FakeOrchestrator
from support.gateway import TEMPLATE, gateway_over
from support.waiting import until

NESTED = "{{% for a in range(99999) %}}{{% for b in range(99999) %}}{}{{% endfor %}}{{% endfor %}}"
# Endless for a conversation that says so, honest for all others.
ENDLESS = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def model_with(source):
    return FakeOrchestrator(chat_template=type(TEMPLATE)(fingerprint="f" * 64, source=source))


def renderers():
    """Return this process's own for templates, and the dead that nobody has waited for."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # gone since it was listed
            is_zombie = child.status() == psutil.STATUS_ZOMBIE
            if is_zombie or "paceline_gateway.templates.worker" in child.cmdline():
                found.append(child)
    return found


def chat(gateway, content="hello"):
    return gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        ("{{ 10**(10**8) }}", "1 s of processor time"),
        (
            NESTED.format(""),
            "1 s of processor time",
        ),
        ("{{ ('a' * 30 + 'b') * 10**9 }}", "64 MiB of memory"),
        ("{{ messages | tojson(indent=10**9) }}", "64 MiB of memory"),
        ("{{ 'a' * 2**21 }}", "a prompt of 1048576 bytes"),
        (
            NESTED.format("{{ 'a' * 99 }}"),
            "a prompt of 1048576 bytes",
        ),
    ],
)
async def test_a_template_that_takes_too_much_is_named_with_the_limit(source, limit):
    async with gateway_over(model_with(source)) as gateway:
        response = await chat(gateway)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "chat_template_limit"
        assert "chat template (ffffffffffff)" in error["message"]
        assert limit in error["message"]
        gateway.fakes[0].chat_template = TEMPLATE
        served = await gateway.post("/v1/completions", prompt="p")
        assert served.status_code == 200
    assert not renderers()


async def test_others_are_served_while_a_template_runs_without_end(monkeypatch):
    monkeypatch.setattr(processes, "_PROCESSES", 2)
    async with gateway_over(model_with(ENDLESS)) as gateway:
        endless = asyncio.create_task(chat(gateway, "loop"))
        await until(lambda: gateway.process.requests.present_count, what="it runs")
        honest = await asyncio.gather(*(chat(gateway, f"{each}") for each in range(20)))
        assert [it.status_code for it in honest] == [200] * 20
        assert (await endless).status_code == 400
        assert (await chat(gateway)).status_code == 200
    assert not renderers()


async def test_a_gateway_ends_while_templates_run_without_end_and_leaves_no_process(monkeypatch):
    monkeypatch.setattr(processes, "_PROCESSES", 2)
    async with gateway_over(model_with(ENDLESS)) as gateway:
        loops = [asyncio.create_task(chat(gateway, "loop")) for _ in range(4)]
        await until(lambda: gateway.process.requests.present_count == 4, what="they run")
        await gateway.process.finish()
        assert not renderers()
        await asyncio.gather(*loops, return_exceptions=True)


async def test_a_conversation_waits_for_the_process_that_is_starting():
    templates = ChatTemplates()
    try:
        await asyncio.gather(templates.prepare(), templates.look_at(TEMPLATE))
        assert len(renderers()) == 1
    finally:
        await templates.close()


async def test_a_process_that_dies_is_replaced():
    async with gateway_over() as gateway:
        assert (await chat(gateway)).status_code == 200
        before = renderers()
        for each in before:
            each.kill()
        await until(lambda: not set(before) & set(renderers()), what="they are gone")
        assert (await chat(gateway)).status_code == 200
        assert set(renderers()).isdisjoint(before)


class NotedHead(struct.Struct):
    """The head of questions, of which it is known how many were written."""

    written_count = 0

    def pack(self, *values):
        self.written_count += 1
        return super().pack(*values)


async def test_a_process_that_dies_while_its_question_is_written_is_told_and_replaced(monkeypatch):
    monkeypatch.setattr(processes, "_PROCESSES", 1)
    head = NotedHead(processes.HEAD.format)
    monkeypatch.setattr(processes, "HEAD", head)
    async with gateway_over() as gateway:
        assert (await chat(gateway)).status_code == 200
        (process,) = renderers()
        before = head.written_count
        process.suspend()
        # More than a pipe holds: the rest is to be written into a pipe that nobody reads any more.
        asked = asyncio.create_task(chat(gateway, "a" * (1 << 19)))
        await until(lambda: head.written_count > before, what="it is asked")
        process.kill()
        refused = await asked
        assert refused.status_code == 400
        assert "the process ended with code -9" in refused.json()["error"]["message"]
        assert (await chat(gateway)).status_code == 200
        assert process not in renderers()
    assert not renderers()


async def test_where_no_process_can_be_had_conversations_are_refused_and_texts_go_on(monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/nowhere/python")
    async with gateway_over() as gateway:
        response = await chat(gateway)
        assert response.status_code == 503
        assert "no process can be started" in response.json()["error"]["message"]
        assert (await gateway.post("/v1/completions", prompt="p")).status_code == 200


async def test_one_that_cannot_start_is_said_to_end_at_its_start(monkeypatch):
    monkeypatch.setattr(processes.sys, "executable", "/bin/false")
    async with gateway_over() as gateway:
        response = await chat(gateway)
    assert response.status_code == 503
    assert "ended with code 1 at its start" in response.json()["error"]["message"]


async def test_a_template_sees_no_secret_of_the_gateways_environment(monkeypatch):
    monkeypatch.setenv("PACELINE_SECRET", "hidden")
    async with gateway_over() as gateway:
        await chat(gateway)
        (one, *_) = renderers()
        assert "PACELINE_SECRET" not in one.environ()


async def test_what_a_conversation_needs_is_kept_from_the_next_one_of_a_template():
    async with gateway_over(model_with("{{ messages[0].content }}")) as gateway:
        texts = [f"it is {each} \ud83d\ude00 \n" for each in range(3)]
        texts = [it.encode("utf-16", "surrogatepass").decode("utf-16") for it in texts]
        for text in texts:
            assert (await chat(gateway, text)).status_code == 200
        assert [it.text for it in gateway.requests] == texts
