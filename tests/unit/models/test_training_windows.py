"""The bundled models' windows of text: whole ones, wherever an epoch begins to cut."""

from __future__ import annotations

import torch

from growth import CONTEXT
from training import Windows


def test_every_window_is_whole_in_every_epoch():
    stream = torch.arange(3 * CONTEXT + 1)
    windows = Windows([stream], batch=1, seed=3)
    for step in range(60):
        (window,) = windows.at(step).tolist()
        assert window == [*range(window[0], window[0] + CONTEXT + 1)]


def test_an_epoch_has_no_token_twice_and_the_next_one_is_cut_elsewhere():
    stream = torch.arange(5 * CONTEXT)
    windows = Windows([stream], batch=1, seed=3)
    starts = [int(windows.at(step)[0, 0]) for step in range(6)]
    for epoch in (starts[:3], starts[3:]):
        assert all(abs(one - other) >= CONTEXT for one in epoch for other in epoch if one != other)
        assert len(set(epoch)) == 3
    assert {start % CONTEXT for start in starts[:3]} != {start % CONTEXT for start in starts[3:]}
