"""The folder that `make smollm2` makes, made where it is not yet."""

from __future__ import annotations

from pathlib import Path

import pytest

import smollm2
import smollm2_drafter

FOLDER = Path(__file__).parents[2] / "build" / "smollm2"


def smollm2_folder() -> Path:
    """Give the target's folder, with its drafter in it; skip where it cannot be fetched."""
    if smollm2.main(["--output", str(FOLDER)]):
        pytest.skip("SmolLM2 cannot be fetched here")
    drafter = FOLDER / "drafter"
    if not drafter.is_dir():
        assert smollm2_drafter.main(["--target", str(FOLDER), "--output", str(drafter)]) == 0
    return FOLDER
