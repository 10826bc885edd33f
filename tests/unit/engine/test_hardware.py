"""What a server says of its hardware is the same for all that share it, and for nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.torch_backend import device as module
from paceline_engine.torch_backend.device import hardware_of, usable_device

CPU = torch.device("cpu")
SAY = (
    "import torch; from paceline_engine.torch_backend.device import hardware_of;"
    "print(hardware_of(torch.device('cpu'), threads=1).identity)"
)


def test_processes_on_the_same_cores_say_the_same():
    said = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == hardware_of(CPU, threads=1).identity


@pytest.mark.parametrize(("threads", "share"), [(1, 0.25), (3, 0.75), (4, 1.0), (64, 1.0)])
def test_a_thread_keeps_one_of_the_cores_busy_that_the_process_may_use(monkeypatch, threads, share):
    monkeypatch.setattr(module, "_usable_cores", lambda: {0, 1, 6, 7})
    assert hardware_of(CPU, threads=threads).share == share


def test_sets_of_cores_are_told_apart_and_machines(monkeypatch):
    said = set()
    for machine, cores in [("a", {0, 1}), ("a", {2, 3}), ("b", {0, 1})]:
        monkeypatch.setattr(module, "_machine", lambda machine=machine: machine)
        monkeypatch.setattr(module, "_usable_cores", lambda cores=cores: cores)
        said.add(hardware_of(CPU, threads=1).identity)
    assert len(said) == 3


def test_where_a_process_cannot_be_bound_to_cores_all_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert hardware_of(CPU, threads=2).share == 0.25


def gpus(monkeypatch, *properties):
    module = SimpleNamespace(get_device_properties=lambda device: properties[device.index])
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)


def test_a_gpu_is_known_by_its_own_name_whatever_its_number_and_is_taken_whole(monkeypatch):
    one, other = SimpleNamespace(uuid="GPU-1"), SimpleNamespace(uuid="GPU-2")
    gpus(monkeypatch, one, other)
    said = [hardware_of(torch.device(f"cuda:{index}"), threads=1) for index in (0, 1)]
    gpus(monkeypatch, other, one)
    assert hardware_of(torch.device("cuda:1"), threads=8) == said[0]
    assert said[0].identity != said[1].identity
    assert said[0].share == 1.0


def test_a_device_without_a_name_of_its_own_is_its_machines(monkeypatch):
    gpus(monkeypatch, SimpleNamespace(), SimpleNamespace())
    devices = [torch.device("cuda:0"), torch.device("cuda:1")]
    said = {hardware_of(device, threads=1).identity for device in devices}
    monkeypatch.setattr(module, "_machine", lambda: "another")
    said |= {hardware_of(device, threads=1).identity for device in devices}
    assert len(said) == 4


def test_what_is_said_does_not_tell_what_it_was_made_of(monkeypatch):
    monkeypatch.setattr(module, "_machine", lambda: "secret")
    identity = hardware_of(CPU, threads=1).identity
    assert "secret" not in identity
    assert len(identity) <= 64


NAMES = [
    *("mps", "mps:0", "xpu", "meta", "hpu", "privateuseone", "xla", "mtia", "vulkan", "opengl"),
    *("", "gpu", "CPU", "cuda:x", "cuda:-1", "0", "cpu0"),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_models_are_not_computed_on_is_refused_in_one_short_line(name):
    with pytest.raises(ModelLoadError, match="models are computed on cpu, cuda, cuda:1") as it:
        usable_device(name)
    assert repr(name) in str(it.value)
    assert len(str(it.value)) < 120


@pytest.mark.parametrize(
    ("count", "name", "words"),
    [(0, "cuda", "finds no GPU"), (0, "cuda:9", "finds no GPU"), (2, "cuda:9", "one is cuda:1")],
)
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(monkeypatch, count, name, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ModelLoadError, match=words) as it:
        usable_device(name)
    assert f"device '{name}' cannot be used here" in str(it.value)


def test_a_dtype_that_a_device_does_not_know_is_refused_before_a_model_is_read():
    for dtype in ("float32", "bfloat16", "float16", "float64"):
        assert usable_device("cpu", dtype=dtype) == CPU
    for dtype in ("float8_e4m3fn", "complex32x"):
        with pytest.raises(ModelLoadError, match=f"dtype '{dtype}' cannot be computed on"):
            usable_device("cpu", dtype=dtype)
