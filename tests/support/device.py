"""The device that tests compute real models on: `TEST_DEVICE=cuda:0 pytest tests/unit/engine`.

Several of the engine's tests are about a CPU, or compare with tensors of their own there; they fail
elsewhere for that reason (bench/LOG.md, 2026-11-26).
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
