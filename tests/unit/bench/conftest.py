"""Pairs of tiny models for the benchmarks' tests, and one core for simulations."""

from __future__ import annotations

import os

import pytest
import torch

from paceline_bench.pair.engine import EnginePair
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_models import TinyPair, tiny_pair

__all__ = ["tiny_pair"]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations run in this process: to start others takes longer than what tests simulate."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


@pytest.fixture(scope="session")
def engine(tiny_pair: TinyPair) -> EnginePair:
    return EnginePair(
        TransformersBackend(str(tiny_pair.target)), TransformersBackend(str(tiny_pair.drafter))
    )
