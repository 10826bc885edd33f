import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import get_args

import pytest

from paceline import ServerInfo, SystemInfo, errors
from paceline_cli import health, info
from paceline_cli.__main__ import main
from paceline_cli.generate import STRATEGIES, GenerateSettings
from paceline_cli.up import UpSettings, _config
from paceline_local.system import reachable
from support.fake_models import FakeModelServer, serving
from support.fake_orchestrator import Leg
from support.waiting import eventually


def run(capsys, *arguments):
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


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


@pytest.mark.parametrize(("flags", "is_parsed"), [((), False), (("--parse-special-tokens",), True)])
def test_special_tokens_in_a_prompt_are_parsed_where_generate_is_told_to(
    capsys, fake, flags, is_parsed
):
    code, _, _ = run(capsys, "generate", "<s>x", "--address", fake.address, *flags)
    assert code == 0
    assert fake.requests[-1].parse_special_tokens is is_parsed


def test_generate_streams_the_text_and_ends_with_a_line_of_statistics(capsys, fake):
    code, out, err = run(capsys, "generate", "x", "--address", fake.address, "--max-tokens", "3")
    assert (code, out) == (0, "3 4 5 ")
    assert err.startswith("\n3 tokens")  # a pipe's text is left as it is
    assert "DSI" in err
    assert "ended by length" in err


def test_the_key_of_a_file_is_shown_to_the_orchestrator(capsys, fake, tmp_path):
    file = tmp_path / "own.key"
    file.write_text("sk-own\n")
    where = ("--address", fake.address, "--api-key-file", str(file))
    assert run(capsys, "generate", "x", *where)[0] == run(capsys, "info", *where)[0] == 0
    assert [it["authorization"] for it in fake.metadata] == ["Bearer sk-own"] * 2
    file.write_text("two words")
    code, _, err = run(capsys, "generate", "x", *where)
    assert code == 1
    assert "own.key: must hold one key" in err
    fake.refusal = errors.UnauthenticatedError("an API key is missing")
    code, _, err = run(capsys, "info", "--address", fake.address)
    assert code == 1
    assert err == "paceline: an API key is missing\n--api-key-file names the file with your key\n"


def test_generate_sends_what_the_options_say(capsys, fake):
    arguments = [
        "--strategy",
        "si",
        "--top-p",
        "0.9",
        "--seed",
        "5",
        "--stop",
        "a,b",
        "--stop",
        "c",
    ]
    run(capsys, "generate", *arguments, "x y", "--address", fake.address)
    request = fake.requests[0]
    assert request.text == "x y"
    assert request.strategy == 3
    assert request.sampling.top_p == 0.9
    assert not request.sampling.HasField("top_k")
    assert request.seed == 5
    assert list(request.stop_strings) == ["a,b", "c"]


def test_generate_marks_the_targets_own_tokens_where_there_are_no_colours(capsys, fake):
    fake.script = [Leg(own_tokens={4})]
    _, out, _ = run(capsys, "generate", "x", "--address", fake.address, "--show-origins")
    assert out == "3 [4 ]5 6 7 "


def test_generate_prints_json_lines(capsys, fake):
    _, out, _ = run(capsys, "generate", "x", "--address", fake.address, "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert [event["event"] for event in events] == ["started", *["chunk"] * 5, "finished"]
    assert events[0]["seed"] == 7
    assert events[-1]["finish_reason"] == "length"


def test_generate_writes_the_timeline(capsys, fake, tmp_path):
    picture = tmp_path / "t.svg"
    code, _, err = run(
        capsys, "generate", "x", "--address", fake.address, "--timeline", str(picture)
    )
    assert code == 0
    assert str(picture) in err
    assert fake.requests[0].include_timeline
    ET.parse(picture)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("t.png", "--timeline: must end in .svg"),
        ("nowhere/t.svg", "--timeline: cannot write"),
        ("", "--timeline: cannot write"),
    ],
)
def test_where_no_picture_can_be_nothing_is_generated(capsys, fake, tmp_path, name, complaint):
    place = str(tmp_path / name)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "x", "--address", fake.address, "--timeline", place])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert not fake.requests


def test_generate_reads_the_prompt_from_a_file(capsys, fake, tmp_path):
    (tmp_path / "prompt.py").write_text("def f():\n")
    run(capsys, "generate", "--file", str(tmp_path / "prompt.py"), "--address", fake.address)
    assert fake.requests[0].text == "def f():\n"


def test_a_prompt_can_come_from_a_pipe_as_shells_make_them(capsys, fake, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"def f():\r\n",))
    writer.start()
    run(capsys, "generate", "--file", str(pipe), "--address", fake.address)
    writer.join()
    assert fake.requests[0].text == "def f():\n"


