"""A model by its hub id: downloaded by the real library, from a hub on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import grpc
import pytest

from paceline.v1 import model_service_pb2 as pb
from paceline.v1.model_service_pb2_grpc import ModelServiceStub
from support.fake_hub import COMMIT, FakeHub
from support.ports import free_address
from support.processes import ServerProcess, running
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

ID = "someone/tiny"
STRAY = (
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/params.json",
    "original/other.safetensors",
    "trainer_state.json",
)
FLAGS = ("--dtype=float32", "--device=cpu", "--threads=1")


@pytest.fixture
def hub(tiny_pair, tmp_path, monkeypatch):
    repository = shutil.copytree(tiny_pair.target, tmp_path / "repository")
    (repository / "modeling.py").write_text("raise SystemExit('never run')")
    for name in STRAY:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).touch()
    hub = FakeHub({ID: repository})
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    with hub.serving() as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield hub


def test_a_model_is_served_by_its_hub_id_and_of_its_repository_only_data_is_fetched(hub):
    target = ServerProcess("target", f"--model={ID}", *FLAGS, is_warm=False)
    with running(target), grpc.insecure_channel(target.address) as channel:
        info = ModelServiceStub(channel).GetModelInfo(pb.GetModelInfoRequest(), timeout=120)
    assert (info.model_name, info.model_revision) == (ID, COMMIT)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(hub.fetched)
    assert not {"modeling.py", *(Path(name).name for name in STRAY)} & set(hub.fetched)


def test_without_a_network_one_sentence_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_ENDPOINT", f"http://{free_address()}")
    target = ServerProcess("target", f"--model={ID}", *FLAGS, is_warm=False).start()
    assert target.wait() == 1
    last = target.log.splitlines()[-1]
    assert last == (
        f"failed to start: model {ID!r}: there is no such directory here, and the hub cannot be"
        " reached: give the directory of a model that is on this machine"
    )


def test_an_id_that_the_hub_does_not_have_ends_the_server_with_one_clear_line(hub):
    target = ServerProcess("target", "--model=someone/else", *FLAGS, is_warm=False).start()
    assert target.wait() == 1
    assert "someone/else" in target.log
    assert "Traceback" not in target.log
