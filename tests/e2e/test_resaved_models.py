"""A folder that was saved anew is told from the others by the key that differs, wherever one looks.

Its weights are theirs; its config.json has other words, of which nobody can be sure that they mean
the same (docs/adr/0039-a-model-is-what-its-files-mean.md).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from paceline import Client
from support.processes import ServerProcess, running
from support.system import bundled_model
from support.waiting import eventually

# What models were saved with before the library had `rope_parameters`.
OLD = {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
NEW = ("rope_parameters", "dtype", "head_dim", "attention_bias", "mlp_bias", "pretraining_tp")
TOLD = (
    "its config.json has attention_bias false, most targets' missing and 6 more of its keys; if it"
    " is the same model and was only saved anew, it needs their config.json"
)


@pytest.fixture(scope="module")
def folders(tiny_pair, tmp_path_factory):
    """A folder as it was published, and one that the library has saved anew."""
    old, new = (tmp_path_factory.mktemp(name) / "model" for name in ("published", "saved"))
    shutil.copytree(tiny_pair.target, old)
    config = json.loads((old / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in NEW}
    (old / "config.json").write_text(json.dumps({**kept, **OLD}))
    AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)
    shutil.copy(old / "tokenizer.json", new)
    return old, new


@pytest.fixture(scope="module")
def orchestrator(folders):
    old, new = folders
    targets = [
        bundled_model("target", index, directory=folder)
        for index, folder in enumerate((old, old, new))
    ]
    listed = ",".join(f"{it.name}={it.address}" for it in targets)
    server = ServerProcess("orchestrator", f"--targets={listed}")
    with running(*targets, server):
        yield server


def looked(orchestrator, *command):
    full = [sys.executable, "-m", "paceline_cli", *command, "--address", orchestrator.address]
    return subprocess.run(full, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_key_that_differs_is_named_wherever_one_looks(orchestrator):
    with Client(orchestrator.address) as client:
        servers = eventually(
            lambda: {it.name: it for it in client.info().servers if it.standing == "other_model"},
            what="one target is of another model",
        )
    assert servers.keys() == {"target-2"}
    assert TOLD in servers["target-2"].standing_detail
    eventually(lambda: TOLD in orchestrator.log, what="the log has it")
    for command in (("info",), ("top", "--once", "--interval", "0.2")):
        assert TOLD in " ".join(looked(orchestrator, *command).split())
