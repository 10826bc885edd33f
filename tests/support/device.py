"""The device that tests compute real models on: `TEST_DEVICE=cuda:0 pytest tests/unit/engine`.

Tests that ask for what only a CPU has are skipped on another device.
"""

from __future__ import annotations

import os
from functools import wraps

import pytest

DEVICE = os.environ.get("TEST_DEVICE", "cpu")

on_a_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="is about a CPU, or makes tensors there")
"""Marks what is about a CPU, or makes its own tensors there."""


def compute_there() -> None:
    """Let the engine take the device where a test names none."""
    if DEVICE == "cpu":
        return
    from paceline_engine.torch_backend.transformers import TransformersBackend

    build = TransformersBackend.__init__
    assert build.__kwdefaults__ is not None
    build.__kwdefaults__["device"] = DEVICE

    @wraps(build)
    def build_there(self: TransformersBackend, model: str, **options: object) -> None:
        if options.get("device", DEVICE) == DEVICE:
            for name in ("invariant", "weights"):
                if options.get(name, build.__kwdefaults__[name]) != build.__kwdefaults__[name]:
                    pytest.skip(f"{name}: only a CPU computes so")
        build(self, model, **options)

    TransformersBackend.__init__ = build_there
