"""Sessions as prefixes in vLLM's cache: kept, taken over, evicted, abandoned."""

from __future__ import annotations

import pytest

from on_vllm.test_decoding import NEVER, decoded, item, plain, run_all
from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.terms.backend import ForwardInterrupted, Interrupt
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Decode, Draft, Judge

SPEC = SessionSpec(400)
SAMPLED = SessionSpec(400, SamplingParameters(0.9), seed=4)
TEXT = [7 + 31 * n % 1900 for n in range(130)]
CHAIN = (5, 6, 7, 8, 9, 10)


def judged(backend, spec, prefix, cache, proposal=CHAIN):
    (outcomes,) = run_all(
        backend, [item(backend, spec, prefix, Judge(Proposal(proposal)), cache=cache)]
    )
    return outcomes


@pytest.mark.parametrize("spec", [SPEC, SAMPLED])
def test_a_session_finds_its_own_blocks_and_no_other_does(spec, backend, outputs):
    first, second = backend.new_cache(spec), backend.new_cache(spec)
    run_all(backend, [item(backend, spec, TEXT, Draft(), cache=first)])
    del outputs[:]
    outcomes = judged(backend, spec, TEXT, first)
    assert {it.num_cached_tokens for it in outputs} == {128}
    assert sum(it.row_count for it in outcomes) == 1 + len(CHAIN)
    del outputs[:]
    outcomes = judged(backend, spec, TEXT, second)
    assert min(it.num_cached_tokens for it in outputs) == 0
    assert sum(it.row_count for it in outcomes) == len(TEXT) + len(CHAIN)


def test_a_sequence_that_begins_with_an_ended_one_finds_its_blocks(backend, outputs):
    ended = backend.new_cache(SPEC)
    run_all(backend, [item(backend, SPEC, TEXT, Draft(), cache=ended)])
    ended.end()
    cache = backend.new_cache(SPEC)
    assert ended.can_be_copied
    cache.begin_like(ended)
    del outputs[:]
    outcomes = judged(backend, SPEC, [*TEXT[:100], 3, 4], cache)
    assert {it.num_cached_tokens for it in outputs} == {96}
    assert sum(it.row_count for it in outcomes) == 2 + len(CHAIN)


@pytest.mark.parametrize("spec", [SPEC, SAMPLED])
def test_what_vllm_evicts_is_computed_again_and_counted(spec, backend):
    cache = backend.new_cache(spec)
    before = judged(backend, spec, TEXT, cache)
    backend.engine.forget_texts()
    after = judged(backend, spec, TEXT, cache)
    assert after[-1].judgement == before[-1].judgement
    assert sum(it.row_count for it in after) > 128


def test_a_crowd_of_texts_beyond_the_cache_says_what_each_says_alone(backend):
    prompts = [[n, *TEXT, *TEXT, *TEXT[:90]] for n in range(18)]
    expected = [plain(backend, SAMPLED, prompt, 6) for prompt in prompts]
    items = [item(backend, SAMPLED, prompt, Decode(6)) for prompt in prompts]
    assert sum(map(len, prompts)) > backend.engine.cache_tokens
    assert [decoded(outcomes) for outcomes in run_all(backend, items)] == expected


def test_rows_of_the_cached_part_are_never_read(backend, outputs):
    """A repeated call finds its own proposal in the cache, where vLLM leaves rows uninitialised."""
    prefix = TEXT[:60]  # the proposal goes across the end of a block
    right = plain(backend, SPEC, prefix, 12)
    cache = backend.new_cache(SPEC)
    for proposal in (tuple(right[:8]), tuple(right[:8]), (*right[:7], right[7] + 1)):
        outcomes = judged(backend, SPEC, prefix, cache, proposal)
        judgement = outcomes[-1].judgement
        assert [*proposal[: len(judgement.accepted_path)], judgement.next_token] == right[
            : len(judgement.accepted_path) + 1
        ]
        assert len(judgement.accepted_path) >= 7
    assert max(it.num_cached_tokens for it in outputs) == 64


def test_a_prompt_longer_than_a_step_is_computed_in_parts_beside_others(backend):
    long, short = [*TEXT, *TEXT, *TEXT[:100]], TEXT[:5]
    items = [item(backend, SPEC, short, Decode(9)), item(backend, SPEC, long, Draft())]
    decoding, drafting = run_all(backend, items)
    assert not drafting[0].is_whole
    assert sum(it.row_count for it in drafting) == len(long)
    assert all(it.is_whole for it in decoding[:1]), "the stream did not wait for the long prompt"


def test_work_that_is_not_asked_for_any_more_is_taken_back(backend, monkeypatch):
    taken_back = []
    abort = backend.engine.abort
    monkeypatch.setattr(
        backend.engine, "abort", lambda names: (taken_back.extend(names), abort(names))
    )
    withdrawn = item(backend, SAMPLED, TEXT, Decode(100))
    backend.run([withdrawn], NEVER)
    other = item(backend, SPEC, TEXT[:9], Decode(14))
    expected = plain(backend, SPEC, TEXT[:9], 14)
    assert taken_back
    (outcomes,) = run_all(backend, [other])
    assert decoded(outcomes) == expected

    del taken_back[:]
    ending = item(backend, SAMPLED, TEXT, Decode(100))
    backend.run([ending], NEVER)
    ending.cache.end()
    backend.run([item(backend, SPEC, TEXT[:9], Draft())], NEVER)
    assert taken_back, "its session ended"


def test_a_stream_that_ran_ahead_beside_others_goes_on_with_the_right_token(backend):
    expected = plain(backend, SAMPLED, TEXT, 12)
    stream = item(backend, SAMPLED, TEXT, Decode(12))
    found = []
    while len(found) < 12:
        (outcome,) = backend.run([stream], NEVER)
        if outcome.judgement is not None:
            found.append(outcome.judgement.next_token)
        stream.take(outcome)
        backend.run([item(backend, SPEC, TEXT[:9], Draft())], NEVER)
    assert found == expected


def test_an_interrupted_run_begins_nothing(backend):
    interrupt = Interrupt()
    interrupt.set()
    with pytest.raises(ForwardInterrupted):
        backend.run([item(backend, SPEC, TEXT, Draft())], interrupt)