def test_every_word_for_a_strategy_is_a_choice_and_no_other():
    assert get_args(GenerateSettings.model_fields["strategy"].annotation) == tuple(STRATEGIES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--max-toknes", "3"], "did you mean --max-tokens?"),
        (["x", "--temperature", "hot"], "--temperature"),
        (["x", "--strategy", "fastest"], "--strategy"),
        (["x", "--address", "nowhere"], "--address: must be HOST:PORT"),
        (["x", "--max-tokens"], "expected one argument"),
        (["def", "f():"], "unexpected argument 'f():'; quote an argument that has spaces"),
        (["x", "--tls-key", "key.pem"], "tls_certificate and tls_key go together"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--temperature", "nan"], "temperature: must be finite"),
        (["x", "--max-tokens", "-1"], "max_tokens"),
        ([], "prompt: give one"),
        (["x", "--file", "y"], "prompt: give one"),
        (["--file", "/nowhere/at/all"], "prompt: cannot read it"),
        (["--file", "/dev/zero"], "prompt: cannot read it: /dev/zero: is not a regular file"),
        (["x", "--address", "example.com:1"], "no TLS"),
        (["x", "--tls-authority", "/nowhere/ca.pem"], "/nowhere/ca.pem: No such file"),
        (["x", "--address", "127.0.0.1:1"], "`paceline up` starts a system"),
    ],
)
def test_what_goes_wrong_later_is_one_line_and_exit_code_1(capsys, arguments, words):
    code, _, err = run(capsys, "generate", *arguments)
    assert code == 1
    assert err.startswith("paceline: ")
    assert words in err
    assert "Traceback" not in err


def test_an_error_of_the_server_is_one_line(capsys, fake):
    fake.script = [Leg(error=errors.InvalidFieldError.of("top_p", "must be in (0, 1]"))]
    code, _, err = run(capsys, "generate", "x", "--address", fake.address)
    assert (code, err) == (1, "paceline: top_p: must be in (0, 1]\n")


