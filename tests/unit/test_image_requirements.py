"""Which packages belong to which list of the images' requirements."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "k8s" / "images" / "requirements"


def lock():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "k8s" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REQUIREMENTS = """\
numpy==2.3.5 \\
    --hash=sha256:1 \\
    --hash=sha256:2
torch==2.9.1 \\
    --hash=sha256:3
triton==3.5.1 ; platform_machine == 'x86_64' \\
    --hash=sha256:4
nvidia-cublas-cu12==12.8 \\
    --hash=sha256:5
cuda-bindings==13.0 \\
    --hash=sha256:6
torchmetrics==1.0 \\
    --hash=sha256:7
"""


def test_what_torch_brings_on_devices_alone_is_in_the_list_for_devices_and_in_no_other(monkeypatch):
    module = lock()
    server = module.blocks(REQUIREMENTS)
    of_orchestrators = {"numpy": server["numpy"]}

    def compiled(requirements, *, arguments, constraints=None):
        return server if "server" in requirements else of_orchestrators

    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(module, "torch_for_cpus", lambda *, arguments: {})
    texts = module.lists(uv_arguments=[], pip_arguments=[])
    names = {file: set(module.blocks(text)) for file, text in texts.items()}
    assert names["torch-cuda.txt"] == {"torch", "triton", "nvidia-cublas-cu12", "cuda-bindings"}
    assert names["server.txt"] == {"torchmetrics"}
    assert names["orchestrator.txt"] == {"numpy"}
    assert names["vllm.txt"] == set(server) - {"numpy"}
    assert "torch-cpu.txt" not in names


def test_the_lists_that_are_shipped_have_no_package_twice():
    blocks = lock().blocks
    names = {file.stem: set(blocks(file.read_text())) for file in FOLDER.glob("*.txt")}
    server, orchestrator = names["server"], names["orchestrator"]
    assert not server & orchestrator
    assert not names["vllm"] & orchestrator
    assert not (server | orchestrator) & (names["torch-cuda"] | names["torch-cpu"])


def test_the_image_has_the_vllm_that_its_tests_run_with():
    (image,) = re.findall(r"^vllm==(\S+)", (FOLDER / "vllm.txt").read_text(), re.MULTILINE)
    tested = (ROOT / "constraints-vllm.txt").read_text()
    assert f"\nvllm-cpu=={image}\n" in tested
