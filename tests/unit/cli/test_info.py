"""`paceline info`: what it says of a system, and of a server that is no orchestrator."""

import asyncio
import json
import re

import pytest

from paceline_cli import info
from support.fake_models import FakeModelServer, serving
from unit.cli.conftest import run
from unit.cli.told_systems import a_server, a_system


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_info_cuts_no_name_however_narrow_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    names = [
        f"a-release-with-a-long-name-target-default-7d9f8b6c5-{it}" for it in ("abcde", "vwxyz")
    ]
    servers = [a_server(it, decode_step_ns=1_500_000) for it in names]
    info._print(a_system(*servers))
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "127.0.0.1" in line]
    assert rows == [[it, "target", "127.0.0.1:50051", "ready", "1.50"] for it in names]


def test_info_says_each_thing_of_a_system_and_of_its_servers_in_its_own_place(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    first = a_server(
        "first",
        address="10.0.0.1:1",
        decode_step_ns=12_345_678,
        self_draft_kind="medusa",
        is_invariant=True,
    )
    second = a_server(
        "second", address="10.0.0.2:2", role="drafter", ready=False, status="NOT_SERVING"
    )
    system = a_system(
        first,
        second,
        version="7.8.9",
        model_name="m",
        vocabulary_size=50_257,
        context_length=1024,
        running_request_count=3,
    )
    info._print(system)
    facts, servers_table = capsys.readouterr().out.split("\n\n")
    assert dict(line.split(maxsplit=1) for line in facts.splitlines()) == {
        "model": "m",
        "fingerprint": "f",
        "tokenizer": "t",
        "vocabulary": "50257 tokens",
        "context": "1024 tokens",
        "running": "3 requests",
        "version": "7.8.9",
    }
    abilities = "drafts for itself (medusa), invariant"
    assert [re.split(r"  +", line.strip()) for line in servers_table.splitlines()] == [
        ["server", "role", "address", "state", "ms per token"],
        ["first", "target", "10.0.0.1:1", "ready", "12.35", abilities],
        ["second", "drafter", "10.0.0.2:2", "NOT_SERVING"],
    ]


def test_info_says_how_each_server_stands_and_below_all_what_there_is_to_say(capsys):
    odd = a_server(
        "target-1",
        ready=False,
        status="OTHER_DTYPE: it computes in float16",
        standing="other_dtype",
        standing_detail="it computes in \x1b[2Jfloat16",
    )
    used = a_server("target-0", standing="used")
    slow = a_server("target-2", standing="used", standing_detail="it takes 9 ms for a token")
    old = a_server("target-3", ready=False, status="NOT_SERVING")
    info._print(a_system(used, odd, slow, old))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    states = [" ".join(line.split()[3:]) for line in lines if "127.0.0.1" in line]
    assert states == ["used", "other dtype", "used", "NOT_SERVING"]
    assert lines[-2:] == [
        r"target-1 is not used: it computes in \x1b[2Jfloat16",
        "target-2 is used: it takes 9 ms for a token",
    ]


def test_each_thing_that_a_server_says_is_on_one_line_without_what_a_terminal_obeys(capsys):
    words = "a\x1b[2Jb\nc\u2028d\u202ee"
    server = a_server(
        words,
        address=words,
        role=words,
        standing=words,
        self_draft_kind=words,
        standing_detail=words,
    )
    facts = ("model_name", "model_fingerprint", "tokenizer_fingerprint", "version")
    info._print(a_system(server, lora_adapters={words: "f"}, **dict.fromkeys(facts, words)))
    shown = capsys.readouterr().out
    assert all(it.isprintable() for it in shown.splitlines())
    assert len(shown.splitlines()) == 8 + 1 + 2 + 2
    assert shown.count(r"a\x1b[2Jb\nc\u2028d\u202ee") == 5 + 5 + 3


def test_info_lists_the_servers(capsys, fake):
    code, out, _ = run(capsys, "info", "--address", fake.address)
    assert code == 0
    assert "target-0" in out
    assert json.loads(run(capsys, "info", "--json", "--address", fake.address)[1])["version"] == "1"


@pytest.mark.parametrize("role", ["drafter", "target"])
def test_a_model_server_that_is_asked_as_an_orchestrator_is_named(capsys, role):
    model = FakeModelServer(role)

    async def ask(command, *more):
        async with serving(model):
            flags = ("--address", model.address, *more)
            return await asyncio.to_thread(run, capsys, command, *flags)

    _, _, err = asyncio.run(ask("info"))
    assert err == f"paceline: {model.address} is a {role}, not an orchestrator\n"
    _, _, err = asyncio.run(ask("generate", "x"))
    assert "of another kind; `paceline info`" in err
