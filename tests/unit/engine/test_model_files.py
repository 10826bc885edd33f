from __future__ import annotations

import json
import shutil

import pytest

from paceline_engine.backends.base import ModelLoadError
from paceline_engine.backends.model_files import find_model_files


@pytest.fixture
def directory(tiny_pair, tmp_path):
    return shutil.copytree(tiny_pair.drafter, tmp_path / "model")


def test_a_plain_directory_is_found(directory):
    files = find_model_files(str(directory))
    assert files.name == "model"
    assert [path.name for path in files.weights] == ["model.safetensors"]
    assert files.tokenizer == (directory / "tokenizer.json").read_bytes()
    assert files.eos_token_ids() == (0,)


def test_a_directory_below_ones_home_has_its_own_name(directory, monkeypatch):
    monkeypatch.setenv("HOME", str(directory.parent))
    assert find_model_files("~/model").name == "model"


@pytest.mark.parametrize("name", ["modeling.py", "sub/hook.py", "kernel.so"])
def test_code_is_refused(directory, name):
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).touch()
    with pytest.raises(ModelLoadError, match="own code"):
        find_model_files(str(directory))


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt", "pkl"])
def test_pickled_weights_are_refused(directory, suffix):
    (directory / f"weights.{suffix}").touch()
    with pytest.raises(ModelLoadError, match="pickled"):
        find_model_files(str(directory))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_auto_map_is_refused(directory, name):
    path = directory / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, "auto_map": {"AutoModel": "modeling.Evil"}}))
    with pytest.raises(ModelLoadError, match="auto_map"):
        find_model_files(str(directory))


def test_a_link_out_of_the_directory_is_refused(directory, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (directory / "extra.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelLoadError, match="link"):
        find_model_files(str(directory))


def test_a_link_inside_the_directory_is_fine(directory):
    (directory / "alias.json").symlink_to(directory / "config.json")
    find_model_files(str(directory))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(ModelLoadError, match=name.removeprefix("model")):
        find_model_files(str(directory))


def test_a_folder_of_models_is_not_taken_for_a_model(directory):
    (directory.parent / "train.py").touch()
    with pytest.raises(ModelLoadError, match=r"there is no config\.json in"):
        find_model_files(str(directory.parent))


def test_broken_json_is_named(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        find_model_files(str(directory))


def test_a_missing_directory_is_not_looked_for_in_a_hub(tmp_path):
    with pytest.raises(ModelLoadError, match="no such directory"):
        find_model_files(str(tmp_path / "nothing"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_every_deciding_file_is_in_the_fingerprint(directory, name):
    before = find_model_files(str(directory)).fingerprint("float32")
    assert find_model_files(str(directory)).fingerprint("float32") == before
    assert find_model_files(str(directory)).fingerprint("bfloat16") != before
    path = directory / name
    path.write_bytes(path.read_bytes() + b" ")
    assert find_model_files(str(directory)).fingerprint("float32") != before


def test_weights_in_more_parts_than_any_model_has_are_refused_unread(directory):
    (directory / "model.safetensors").write_bytes((9 << 20).to_bytes(8, "little"))
    with pytest.raises(ModelLoadError, match="its header has 9437184 bytes"):
        find_model_files(str(directory))
