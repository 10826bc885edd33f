from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline_engine.deciding.noise import Purpose, noise_bits, pair_bits, philox, uniform
from support.gumbel import gumbel

VECTORS = Path(__file__).parents[2] / "contract" / "vectors" / "noise.json"


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    assert philox(counter, key) == expected


def test_the_vectors_hold():
    content = json.loads(VECTORS.read_text())
    assert content["purposes"] == {purpose.name: int(purpose) for purpose in Purpose}
    for vector in content["vectors"]:
        bits = noise_bits(
            int(vector["seed"]),
            int(vector["position"]),
            token_id=vector["token_id"],
            purpose=Purpose[vector["purpose"]],
        )
        assert bits == int(vector["bits"])
        assert gumbel(bits) == pytest.approx(vector["gumbel"], abs=1e-12)


def test_arrays_and_tensors_give_the_same_bits_as_ints():
    seed, position = (1 << 53) - 1, (1 << 40) + 12345
    pairs = np.arange(600, dtype=np.int64)
    low, high = np.full_like(pairs, position & 0xFFFFFFFF), np.full_like(pairs, position >> 32)
    purpose = np.full_like(pairs, int(Purpose.DRAFT))
    in_numpy = pair_bits(seed, (pairs, low, high, purpose))
    tensors = tuple(torch.from_numpy(word) for word in (pairs, low, high, purpose))
    in_torch = pair_bits(seed, tensors)
    expected = [
        noise_bits(seed, position, token_id=token, purpose=Purpose.DRAFT) for token in range(1200)
    ]
    assert in_numpy[0].tolist() == in_torch[0].tolist() == expected[0::2]
    assert in_numpy[1].tolist() == in_torch[1].tolist() == expected[1::2]


def test_words_of_different_shapes_broadcast_and_stay_as_they_are():
    pairs, positions = np.arange(5, dtype=np.int64), np.array([[3], [900]], dtype=np.int64)
    before = pairs.copy(), positions.copy()
    even, odd = pair_bits(99, (pairs, positions, 0, int(Purpose.EXACT)))
    assert even.shape == odd.shape == (2, 5)
    for row, position in enumerate((3, 900)):
        for pair in range(5):
            for token, bits in ((2 * pair, even), (2 * pair + 1, odd)):
                expected = noise_bits(99, position, token_id=token, purpose=Purpose.EXACT)
                assert bits[row, pair] == expected
    assert np.array_equal(pairs, before[0])
    assert np.array_equal(positions, before[1])


@pytest.mark.parametrize("bits", [1, (1 << 52) + 1, (1 << 53) - 1])
def test_extreme_bits_stay_inside_the_open_interval(bits):
    assert 0 < uniform(bits) < 1
    assert math.isfinite(gumbel(bits))
