from __future__ import annotations

import pytest
import torch

from paceline_training.windows import TextTooShortError, TextWindows

STREAM = torch.arange(100)


def test_an_epoch_shows_each_piece_of_the_text_once():
    windows = TextWindows([STREAM], length=10, batch=3, seed=1)
    epoch = torch.cat([windows.at(step) for step in range(3)])  # 9 pieces, 3 a step
    starts = epoch[:, 0].tolist()
    assert len({start % 10 for start in starts}) == 1
    assert len(set(starts)) == 9
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[0]) + 10)) for row in epoch)


def test_epochs_differ_and_so_do_seeds():
    windows = TextWindows([STREAM], length=10, batch=3, seed=1)
    other = TextWindows([STREAM], length=10, batch=3, seed=2)
    assert not torch.equal(windows.at(0), windows.at(3))
    assert not torch.equal(windows.at(0), other.at(0))


def test_what_a_step_sees_depends_on_its_number_alone():
    one, other = (TextWindows([STREAM], length=10, batch=3, seed=1) for _ in range(2))
    later = one.at(5)
    one.at(2)
    assert torch.equal(later, other.at(5))


def test_streams_have_equal_shares():
    windows = TextWindows([STREAM, STREAM + 1000], length=10, batch=4, seed=1)
    batch = windows.at(0)
    assert (batch[:2] < 1000).all()
    assert (batch[2:] >= 1000).all()


def test_too_little_text_is_refused():
    with pytest.raises(TextTooShortError, match="has 29 tokens, and 2 windows of 10 need at least"):
        TextWindows([torch.arange(29)], length=10, batch=2, seed=1)
    TextWindows([torch.arange(30)], length=10, batch=2, seed=1)
