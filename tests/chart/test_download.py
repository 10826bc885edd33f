"""What fetches a model before a server starts, run here as rendered, from a hub on this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from paceline_engine.model_files.files import find_model_files
from support.fake_hub import COMMIT, FakeHub
from support.manifests import install
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

ID = "someone/model"
INDEX = "model.safetensors.index.json"
READ = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
LEFT = {
    *("consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "modeling.py"),
    *("original/params.json", "original/consolidated.00.pth", "onnx/model.safetensors"),
}
PARTS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.fixture
def repository(tmp_path):
    directory = tmp_path / "repository"
    for name in READ | LEFT:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")
    return directory


def command(directory):
    """Return what the init container runs, with another place for the model."""
    model = {"source": "download", "download": {"repository": ID}}
    (container,) = (
        install({"target": {"model": model}}).pod("-target-default").spec["initContainers"]
    )
    assert container["command"][0] == "python"
    arguments = [str(directory) if it == "/models" else it for it in container["args"]]
    return [sys.executable, *container["command"][1:], *arguments]


def environment(tmp_path, address):
    return {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": address}


def download(repository, tmp_path):
    """Run the init container; return how it ended, and what it has fetched."""
    directory = tmp_path / "models"
    with FakeHub({ID: repository}).serving() as address:
        ran = subprocess.run(
            command(directory),
            env=environment(tmp_path, address),
            capture_output=True,
            text=True,
            timeout=120,
        )
    fetched = {
        str(it.relative_to(directory))
        for it in directory.rglob("*")
        if it.is_file() and ".cache" not in it.parts
    }
    return ran, fetched


def test_a_download_fetches_the_parts_that_the_index_names_and_no_other_weights(
    repository, tmp_path
):
    for name in (*PARTS, "model-00003-of-00003.safetensors"):
        (repository / name).touch()
    weights = dict(zip(("a", "b"), sorted(PARTS), strict=True))
    (repository / INDEX).write_text(json.dumps({"weight_map": weights}))
    ran, fetched = download(repository, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert fetched == {*READ, *PARTS, INDEX}
    assert COMMIT in ran.stdout


def test_a_model_that_was_fetched_so_is_whole(tiny_pair, tmp_path):
    repository = shutil.copytree(tiny_pair.target, tmp_path / "repository")
    (repository / "consolidated.safetensors").touch()
    ran, _ = download(repository, tmp_path)
    assert ran.returncode == 0, ran.stderr
    fetched = find_model_files(str(tmp_path / "models"))
    assert fetched.fingerprint("float32") == find_model_files(str(repository)).fingerprint(
        "float32"
    )


def test_without_an_index_the_one_file_is_fetched(repository, tmp_path):
    (repository / "model.safetensors").touch()
    ran, fetched = download(repository, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert fetched == {*READ, "model.safetensors"}


def test_an_index_that_names_another_folders_file_ends_it_with_its_name(repository, tmp_path):
    (repository / INDEX).write_text(json.dumps({"weight_map": {"a": "onnx/model.safetensors"}}))
    ran, fetched = download(repository, tmp_path)
    assert ran.returncode
    assert "names 'onnx/model.safetensors'" in ran.stderr
    assert not [name for name in fetched if name.endswith(".safetensors")]


def test_a_download_ends_when_its_pod_is_to_go(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        address = f"http://127.0.0.1:{hub.getsockname()[1]}"
        process = subprocess.Popen(
            command(tmp_path / "models"),
            env=environment(tmp_path, address),
            stderr=subprocess.DEVNULL,
        )
        asking, _ = hub.accept()
        with asking:
            process.send_signal(signal.SIGTERM)
            # It ends itself. As a container's first process it would not die of the signal.
            assert process.wait(60) == 143
