from __future__ import annotations

import os
from typing import Literal

import pytest
from pydantic import Field

from paceline_contract.limits import MOST_MODEL_NAME_CHARACTERS
from paceline_model_server.settings import ModelServerSettings
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.command_line import parse
from paceline_serving.server_settings import ServerSettings
from paceline_serving.settings import OneOrMore, Settings, SettingsError, StringList, load


def read(*arguments: str, environment: dict[str, str] | None = None) -> ServerSettings:
    return parse(ServerSettings, arguments, program="test", environment=environment or {})


def refusal(capsys, *arguments: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as ended:
        read(*arguments, environment=environment)
    assert ended.value.code == 2
    error: str = capsys.readouterr().err
    assert error.count("\n") == 1
    return error.strip()


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("drain_seconds: 1\nlog_level: error\nlisten: 127.0.0.1:1\n")
    environment = {
        "PACELINE_CONFIG": str(file),
        "PACELINE_DRAIN_SECONDS": "2",
        "PACELINE_LOG_LEVEL": "warning",
    }
    settings = read("--drain-seconds=3", environment=environment)
    assert settings.drain_seconds == 3
    assert settings.log_level == "warning"
    assert settings.listen == "127.0.0.1:1"
    assert settings.log_format == "json"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--then=small", "--then=tiny, max-gram"], {}),
        (["--then=small,tiny,max-gram"], {}),
        ([], {"PACELINE_THEN": "small,tiny,max-gram"}),
    ],
)
def test_a_list_is_separated_by_commas_and_its_flag_can_be_given_again(arguments, environment):
    arguments = ["--model=large", *arguments]
    settings = parse(ModelServerSettings, arguments, program="test", environment=environment)
    assert settings.then == ("small", "tiny", "max-gram")


def test_whatever_takes_several_values_keeps_all_that_are_given():
    arguments = ["--insecure", "--targets=a:1", "--targets=b:2,c:3"]
    settings = parse(OrchestratorSettings, arguments, program="test", environment={})
    assert settings.targets == ("a:1", "b:2", "c:3")
    rates = ["--model=m", "--simulated-self-rates=0.5", "--simulated-self-rates=0.25,0.125"]
    model = parse(ModelServerSettings, rates, program="test", environment={})
    assert model.simulated_self_rates == (0.5, 0.25, 0.125)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--drain-second=3"], {}, "unknown option --drain-second; did you mean --drain-seconds?"),
        (["--drain=3"], {}, "unknown option --drain"),
        (["--foo"], {}, "test: unknown option --foo$"),
        ([], {"PACELINE_FOO": "x"}, "test: unknown variable PACELINE_FOO$"),
        (
            [],
            {"PACELINE_LOG_LEVLE": "x"},
            "unknown variable PACELINE_LOG_LEVLE; did you mean PACELINE_LOG_LEVEL?",
        ),
        (["--drain-seconds=x"], {}, "--drain-seconds: "),
        ([], {"PACELINE_DRAIN_SECONDS": "-1"}, "PACELINE_DRAIN_SECONDS: "),
        (["--log-format=xml"], {}, "--log-format: "),
        (["--listen=50051"], {}, "--listen: must be HOST:PORT"),
        (["--listen=127.0.0.1:65536"], {}, "--listen: must be HOST:PORT"),
        (["--listen=unix:"], {}, "--listen: must be HOST:PORT"),
        (["--listen=unix:///"], {}, "--listen: must be HOST:PORT"),
        (["--metrics-listen=unix:/tmp/x"], {}, "--metrics-listen: must be HOST:PORT"),
        (["--config=/does/not/exist"], {}, "/does/not/exist: "),
        (["--tls-key=key.pem"], {}, "--tls-certificate and --tls-key go together"),
        (["--peer-roles=spiffe://a/b=client"], {}, "--peer-roles needs --tls-client-authority"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_setting_is_named_in_one_line(capsys, arguments, environment, said):
    assert said in refusal(capsys, *arguments, environment=environment) + "$"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("log_levl: info", "unknown key 'log_levl'; did you mean log_level?"),
        ("log-level: info", "unknown key 'log-level'; did you mean log_level?"),
        ("- a\n- b", "must be a mapping"),
        ("a: [", "settings.yaml: "),
        ("a: 2026-13-01", "settings.yaml: "),
        ("drain_seconds: soon", "settings.yaml: drain_seconds: "),
    ],
)
def test_a_wrong_file_is_named_in_one_line(capsys, tmp_path, content, said):
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    assert said in refusal(capsys, f"--config={file}")


