from __future__ import annotations

import math
import random

import pytest
import torch

from paceline.errors import InternalError
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding import sampling
from paceline_engine.deciding.gumbel import add_noise
from paceline_engine.deciding.noise import Purpose, noise_bits
from paceline_engine.deciding.sampling import (
    Draw,
    argmax_tokens,
    choose_each,
    choose_tokens,
    draw_draft,
    filtered_scores,
    in_parts,
    noisy_scores,
    token_logprobs,
    top_logprobs,
)
from support.gumbel import gumbel


def survivors(logits: list[float], **parameters: float) -> set[int]:
    chosen = SamplingParameters(**{"temperature": 1.0, **parameters})
    scores = filtered_scores(torch.tensor([logits]), chosen)
    return {index for index, score in enumerate(scores[0].tolist()) if score > -math.inf}


def log(*probabilities: float) -> list[float]:
    return [math.log(probability) for probability in probabilities]


def test_temperature_zero_is_the_largest_logit_and_ties_go_to_the_smaller_id():
    logits = torch.zeros(2, 4096)
    logits[0, :4] = torch.tensor([1.0, 3.0, 3.0, 2.0])
    greedy = SamplingParameters()
    assert choose_tokens(logits, first_position=7, parameters=greedy, seed=1) == [1, 0]
    assert argmax_tokens(logits) == [1, 0]
    token, said = draw_draft(logits[1:], position=0, parameters=greedy, seed=1)
    assert (token, said.token_ids) == (0, (0,)), "a draft breaks ties as the target does"


def test_top_k_keeps_the_likeliest_and_what_ties_with_the_last_of_them():
    assert survivors([1.0, 4.0, 3.0, 2.0], top_k=2) == {1, 2}
    assert survivors([1.0, 4.0, 3.0, 3.0], top_k=2) == {1, 2, 3}
    assert survivors([1.0, 4.0, 3.0, 2.0], top_k=0) == {0, 1, 2, 3}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = log(0.1, 0.5, 0.25, 0.15)
    assert survivors(logits, top_p=0.5) == {1}
    assert survivors(logits, top_p=0.51) == {1, 2}
    assert survivors(logits, top_p=0.76) == {1, 2, 3}
    assert survivors(logits, top_p=1e-9) == {1}
    assert survivors(logits, top_p=1.0) == {0, 1, 2, 3}


@pytest.mark.parametrize("top_k", [0, 900])
def test_a_nucleus_is_the_same_however_many_tokens_it_takes(top_k):
    # The first row needs a few tokens, the second more than half of them.
    spread = torch.tensor([[6.0], [0.1]])
    logits = torch.randn(2, 2000, generator=torch.Generator().manual_seed(4)) * spread
    parameters = SamplingParameters(temperature=1.0, top_k=top_k, top_p=0.9)
    together = filtered_scores(logits, parameters)
    for row in range(2):
        assert torch.equal(together[row], filtered_scores(logits[row : row + 1], parameters)[0])
        ordered, order = logits[row].double().sort(descending=True)
        kept = ordered[: top_k or 2000]
        needed = 1 + int((kept.softmax(-1).cumsum(-1) < 0.9).sum())
        found = (together[row] > -math.inf).nonzero()[:, 0].tolist()
        assert found == sorted(order[:needed].tolist())
    assert (together > -math.inf).sum(-1).tolist()[0] < 256 < (together > -math.inf).sum(-1)[1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 100.0])
def test_extreme_temperatures_give_a_token(temperature):
    logits = torch.tensor([[1.0, 30.0, -40.0, -math.inf]])
    parameters = SamplingParameters(temperature=temperature)
    chosen = choose_tokens(logits, first_position=0, parameters=parameters, seed=3)
    assert chosen[0] in ({1} if temperature < 1 else {0, 1, 2})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_an_error_not_a_token(bad):
    logits = torch.tensor([[1.0, bad, 0.0, 0.0]])
    for temperature in (0.0, 1.0):
        with pytest.raises(InternalError):
            choose_tokens(
                logits, first_position=0, parameters=SamplingParameters(temperature), seed=0
            )