@pytest.fixture
def interruptible():
    """A shell's background job ignores Ctrl-C, and so would the processes that it starts."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_cancels_the_call_and_exits_130(fake):
    fake.script = [Leg(chunks=2, hangs=True)]
    command = [sys.executable, "-m", "paceline_cli", "generate", "x", "--address", fake.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(4) == "3 4 "
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "Traceback" not in err
    eventually(fake.cancelled.is_set, what="the server hears of it")


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_info_cuts_no_name_however_narrow_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    names = [
        f"a-release-with-a-long-name-target-default-7d9f8b6c5-{it}" for it in ("abcde", "vwxyz")
    ]
    servers = [
        ServerInfo(
            name=it,
            address="10.0.0.1:50051",
            role="target",
            ready=True,
            status="",
            model_fingerprint="f",
            decode_step_ns=1_500_000,
        )
        for it in names
    ]
    facts = dict.fromkeys(("version", "model_name", "model_fingerprint"), "x")
    counts = dict.fromkeys(("vocabulary_size", "context_length", "running_request_count"), 1)
    described = SystemInfo(**facts, **counts, tokenizer_fingerprint="t", servers=tuple(servers))
    info._print(described)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "10.0.0.1" in line]
    assert rows == [[it, "target", "10.0.0.1:50051", "ready", "1.50"] for it in names]


def test_info_says_each_thing_of_a_system_and_of_its_servers_in_its_own_place(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    servers = [
        ServerInfo(
            name="first",
            address="10.0.0.1:1",
            role="target",
            ready=True,
            status="",
            model_fingerprint="f",
            decode_step_ns=12_345_678,
            self_draft_kind="medusa",
            is_invariant=True,
        ),
        ServerInfo(
            name="second",
            address="10.0.0.2:2",
            role="drafter",
            ready=False,
            status="NOT_SERVING",
            model_fingerprint="g",
            decode_step_ns=0,
        ),
    ]
    system = SystemInfo(
        version="7.8.9",
        model_name="m",
        model_fingerprint="f",
        tokenizer_fingerprint="t",
        vocabulary_size=50_257,
        context_length=1024,
        running_request_count=3,
        servers=tuple(servers),
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
    server = ServerInfo(
        name="target-0",
        address="10.0.0.1:50051",
        role="target",
        ready=True,
        status="",
        model_fingerprint="f",
        decode_step_ns=0,
        standing="used",
    )
    odd = replace(
        server,
        name="target-1",
        ready=False,
        status="OTHER_DTYPE: it computes in float16",
        standing="other_dtype",
        standing_detail="it computes in \x1b[2Jfloat16",
    )
    slow = replace(server, name="target-2", standing_detail="it takes 9 ms for a token")
    old = replace(server, name="target-3", ready=False, standing="", status="NOT_SERVING")
    facts = dict.fromkeys(("version", "model_name", "model_fingerprint"), "x")
    counts = dict.fromkeys(("vocabulary_size", "context_length", "running_request_count"), 1)
    servers = (server, odd, slow, old)
    info._print(SystemInfo(**facts, **counts, tokenizer_fingerprint="t", servers=servers))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    states = [" ".join(line.split()[3:]) for line in lines if "10.0.0.1" in line]
    assert states == ["used", "other dtype", "used", "NOT_SERVING"]
    assert lines[-2:] == [
        "target-1 is not used: it computes in \N{REPLACEMENT CHARACTER}[2Jfloat16",
        "target-2 is used: it takes 9 ms for a token",
    ]


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


def test_a_folder_that_cannot_be_made_is_one_line(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = run(
        capsys, "up", "--backend", "simulated", "--log-directory", str(tmp_path / "file" / "x")
    )
    assert code == 1
    assert err.startswith(f"paceline: {tmp_path}")


def test_up_without_models_says_where_it_looked(capsys, tmp_path):
    code, _, err = run(capsys, "up", "--models", str(tmp_path))
    assert code == 1
    assert str(tmp_path) in err
    assert "--models FOLDER" in err


@pytest.fixture
def one_model(tmp_path):
    """Give a folder that is one model, as `up` sees it before anything is loaded."""
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "any.gguf").touch()
    return tmp_path / "smollm2"


def test_up_serves_a_folder_that_is_one_model_without_a_drafter(one_model):
    config = _config(UpSettings(models=one_model))
    assert (config.targets, config.drafters) == (2, 0)
    assert f"--model={one_model}" in config.target_arguments
    file = one_model / "any.gguf"
    assert f"--model={file}" in _config(UpSettings(models=file)).target_arguments
    named = _config(UpSettings(models=one_model, drafter_model="small"))
    assert named.drafters == 1
    assert "--model=small" in named.drafter_arguments


def test_up_finds_the_drafter_in_a_models_folder(one_model):
    (one_model / "drafter").mkdir()
    (one_model / "drafter" / "config.json").touch()
    config = _config(UpSettings(models=one_model))
    assert config.drafters == 1
    assert f"--model={one_model / 'drafter'}" in config.drafter_arguments


def test_up_says_where_a_drafter_that_is_asked_for_would_come_from(capsys, one_model):
    code, _, err = run(capsys, "up", "--models", str(one_model), "--drafters", "1")
    assert code == 1
    assert err == f"paceline: drafters: {one_model} has no drafter: give --drafter-model\n"


def test_a_command_for_the_bundled_models_names_the_one_that_serves_one_model(capsys, one_model):
    code, _, err = run(capsys, "bench", "self", "--models", str(one_model))
    assert code == 1
    assert f"{one_model} is one model, and this command needs the bundled ones" in err
    assert f"`paceline up --models {one_model}` serves it" in err


def test_up_takes_plaintext_to_other_machines_if_it_is_said_aloud():
    settings = UpSettings(backend="simulated", listen="0.0.0.0:6000", insecure=True)
    assert "--insecure" in _config(settings).orchestrator_arguments
    assert reachable(settings.listen) == "127.0.0.1:6000"


def test_up_hands_an_adapter_to_its_targets_alone():
    settings = UpSettings(target_model="big", drafter_model="small", adapter="heads")
    assert "--adapter=heads" in _config(settings).target_arguments
    assert "--adapter=heads" not in _config(settings).drafter_arguments
    plain = UpSettings(target_model="big", drafter_model="small")
    assert not any("adapter" in each for each in _config(plain).target_arguments)


def test_up_says_below_what_its_targets_prune(capsys):
    given = {"target_model": "big", "drafter_model": "small", "adapter": "heads"}
    config = _config(UpSettings(**given, prune_below=0.0))
    assert "--prune-below=0.0" in config.target_arguments
    assert not any("prune" in each for each in config.drafter_arguments)
    assert not any("prune" in each for each in _config(UpSettings(**given)).target_arguments)
    with pytest.raises(SystemExit):
        main(["up", "--prune-below", "0.1"])
    assert "--prune-below goes with --adapter" in capsys.readouterr().err


def test_up_wants_a_key_for_its_gateway_where_the_orchestrator_asks_for_one(capsys):
    locked = ("--http", "127.0.0.1:0", "--orchestrator-option", "api-keys=keys.yaml")
    with pytest.raises(SystemExit):
        main(["up", *locked])
    assert "--gateway-option orchestrator-key-file=FILE" in capsys.readouterr().err
    own = "orchestrator-key-file=own.key"
    shown = {"orchestrator_option": ("api-keys=keys.yaml",), "gateway_option": (own,)}
    config = _config(UpSettings(backend="simulated", http="127.0.0.1:0", **shown))
    assert f"--{own}" in config.gateway_arguments


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
