import pytest

from paceline_bench.pair.acceptance import common_run
from paceline_bench.pair.engine import decode, measure_latency, measure_rows
from support.oracle import Oracle, Sampling

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def oracle(tiny_pair):
    return list(Oracle(tiny_pair.target).decode(PROMPT, Sampling(), 24))


def test_plain_decoding_is_the_oracles(engine, oracle):
    decoded = engine.plain(PROMPT, 24)
    assert list(decoded.token_ids) == oracle
    assert len(decoded.forward_ns) == 24
    assert decoded.first_token_ns == decoded.forward_ns[0]
    assert (decoded.draft_ns, decoded.blocks) == (0, ())


@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_speculation_gives_the_same_text_and_accounts_for_it(engine, oracle, lookahead):
    decoded = engine.speculative(lookahead)(PROMPT, 24)
    assert list(decoded.token_ids) == oracle
    assert all(1 <= block.drafted <= lookahead for block in decoded.blocks)
    # Each forward of the target gives one token beside those that it accepts.
    assert len(decoded.forward_ns) + sum(block.accepted for block in decoded.blocks) == 24
    assert decoded.draft_ns > 0


def test_max_gram_alone_gives_the_same_text_in_fewer_forwards(engine, oracle):
    decoded = engine.from_the_text(4)(PROMPT, 24)
    assert list(decoded.token_ids) == oracle
    assert len(decoded.forward_ns) + sum(block.accepted for block in decoded.blocks) == 24
    assert all(block.drafted <= 4 for block in decoded.blocks)
    # What this model says repeats itself before long.
    assert len(decoded.forward_ns) < 24


def test_a_drafter_that_is_the_target_is_always_right(engine):
    pair = type(engine)(engine.target, engine.target)
    decoded = pair.speculative(4)(PROMPT, 15)
    assert [(block.drafted, block.accepted) for block in decoded.blocks] == [(4, 4)] * 3
    assert common_run(decoded.token_ids, pair.plain(PROMPT, 15).token_ids) == 15


def test_a_block_never_reaches_beyond_the_text(engine, oracle):
    assert list(engine.speculative(8)(PROMPT, 3).token_ids) == oracle[:3]
    assert list(engine.speculative(8)(PROMPT, 1).token_ids) == oracle[:1]


def test_the_first_forward_is_told_from_the_others(engine):
    latency = measure_latency(engine.drafter, [PROMPT, PROMPT * 2, PROMPT], 4)
    assert (len(latency.first_ms), len(latency.later_ms)) == (3, 9)
    assert min(*latency.first_ms, *latency.later_ms) > 0


def test_every_size_of_a_forward_is_measured(engine):
    sizes = []
    model = engine.target
    real = model._forward
    model._forward = lambda feeds, interrupt: (
        sizes.extend(len(feed.token_ids) for feed in feeds) or real(feeds, interrupt)
    )
    try:
        found = measure_rows(model, PROMPT, (1, 4, 9), repeats=3)
    finally:
        del model._forward
    assert list(found) == [1, 4, 9]
    assert sizes == [len(PROMPT), *[1, 4, 9] * 3]


def test_the_gap_between_two_tokens_is_that_of_their_scores(engine, oracle):
    best = oracle[0]
    assert engine.gap(PROMPT, (best, best)) == 0
    assert engine.gap(PROMPT, (best, (best + 1) % 300)) > 0


def test_one_model_alone_decodes_its_own_text(engine):
    assert decode(engine.target, PROMPT, 6).token_ids == engine.plain(PROMPT, 6).token_ids
