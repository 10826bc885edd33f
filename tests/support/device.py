"""The device that tests compute real models on: `TEST_DEVICE=cuda:0 pytest tests/unit/engine`.

Some of the engine's tests ask for what only a CPU has, or make their own tensors on the CPU. These
tests fail on another device (bench/LOG.md, 2026-11-26).
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("TEST_DEVICE", "cpu")


def compute_there() -> None:
    """Let the engine take the device where a test names none."""
    if DEVICE == "cpu":
        return
    from paceline_engine.torch_backend.transformers import TransformersBackend

    defaults = TransformersBackend.__init__.__kwdefaults__
    assert defaults is not None
    defaults["device"] = DEVICE
