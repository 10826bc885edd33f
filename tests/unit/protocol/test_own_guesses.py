"""Self-speculation on the virtual clock: a target guesses what follows its own next token."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline_bench.protocol_runs import Setup, own_guesses, run_protocol
from paceline_protocol.laboratory.guesses import OwnGuesses
from paceline_protocol.laboratory.oracles import AgreementOracle
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy
from paceline_protocol.ranks import runner_up_shares

CHAIN = ((0,), (0, 0), (0, 0, 0))
SHARES = runner_up_shares(0.4)


TARGET = ServerLatency(10, 10)


def run(guesses, *, target=TARGET, max_tokens=40, seed=0):
    setup = Setup(Strategy.SELF_SPECULATIVE, target, ServerLatency(1, 1), guesses=guesses)
    result = run_protocol(
        setup, acceptance_rate=0.5, max_tokens=max_tokens, seed=seed, shares=SHARES
    )
    assert result.token_ids == [2 * (1 + place) for place in range(max_tokens)]
    return result


def test_where_every_guess_is_right_a_forward_gives_one_token_more_than_guesses():
    result = run(OwnGuesses((1.0, 1.0, 1.0), CHAIN), max_tokens=41)
    # The first forward has nothing to judge.
    assert result.target_forwards == 1 + 40 // 4
    assert result.total_time == 10 * result.target_forwards


def test_where_no_guess_is_right_it_is_plain_decoding():
    result = run(OwnGuesses((0.0, 0.0), ((0,), (0, 0))))
    assert (result.target_forwards, result.total_time) == (40, 400)
    assert run(None).target_forwards == 40


def test_rows_and_guessing_have_their_price():
    target = ServerLatency(100, 10, row=1, guess=5)
    result = run(OwnGuesses((0.0, 0.0, 0.0), CHAIN), target=target, max_tokens=5)
    # After the prompt: three guesses judged, then two and one, for so much is left; the last two
    # are asked for no more.
    assert result.total_time == 100 + (10 + 3 + 5) + (10 + 2 + 5) + (10 + 1) + 10


def test_a_guess_is_right_as_often_as_its_rate_says_at_each_rank_and_by_itself():
    """4,000 draws; each share within 5 standard errors: false alarm below 1e-5."""
    count, rates = 4_000, (0.6, 0.3)
    oracle = AgreementOracle(
        0.5,
        seed=2,
        length=count + 2,
        shares=SHARES,
        guesses=OwnGuesses(rates, ((0,), (1,), (0, 0), (0, 1))),
    )
    found = Counter()
    for position in range(1, count + 1):
        first, second, third, fourth = oracle.guess([0] * position).token_ids
        found.update(
            {
                (0, 0): first == 2 * position,
                (0, 1): second == 2 * position,
                (1, 0): third == 2 * (position + 1),
                (1, 1): fourth == 2 * (position + 1),
                "both": first == 2 * position and third == 2 * (position + 1),
            }
        )
    shares = {(0, 0): 0.6, (0, 1): 0.4 * 0.4, (1, 0): 0.3, (1, 1): 0.7 * 0.4, "both": 0.18}
    for key, share in shares.items():
        error = (share * (1 - share) / count) ** 0.5
        assert found[key] / count == pytest.approx(share, abs=5 * error)


def test_the_tree_is_the_likeliest_of_its_size():
    chain = own_guesses((0.9, 0.9, 0.9), node_count=3, shares=SHARES)
    assert chain.paths == CHAIN
    bush = own_guesses((0.5,), node_count=3, shares=SHARES)
    assert bush.paths == ((0,), (1,), (2,))
    assert own_guesses((), node_count=3, shares=SHARES) is None


def test_tokens_of_a_forward_are_as_the_rates_say():
    """1 + a + a b; 60 generations of 100 tokens, within a twentieth."""
    guesses = OwnGuesses((0.6, 0.5), ((0,), (0, 0)))
    results = [run(guesses, max_tokens=100, seed=seed) for seed in range(60)]
    tokens = 60 * 100 / sum(result.target_forwards for result in results)
    assert tokens == pytest.approx(1 + 0.6 + 0.6 * 0.5, rel=0.05)
