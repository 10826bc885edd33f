"""`paceline generate`: its options, what it prints, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_cli.__main__ import main
from support.fake_orchestrator import Leg
from support.waiting import eventually
from unit.cli.conftest import run


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


def test_a_zero_that_is_given_is_sent(capsys, fake):
    zeros = ("--temperature", "0", "--prompt-logprobs", "0", "--seed", "0")
    run(capsys, "generate", *zeros, "x", "--address", fake.address)
    request = fake.requests[0]
    assert request.sampling.HasField("temperature")
    assert request.HasField("prompt_logprobs")
    assert request.HasField("seed")


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


@pytest.mark.parametrize(
    ("flag", "word", "field", "number"),
    [
        ("--strategy", "dsi", "strategy", pb.STRATEGY_DISTRIBUTED),
        ("--strategy", "distributed", "strategy", pb.STRATEGY_DISTRIBUTED),
        ("--strategy", "self", "strategy", pb.STRATEGY_SELF_SPECULATIVE),
        ("--drafter", "both", "drafter", pb.DRAFTER_KIND_SERVER_AND_MAX_GRAM),
        ("--drafter", "max_gram", "drafter", pb.DRAFTER_KIND_MAX_GRAM),
    ],
)
def test_a_choice_has_a_short_word_and_a_long_one(capsys, fake, flag, word, field, number):
    code, _, _ = run(capsys, "generate", "x", "--address", fake.address, flag, word)
    assert code == 0
    assert getattr(fake.requests[-1], field) == number


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--max-toknes", "3"], "did you mean --max-tokens?"),
        (["x", "--temperature", "hot"], "--temperature"),
        (["x", "--strategy", "fastest"], "--strategy"),
        (["x", "--address", "nowhere"], "--address: must be HOST:PORT"),
        (["x", "--max-tokens"], "expected one argument"),
        (["def", "f():"], "unexpected argument 'f():'; quote an argument that has spaces"),
        (["x", "--regex", "a", "--schema", "f"], "give --regex or --schema, not both"),
        (["x", "--tls-key", "key.pem"], "--tls-certificate and --tls-key go together"),
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
        (["x", "--temperature", "nan"], "--temperature: must be finite"),
        (["x", "--max-tokens", "-1"], "--max-tokens"),
        ([], "PROMPT: give one"),
        (["x", "--file", "y"], "PROMPT: give one"),
        (["--file", "/nowhere/at/all"], "PROMPT: cannot read it"),
        (["--file", "/dev/zero"], "PROMPT: cannot read it: /dev/zero: is not a regular file"),
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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (errors.InvalidFieldError.of("target_count", "must be in [1, 64]"), "--targets: must be"),
        (errors.InvalidFieldError.of("sampling.min_p", "must be in"), "--min-p: must be in"),
        (errors.InvalidFieldError.of("text", "must not be empty"), "PROMPT: must not be empty"),
        (errors.InvalidFieldError.of("token_ids.ids[2]", "no"), "PROMPT: no"),
        (errors.InvalidFieldError.of("sampling.grammar", "no"), "--schema or --regex: no"),
        (errors.InvalidFieldError.of("predicted_text", "no"), "--prediction: no"),
        (errors.InvalidFieldError.of("telepathy", "no"), "telepathy: no"),
        (
            errors.InvalidFieldError(
                "stop_strings[0]: no; lookahead: never",
                violations=(
                    errors.FieldViolation("stop_strings[0]", "no"),
                    errors.FieldViolation("lookahead", "never"),
                ),
            ),
            "--stop: no; --lookahead: never",
        ),
        (
            errors.TokenizerMismatchError("every drafter has another tokenizer than the target"),
            "every drafter has another tokenizer than the target\n--drafter max-gram drafts",
        ),
    ],
)
def test_what_a_server_refuses_is_told_with_the_options_that_were_given(capsys, fake, error, words):
    fake.refusal = error
    code, _, err = run(capsys, "generate", "x", "--address", fake.address)
    assert code == 1
    assert err.startswith(f"paceline: {words}")


def test_an_error_of_the_server_is_one_line(capsys, fake):
    fake.script = [Leg(error=errors.InvalidFieldError.of("top_p", "must be in\n\x1b[2J(0, 1]"))]
    code, _, err = run(capsys, "generate", "x", "--address", fake.address)
    assert (code, err) == (1, "paceline: --top-p: must be in\\n\\x1b[2J(0, 1]\n")


def test_a_broken_generation_says_how_far_it_came_on_lines_of_its_own(capsys, fake):
    fake.script = [Leg(chunks=2, error=errors.InternalError("no more"))]
    command = ("generate", "x", "--address", fake.address, "--resume-attempts", "0")
    code, out, err = run(capsys, *command)
    assert (code, out) == (1, "3 4 ")
    assert err == (
        "\nbroken after 2 tokens · seed 7 · the same command with --seed 7 writes the same text"
        " from its beginning\npaceline: no more\n"
    )
    fake.script = [Leg(chunks=1, error=errors.InternalError("no more"))]
    _, _, err = run(capsys, *command, "--rule", "rejection")
    assert err == "\nbroken after 1 token · seed 7\npaceline: no more\n"


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