@pytest.mark.parametrize("vocabulary", [9, 10])
def test_noise_is_the_specified_one_for_survivors_only(vocabulary):
    scores = torch.zeros(3, vocabulary, dtype=torch.float64)
    scores[1, 4] = scores[2, vocabulary - 1] = -math.inf
    first = (1 << 32) - 1
    noisy = add_noise(scores, range(first, first + 3), seed=99, purpose=Purpose.RESIDUAL)
    for row in range(3):
        for token in range(vocabulary):
            bits = noise_bits(99, first + row, token_id=token, purpose=Purpose.RESIDUAL)
            expected = gumbel(bits) if scores[row, token] == 0 else -math.inf
            assert noisy[row, token].item() == pytest.approx(expected, abs=1e-12)


def test_noise_for_a_few_survivors_is_that_which_they_have_among_all():
    everybody = torch.zeros(3, 101, dtype=torch.float64)
    few = torch.full_like(everybody, -math.inf)
    for row, token in ((0, 7), (0, 100), (1, 6), (2, 0), (2, 1)):
        few[row, token] = 0
    positions = range(1 << 33, (1 << 33) + 3)
    settings = {"seed": 5, "purpose": Purpose.EXACT}
    noisy = add_noise(few, positions, **settings)
    assert torch.equal(noisy > -math.inf, few == 0)
    assert torch.equal(noisy[few == 0], add_noise(everybody, positions, **settings)[few == 0])


def test_choosing_follows_the_distribution():
    # n = 20000 positions, one distribution of 8 tokens. Hoeffding: one share is off by more than
    # 0.021 with p = 2 exp(-2 n 0.021^2) = 4.4e-8; any of 8 with p < 4e-7.
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(1)).expand(20000, 8)
    parameters = SamplingParameters(temperature=0.9)
    chosen = choose_tokens(logits, first_position=0, parameters=parameters, seed=11)
    shares = torch.bincount(torch.tensor(chosen), minlength=8) / len(chosen)
    assert (shares - (logits[0] / 0.9).softmax(-1)).abs().max() < 0.021


def test_log_probabilities_are_those_of_the_plain_softmax():
    logits = torch.randn(2, 20)
    expected = logits.double().log_softmax(-1)
    assert token_logprobs(logits, [3, 19]) == pytest.approx(
        (expected[0, 3].item(), expected[1, 19].item())
    )


def test_the_likeliest_tokens_come_in_order_and_ties_by_the_smaller_id():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    said = logits[0].double().log_softmax(-1).tolist()
    for count in range(1, 9):
        (found,) = top_logprobs(logits, count)
        assert found == tuple((token, said[token]) for token in (1, 3, 2, 4, 5, 0)[:count])


def test_what_is_impossible_is_not_among_the_likeliest():
    logits = torch.tensor([[0.0, -math.inf, 0.0], [2.0, 1.0, 0.0]])
    first, second = top_logprobs(logits, 3)
    assert [token for token, _ in first] == [0, 2]
    assert [logprob for _, logprob in first] == pytest.approx([math.log(0.5)] * 2)
    assert [token for token, _ in second] == [0, 1, 2]


def test_a_draft_is_drawn_from_exactly_what_it_says():
    # As above: n = 4000, Hoeffding bound 0.047 for each of 6 tokens, p < 2e-7.
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -9.0]])
    parameters = SamplingParameters(temperature=1.0, min_p=0.01)
    counts = torch.zeros(6)
    for position in range(4000):
        token, said = draw_draft(logits, position=position, parameters=parameters, seed=1)
        counts[token] += 1
    assert sorted(said.token_ids) == [0, 1, 2, 3, 4]
    assert sum(said.probabilities) == pytest.approx(1, abs=1e-6)
    assert list(said.probabilities) == torch.tensor(said.probabilities).tolist()
    for token, probability in zip(said.token_ids, said.probabilities, strict=True):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.047)
    assert counts[5] == 0


