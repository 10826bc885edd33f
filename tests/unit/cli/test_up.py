"""`paceline up`: which servers it would start, by its options and its models."""

from types import SimpleNamespace

import pytest

from paceline_cli.__main__ import main
from paceline_cli.up import UpSettings, _config, _print_system
from paceline_local.server import LocalServer
from paceline_local.system import reachable
from unit.cli.conftest import run


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
    (tmp_path / "smollm2" / "any.gguf").write_bytes(b"GGUF")
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
    (one_model / "drafter" / "config.json").write_text('{"model_type": "llama"}')
    (one_model / "drafter" / "tokenizer.json").touch()
    config = _config(UpSettings(models=one_model))
    assert config.drafters == 1
    assert f"--model={one_model / 'drafter'}" in config.drafter_arguments


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        ({"README.md": "# Paceline"}, "README.md", "README.md is no GGUF file: give a directory"),
        ({}, "missing", "missing: there is no such directory or file: give a directory with"),
        ({"m/weights": ""}, "m", "m is no model: it has no config.json: give a directory with"),
        ({"m/config.json": "{}"}, "m", "m is no model: it has no tokenizer.json"),
        ({"m/config.json": "", "m/tokenizer.json": ""}, "m", "m/config.json cannot be used"),
        (
            {"m/config.json": "{}", "m/tokenizer.json": ""},
            "m",
            "m/config.json cannot be used: it describes no model",
        ),
    ],
)
@pytest.mark.parametrize("command", ["up --{}-model", "check-pair --target=x --drafter=y --{}"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_what_cannot_be_a_model_is_refused_before_a_process_is_started(
    capsys, monkeypatch, tmp_path, made, given, words, command, role
):
    monkeypatch.setattr(LocalServer, "start", None)
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    code, _, err = run(capsys, *command.format(role).split(), str(tmp_path / given))
    assert code == 1
    assert err.startswith(f"paceline: {tmp_path}/{words}")


def test_a_model_of_a_user_that_nobody_is_is_refused_in_words(capsys, monkeypatch):
    monkeypatch.setattr(LocalServer, "start", None)
    code, _, err = run(capsys, "up", "--target-model=~nobody-is-this/m", "--drafter-model=x")
    assert code == 1
    assert err.startswith("paceline: ~nobody-is-this/m: there is no such user: give a directory")


def test_up_says_where_a_drafter_that_is_asked_for_would_come_from(capsys, one_model):
    code, _, err = run(capsys, "up", "--models", str(one_model), "--drafters", "1")
    assert code == 1
    assert err == f"paceline: --drafters: {one_model} has no drafter: give --drafter-model\n"


def test_a_command_for_the_bundled_models_names_the_one_that_serves_one_model(capsys, one_model):
    code, _, err = run(capsys, "bench", "self", "--models", str(one_model))
    assert code == 1
    assert f"{one_model} is one model, and this command needs the bundled ones" in err
    assert f"`paceline up --models {one_model}` serves it" in err


def test_up_takes_plaintext_to_other_machines_if_it_is_said_aloud():
    settings = UpSettings(backend="simulated", listen="0.0.0.0:6000", insecure=True)
    assert "--insecure" in _config(settings).orchestrator_arguments
    assert reachable(settings.listen) == "127.0.0.1:6000"


def test_where_keys_are_asked_for_the_commands_that_are_shown_have_them(capsys):
    gateway = SimpleNamespace(address="127.0.0.1:8000")
    system = SimpleNamespace(servers=(), not_used={}, drafters=("one",), gateway=gateway)
    _print_system(system, "127.0.0.1:50050", UpSettings(backend="simulated"))
    assert "KEY" not in capsys.readouterr().out.upper()
    locked = UpSettings(
        backend="simulated",
        orchestrator_option=("api-keys=keys.yaml",),
        gateway_option=("api-keys=keys.yaml",),
    )
    _print_system(system, "127.0.0.1:50050", locked)
    out = capsys.readouterr().out
    assert "paceline generate --api-key-file FILE 'def" in out
    assert "paceline top --api-key-file FILE\n" in out
    assert "/v1/models -H 'authorization: Bearer KEY'\n" in out


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
