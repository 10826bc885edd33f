"""What Muon's steps look like beside AdamW's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline_training.optimizers import build_optimizer

RATE = 0.01


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(96, 64))
        self.norm = nn.Parameter(torch.ones(64))


def steps(name, *, rate=RATE):
    """Return the first step of a matrix, whose gradient has few large directions, and a vector."""
    torch.manual_seed(1)
    learner = Learner()
    optimizer = build_optimizer(name, [learner], rate=RATE)
    left, _, right = torch.linalg.svd(torch.randn(96, 64), full_matrices=False)
    learner.matrix.grad = left @ torch.diag(0.9 ** torch.arange(64.0)) @ right
    learner.norm.grad = torch.randn(64)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()
    assert learner.matrix.grad is None
    assert learner.norm.grad is None
    # What is large stays as large: nothing decays.
    return learner.matrix.detach() - 1, learner.norm.detach() - 1


def test_muons_step_is_about_as_large_in_all_directions_of_a_matrix():
    (muon, _), (adamw, _) = steps("muon"), steps("adamw")

    def share_of_large_directions(step):
        values = torch.linalg.svdvals(step)
        return float((values > values.max() / 2).float().mean())

    assert share_of_large_directions(muon) > 0.8
    assert share_of_large_directions(adamw) < 0.5
    # AdamW's root mean square is 0.2 of the rate in the long run; in its first step it is the rate.
    assert float(muon.square().mean().sqrt()) == pytest.approx(0.2 * RATE, rel=0.2)


def test_what_is_no_matrix_learns_as_with_adamw():
    assert torch.equal(steps("muon")[1], steps("adamw")[1])


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_rate_of_a_step_is_the_schedules(name):
    for slow, fast in zip(steps(name, rate=RATE / 2), steps(name), strict=True):
        torch.testing.assert_close(2 * slow, fast)
