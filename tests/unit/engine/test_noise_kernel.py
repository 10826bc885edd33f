"""The noise of a GPU's kernel is that of the specification: run in Triton's interpreter, or there.

`TRITON_INTERPRET=1 pytest tests/unit/engine/test_noise_kernel.py` needs no GPU, but Triton, which
comes with torch's CUDA wheels alone.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch

from paceline_engine.deciding.gumbel import add_noise
from paceline_engine.deciding.noise import Purpose

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
VECTORS = Path(__file__).parents[2] / "contract" / "vectors" / "noise.json"


def noise_of(token_ids, *, seed, position, purpose) -> list[float]:
    from paceline_engine.deciding.noise_kernel import add_gumbel

    scores = torch.zeros(1, len(token_ids), dtype=torch.float64, device=DEVICE)
    noisy = add_gumbel(
        scores,
        torch.tensor([position], device=DEVICE),
        seeds=torch.tensor([seed], device=DEVICE),
        purpose=purpose,
        token_ids=torch.tensor(token_ids, device=DEVICE),
    )
    return noisy[0].tolist()


def test_the_vectors_hold():
    for vector in json.loads(VECTORS.read_text())["vectors"]:
        (noise,) = noise_of(
            [vector["token_id"]],
            seed=int(vector["seed"]),
            position=int(vector["position"]),
            purpose=Purpose[vector["purpose"]],
        )
        expected = -math.log(-math.log(int(vector["bits"]) * 2.0**-53))
        assert noise == pytest.approx(expected, rel=1e-12), vector


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 2050])
def test_it_adds_what_torch_operators_add(vocabulary):
    from paceline_engine.deciding.noise_kernel import add_gumbel

    generator = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(3, vocabulary, dtype=torch.float64, generator=generator)
    scores[torch.rand(scores.shape, generator=generator) < 0.3] = -math.inf
    positions, seeds = torch.tensor([0, 5, 2**40]), torch.tensor([1, 2**52 + 7, 3 * 2**53 + 1])
    expected = add_noise(scores, positions, seed=seeds, purpose=Purpose.DRAFT)
    actual = add_gumbel(
        scores.to(DEVICE),
        positions.to(DEVICE),
        seeds=seeds.to(DEVICE),
        purpose=Purpose.DRAFT,
        token_ids=None,
    ).cpu()
    assert torch.equal(actual.isinf(), expected.isinf())
    assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)
