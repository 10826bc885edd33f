"""What a server says at its start would be faster: only what it would load here."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn

from paceline_engine.torch_backend.int8_linear import has_vnni
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_engine.torch_backend.whole_products import tell_what_is_faster
from support.device import on_a_cpu

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not has_vnni() or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="the processor has no AVX-512 with VNNI",
)


@pytest.fixture
def told(caplog):
    """Give a function that returns the weights and dtypes that are recommended, as options."""

    def tell(*, model=None, dtype="float32", device=CPU, compiled=True):
        caplog.clear()
        with caplog.at_level("INFO"):
            tell_what_is_faster(
                "a model", model or nn.Linear(64, 8), dtype=dtype, device=device, compiled=compiled
            )
        return re.findall(r"int8|int4|without --dtype|--dtype bfloat16", caplog.text)

    return tell


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """Give a function that puts a C compiler first that does this before it compiles."""

    def put(script):
        for name in ("cc", "gcc", "clang"):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return put


@on_a_cpu
def test_what_is_recommended_can_be_loaded(tiny_pair, caplog):
    with caplog.at_level("INFO"):
        TransformersBackend(str(tiny_pair.target))
    (line,) = [each for each in caplog.messages if "would be faster" in each]
    weights = re.findall(r"int\d", line)
    assert weights == ["int8", "int4"]
    for kind in weights:
        assert TransformersBackend(str(tiny_pair.target), weights=kind).description.dtype == kind


def test_without_a_compiler_four_bits_are_not_recommended(told, monkeypatch):
    assert told()[:2] == ["int8", "int4"]
    monkeypatch.setenv("PATH", os.devnull)
    assert "int4" not in told()
    assert "int8" in told()


@pytest.mark.parametrize(
    "script",
    ["exit 1", "echo 'as: no such instruction: vpdpbusd' >&2; exit 1", "exit 0"],
    ids=["it fails", "its assembler is old", "it makes nothing"],
)
def test_with_a_compiler_that_does_not_work_they_are_not_either(script, told, broken_compiler):
    broken_compiler(script)
    assert "int4" not in told()
    assert "int8" in told()


def test_what_a_server_may_not_compile_is_not_recommended(told):
    assert "int4" not in told(compiled=False)


def test_a_model_without_groups_gets_eight_bits_recommended(told):
    assert "int4" not in told(model=nn.Linear(48, 8))
    assert "int8" in told(model=nn.Linear(48, 8))
    assert not {"int4", "int8"} & {*told(model=nn.Embedding(8, 64))}


def test_in_another_dtype_weights_come_with_the_word_to_leave_it_out(told):
    assert "without --dtype" in told(dtype="bfloat16")
    assert "without --dtype" not in told()


def test_what_a_processor_or_a_device_does_not_have_is_not_recommended(told, monkeypatch):
    assert told(device=torch.device("cuda")) == []
    monkeypatch.setattr("paceline_engine.torch_backend.whole_products.has_vnni", lambda: False)
    assert not {"int4", "int8"} & {*told()}