def test_a_name_that_no_orchestrator_takes_is_refused_at_the_start(capsys):
    longest = "m" * MOST_MODEL_NAME_CHARACTERS
    named = parse(ModelServerSettings, ["--model=m", f"--model-name={longest}"], program="test")
    assert named.model_name == longest
    with pytest.raises(SystemExit):
        parse(ModelServerSettings, ["--model=m", f"--model-name={longest}m"], program="test")
    said = capsys.readouterr().err
    assert "--model-name: " in said
    assert "256 characters" in said


def test_an_empty_file_changes_nothing(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("# nothing\n")
    assert read(f"--config={file}") == read()


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:1", "[::1]:1", "127.8.8.8:1"])
def test_plaintext_on_loopback_is_fine(listen):
    assert read(f"--listen={listen}").listen == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "a-host:1"])
def test_plaintext_off_loopback_is_refused(capsys, listen):
    assert "needs TLS; --insecure allows plaintext" in refusal(capsys, f"--listen={listen}")
    assert read(f"--listen={listen}", "--insecure").insecure
    tls = ("--tls-certificate=c.pem", "--tls-key=k.pem")
    assert read(f"--listen={listen}", *tls).listen == listen


@pytest.mark.parametrize("port", ["--metrics-listen=0.0.0.0:1", "--health-listen=0.0.0.0:1"])
def test_metrics_and_health_are_plaintext_everywhere(port):
    assert not read(port).insecure


def test_single_calls_are_shown_off_loopback_only_when_that_is_said_aloud(capsys):
    def model_server(*arguments: str) -> ModelServerSettings:
        flags = ["--backend=simulated", "--debug-calls", *arguments]
        return parse(ModelServerSettings, flags, program="test", environment={})

    assert model_server().debug_calls
    assert model_server("--metrics-listen=127.0.0.1:1").debug_calls
    assert not model_server("--metrics-listen=0.0.0.0:1", "--no-debug-calls").debug_calls
    tls = ("--tls-certificate=c.pem", "--tls-key=k.pem")
    for more in ((), tls):
        with pytest.raises(SystemExit):
            model_server("--metrics-listen=0.0.0.0:1", *more)
        said = capsys.readouterr().err
        assert "all that can reach 0.0.0.0:1; --insecure allows that" in said
        assert model_server("--metrics-listen=0.0.0.0:1", "--insecure", *more).debug_calls


def test_variables_that_kubernetes_makes_of_service_names_are_no_mistakes():
    environment = {
        "PACELINE_TARGET_SERVICE_HOST": "10.0.0.1",
        "PACELINE_TARGET_SERVICE_PORT_GRPC": "50051",
        "PACELINE_TARGET_PORT": "tcp://10.0.0.1:50051",
        "PACELINE_TARGET_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert read(environment=environment) == read()


@pytest.mark.parametrize("settings_class", [ServerSettings, ModelServerSettings])
def test_help_explains_every_option(capsys, settings_class):
    with pytest.raises(SystemExit) as ended:
        parse(settings_class, ["--help"], program="test", environment={})
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in settings_class.model_fields.items():
        assert "--" + name.replace("_", "-") in shown
        assert field.description


class Several(Settings):
    """One option of each kind."""

    names: StringList = Field(("a", "b"), description="names")
    texts: OneOrMore = Field((), description="texts")
    costs: dict[str, float] = Field({}, description="costs")
    one: str = Field("", description="one of them")
    word: Literal["this", "that"] | None = Field(None, description="a word")


def test_help_says_of_each_option_how_several_values_and_which_words_it_takes(capsys):
    with pytest.raises(SystemExit):
        parse(Several, ["--help"], program="test", environment={})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "--names NAMES names (can be A,B, or given again; default: a,b)" in lines
    assert "--texts TEXTS texts (can be given again)" in lines
    assert "--costs COSTS costs (can be A,B, or given again)" in lines
    assert "--one ONE one of them" in lines
    assert "--word {this,that} a word" in lines


def test_a_real_model_has_to_be_named(capsys):
    with pytest.raises(SystemExit):
        parse(ModelServerSettings, [], program="test", environment={})
    assert "--model is needed" in capsys.readouterr().err
    assert parse(ModelServerSettings, ["--backend=simulated"], program="test", environment={})


@pytest.mark.parametrize("made", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_settings_file_that_is_a_pipe_or_a_device_is_refused_in_one_line(made, tmp_path):
    file = tmp_path / "settings.yaml"
    made(file)
    with pytest.raises(SettingsError, match=r"settings\.yaml: is not a regular file"):
        load(Settings, flags={}, environment={}, file=file)


def test_a_settings_file_that_is_nested_deeply_is_refused_in_one_line(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("a: " + "[" * 100_000)
    with pytest.raises(SettingsError, match="nested more than 32 levels"):
        load(Settings, flags={}, environment={}, file=file)
