import re
import subprocess
import sys
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline_cli import health
from paceline_cli.__main__ import main
from support.on_a_thread import relaying
from support.ports import free_address
from unit.cli.conftest import run


def test_help_names_every_command(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for command in ("check-pair", "demo", "generate", "health", "info", "serve", "top", "up"):
        assert f"\n  {command} " in out


def test_help_loads_no_command():
    check = (
        "import sys; from paceline_cli.__main__ import main; main(['--help']);"
        "print([m for m in ('grpc', 'pydantic', 'rich', 'torch') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, check=True, text=True
    )
    assert result.stdout.endswith("[]\n")


def test_a_command_whose_variables_are_its_own_loads_no_other():
    check = (
        "import os, sys; from paceline_cli.__main__ import main;"
        "os.environ['PACELINE_TIMEOUT_SECONDS'] = '0.1';"
        "main(['health', '127.0.0.1:1']);"
        "print([m for m in ('paceline_bench', 'paceline_gateway') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, check=True, text=True
    )
    assert result.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    "command", ["check-pair", "demo", "generate", "health", "info", "top", "up"]
)
def test_the_help_of_each_command_has_examples(capsys, command):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"  paceline {command}" in out
    flag, variable = re.search(r"(--[a-z-]+) as (PACELINE_\w+)", out).groups()
    assert f"\n  {flag} " in out
    assert variable == "PACELINE_" + flag.removeprefix("--").replace("-", "_").upper()


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("bench load", "psutil", "bench"),
        ("bench table2", "rich", "bench"),
        ("plan", "pydantic", "bench"),
        ("simulate", "numpy", "bench"),
        ("bench pair --random-target 1x64 --random-drafter 1x64", "torch", "server"),
        ("info", "rich", "cli"),
    ],
)
def test_what_is_not_installed_is_told_with_the_extra_that_has_it(command, missing, extra):
    # As if it were not there: in a process of its own, which has loaded nothing yet.
    check = (
        f"import sys; sys.modules[{missing!r}] = None;"
        f"from paceline_cli.__main__ import main; sys.exit(main({command.split()}))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        f"paceline: {missing} is not installed: pip install 'paceline[{extra}]'\n"
    )


def test_an_unknown_command_is_told_its_nearest(capsys):
    code, _, err = run(capsys, "generat")
    assert code == 2
    assert "did you mean 'generate'?" in err


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["SERVING"], 0),
        (["SERVING", "SERVING"], 0),
        (["SERVING", "NOT_SERVING"], 1),
        (["NOT_SERVING", "SERVING"], 1),
        (["NOT_SERVING"], 1),
    ],
)
def test_all_that_are_asked_have_to_be_well(states, expected, capsys, monkeypatch):
    told = {f"127.0.0.1:{port}": state for port, state in enumerate(states, 1)}

    async def ask(address, _settings):
        return told[address]

    monkeypatch.setattr(health, "_ask", ask)
    code, out, _ = run(capsys, "health", *told)
    assert out.splitlines() == [f"{address}  {state}" for address, state in told.items()]
    assert code == expected


def test_health_says_it_with_the_exit_code(capsys, fake):
    code, out, _ = run(capsys, "health", "127.0.0.1:1", "--timeout-seconds", "2")
    assert code == 1
    assert out.startswith("127.0.0.1:1 ")


@asynccontextmanager
async def checked_with(raw, *, address):
    """A server that answers with these bytes when it is asked whether it serves."""

    async def check(_request, _context):
        return raw

    handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),)
    )
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest.mark.parametrize(
    ("raw", "told"),
    [(b"\xff", "the server's answer cannot be decoded"), (b"\x08\x63", "status 99")],
)
def test_health_that_means_nothing_is_said_beside_that_of_others(capsys, fake, raw, told):
    address = free_address()
    with relaying(checked_with(raw, address=address)):
        code, out, _ = run(capsys, "health", address, fake.address)
    assert code == 1
    first, second = out.splitlines()
    assert first.startswith(f"{address}  {told}")
    assert second == f"{fake.address}  SERVING"


def test_serve_names_the_roles(capsys):
    assert run(capsys, "serve")[0] == 0
    code, _, err = run(capsys, "serve", "router")
    assert code == 2
    assert "drafter, target, orchestrator" in err


def test_the_environment_and_a_file_set_options_and_flags_win(capsys, fake, monkeypatch, tmp_path):
    (tmp_path / "c.yaml").write_text("max_tokens: 2\nseed: 1\ntop_k: 9\n")
    monkeypatch.setenv("PACELINE_ADDRESS", fake.address)
    monkeypatch.setenv("PACELINE_SEED", "2")
    monkeypatch.setenv("PACELINE_TOP_K", "8")
    run(capsys, "generate", "x", "--top-k", "7", "--config", str(tmp_path / "c.yaml"))
    request = fake.requests[0]
    assert (request.max_tokens, request.seed, request.sampling.top_k) == (2, 2, 7)


def test_a_variable_holds_one_of_what_can_be_repeated(capsys, fake, monkeypatch):
    monkeypatch.setenv("PACELINE_STOP", "a,b")
    monkeypatch.setenv("PACELINE_SERVERS", f"{fake.address},{fake.address}")
    run(capsys, "generate", "x", "--address", fake.address)
    assert list(fake.requests[0].stop_strings) == ["a,b"]
    assert run(capsys, "health")[1].count(fake.address) == 2


def test_a_variable_of_another_command_is_no_mistake_but_a_misspelt_one_is(
    capsys, fake, monkeypatch
):
    monkeypatch.setenv("PACELINE_MAX_TOKENS", "2")
    monkeypatch.setenv("PACELINE_ACCEPTANCE_PROMPTS", "10")
    assert run(capsys, "info", "--address", fake.address)[0] == 0
    monkeypatch.setenv("PACELINE_ADRESS", "x")
    code, _, error = run(capsys, "info")
    assert (code, error) == (
        2,
        "paceline: unknown variable PACELINE_ADRESS; did you mean PACELINE_ADDRESS?\n",
    )


def test_an_unknown_key_of_the_file_is_a_mistake(capsys, tmp_path):
    (tmp_path / "c.yaml").write_text("max_token: 2\n")
    with pytest.raises(SystemExit):
        main(["generate", "x", "--config", str(tmp_path / "c.yaml")])
    assert "did you mean max_tokens?" in capsys.readouterr().err