def test_a_draft_distribution_is_cut_to_its_limit():
    logits = torch.randn(1, 6000, generator=torch.Generator().manual_seed(2))
    _, said = draw_draft(logits, position=0, parameters=SamplingParameters(1.0), seed=1)
    assert len(said.token_ids) == 4096
    assert set(said.token_ids) == set(logits[0].topk(4096).indices.tolist())


def test_a_greedy_draft_is_a_point_mass():
    token, said = draw_draft(
        torch.tensor([[0.0, 2.0, 1.0]]), position=0, parameters=SamplingParameters(), seed=1
    )
    assert (token, said.token_ids, said.probabilities) == (1, (1,), (1.0,))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_from_scores_that_are_no_numbers_is_an_error(bad, temperature):
    logits = torch.tensor([[1.0, bad, 0.0, 0.0]])
    with pytest.raises(InternalError):
        draw_draft(logits, position=0, parameters=SamplingParameters(temperature), seed=1)


WAYS = [
    SamplingParameters(),
    SamplingParameters(1.0),
    SamplingParameters(0.7, top_p=0.9),
    SamplingParameters(1.3, top_k=40, min_p=0.01),
]


@pytest.mark.parametrize("vocabulary_size", [300, 301])
@pytest.mark.parametrize("most_numbers", [1, 1000, 1 << 18])
def test_rows_chosen_together_are_chosen_as_each_alone(vocabulary_size, most_numbers, monkeypatch):
    monkeypatch.setattr(sampling, "_MOST_NUMBERS", most_numbers)
    chance = random.Random(3)
    logits = torch.randn(60, vocabulary_size, generator=torch.Generator().manual_seed(3)) * 3
    draws = [
        Draw(chance.choice([5, 9, 1 << 40]), chance.choice(WAYS), chance.choice([1, 2, 1 << 50]))
        for _ in logits
    ]
    alone = [
        choose_tokens(
            row[None], first_position=draw.position, parameters=draw.parameters, seed=draw.seed
        )[0]
        for row, draw in zip(logits, draws, strict=True)
    ]
    assert choose_each(logits, draws) == alone


def test_chosen_tokens_come_to_the_host_at_once(monkeypatch):
    copies, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: copies.append(self) or tolist(self))
    monkeypatch.setattr(sampling, "_MOST_NUMBERS", 600)  # two rows at once
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(5))
    draws = [Draw(7, SamplingParameters(n % 2), n) for n in range(9)]
    chosen = choose_each(logits, draws)
    assert len(copies) == 1
    assert chosen == [choose_each(logits[n : n + 1], [draws[n]])[0] for n in range(9)]


def test_an_accelerator_chooses_for_all_rows_at_once_that_its_memory_holds():
    """A tensor without memory stands for one on an accelerator."""
    on_cpu, elsewhere = (
        len(in_parts(torch.empty(count, 151_936, device=device))[0])
        for device, count in (("cpu", 2), ("meta", 10_000))
    )
    assert on_cpu == 1
    assert 200 < elsewhere <= 2**28 / 8 / 151_936


@pytest.mark.parametrize("parameters", WAYS)
def test_a_row_of_no_numbers_is_told_and_harms_no_other(parameters):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(5))
    draws = [Draw(7, parameters, seed) for seed in range(3)]
    expected = choose_each(logits, draws)
    logits[1, 17] = math.nan
    assert choose_each(logits, draws) == [expected[0], None, expected[2]]


def test_rows_of_different_positions_have_the_noise_of_theirs():
    logits, parameters = torch.zeros(3, 64), SamplingParameters(1.0)
    scores = noisy_scores(logits, positions=[9, 4, 9], parameters=parameters, seed=6)
    for row, position in enumerate((9, 4, 9)):
        expected = add_noise(logits[:1].double(), [position], seed=6, purpose=Purpose.EXACT)
        assert torch.equal(scores[row], expected[0])
