from __future__ import annotations

import asyncio
import weakref
from array import array
from collections import Counter
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from paceline_contract.calls import DraftOptions, VerificationRule
from paceline_contract.max_gram import MaxGram
from paceline_contract.sampling import SamplingParameters
from paceline_contract.suffix_index import Tie
from paceline_engine.deciding.sampling import filtered_scores
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.backend import ForwardInterrupted, ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.distributions import fit
from support.tiny_models import build_model
from unit.engine.conftest import (
    NEVER,
    StopAtLayer,
    call_on,
    continuation,
    running,
    scores_after,
)
from unit.engine.models import draft, draft_together

PROMPT = [5, 17, 9, 5, 17]
GREEDY = SamplingParameters()
SAMPLED = SamplingParameters(temperature=0.8, top_p=0.95)
VERTICAL = ((1, 0, 0), (0, 3, 4), (0, 0, 4))


def spec_for(sampling=GREEDY, seed=0, rule=VerificationRule.EXACT) -> SessionSpec:
    return SessionSpec(reserve_length=128, sampling=sampling, seed=seed, rule=rule)


def stack_of(*models, matrix=VERTICAL, leniency=1.0, max_gram=MaxGram) -> StackBackend:
    return StackBackend(models, matrix=matrix, leniency=leniency, new_max_gram=max_gram)


def draft_item(backend, cache, spec, prefix, count) -> Item:
    return Item(cache, spec, prefix=array("I", prefix), task=Draft(count))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    "matrix",
    [VERTICAL, ((9, 0, 0), (0, 0, 10), (0, 0, 0)), ((1, 0, 0), (0, 1, 10), (0, 0, 10))],
)
def test_without_leniency_a_vertical_cascade_drafts_what_its_largest_model_does(
    target, drafter, matrix, sampling
):
    stack = stack_of(target, drafter, matrix=matrix)
    for seed in range(3):
        spec = spec_for(sampling, seed)
        alone = continuation(ModelText(target, spec), PROMPT, 24)
        assert draft(stack, spec, PROMPT, 24)[0] == alone
    assert all(stack.forward_counts[:1])


def test_each_model_really_ran_and_max_gram_really_proposed(target, drafter):
    stack = stack_of(target, drafter)
    draft(stack, spec_for(), PROMPT, 40)
    assert min(stack.forward_counts) > 0
    assert stack.proposed_count > 0
    assert stack.forward_counts[0] < 40, "reviews give several tokens"
    assert [count for _, count in stack.model_forwards] == stack.forward_counts


def test_later_tokens_of_a_horizontal_cascade_are_the_smaller_models(target, drafter):
    stack = stack_of(target, drafter, matrix=((3, 4), (0, 2)), max_gram=None)
    spec = spec_for(SAMPLED, 4)
    found, _ = draft(stack, spec, PROMPT, 7)
    assert found[:3] == continuation(ModelText(target, spec), PROMPT, 3)
    assert found[3:] == continuation(ModelText(drafter, spec), PROMPT + found[:3], 4)


def test_a_text_that_is_cut_back_is_forgotten_by_all_stages(target, drafter):
    stack = stack_of(target, drafter)
    spec = spec_for(SAMPLED, 2)
    cache = stack.new_cache(spec)
    first, _ = draft(stack, spec, PROMPT, 12, cache=cache)
    again = [*PROMPT, *first[:4], (first[4] + 1) % 300]
    alone = continuation(ModelText(target, spec), again, 12)
    assert draft(stack, spec, again, 12, cache=cache)[0] == alone


def test_drafts_of_several_sessions_share_the_forwards_of_each_model(target, drafter):
    stack = stack_of(target, drafter, matrix=((1, 0), (0, 2)), max_gram=None)
    specs = [spec_for(SAMPLED, seed) for seed in range(4)]
    items = [
        draft_item(stack, stack.new_cache(spec), spec, [*PROMPT, seed], 12)
        for seed, spec in enumerate(specs)
    ]
    found = draft_together(stack, items)
    together = sum(stack.forward_counts)
    alone = stack_of(target, drafter, matrix=((1, 0), (0, 2)), max_gram=None)
    for seed, spec in enumerate(specs):
        tokens, _ = draft(alone, spec, [*PROMPT, seed], 12)
        assert [*PROMPT, seed, *tokens] == found[seed]
    assert together < sum(alone.forward_counts) / 2


@pytest.mark.parametrize("layer", range(1, 30, 4))
def test_a_step_that_was_given_up_is_done_again_as_if_nothing_had_been(target, drafter, layer):
    stack = stack_of(target, drafter)
    spec = spec_for(SAMPLED, 1)
    item = draft_item(stack, stack.new_cache(spec), spec, PROMPT, 10)
    interrupt, found, given_up = StopAtLayer(layer), [], 0
    while True:
        try:
            (outcome,) = stack.run([item], interrupt)
        except ForwardInterrupted:
            given_up += 1
            interrupt = NEVER
            continue
        found += outcome.drafted.token_ids
        if item.take(outcome):
            break
    assert given_up == 1
    assert found == continuation(ModelText(target, spec), PROMPT, 10)


def test_a_long_prompt_is_computed_in_parts(target, drafter):
    stack = stack_of(target, drafter)
    spec, prompt = spec_for(), [n % 299 for n in range(60)]
    item = draft_item(stack, stack.new_cache(spec), spec, prompt, 6)
    parts, found = 0, []
    while True:
        (outcome,) = stack.run([item], NEVER, row_limit=16)
        assert outcome.row_count <= 16
        parts += not outcome.is_whole
        found += outcome.drafted.token_ids
        if item.take(outcome):
            break
    assert parts >= 6, "the prompt, in both models"
    assert found == continuation(ModelText(target, spec), prompt, 6)


def test_a_part_of_a_prompt_has_a_row_at_least_whatever_others_need(target, drafter):
    stack = stack_of(target, drafter, matrix=((1, 0), (0, 2)), max_gram=None)
    spec = spec_for()
    reviewed, begun, long = (
        draft_item(stack, stack.new_cache(spec), spec, [n % 299 for n in range(count)], 3)
        for count in (5, 100, 60)
    )
    for item in (reviewed, long):
        for _ in range(2):  # the smaller model has drafted; the larger one is next
            stack.run([item], NEVER)
        assert item.stage == 0
    outcomes = stack.run([reviewed, begun, long], NEVER, row_limit=20)
    assert [each.row_count for each in outcomes] == [7, 100, 1]


def test_a_text_that_a_smaller_model_lacks_is_not_always_cut_and_none_is_promised_to_be(
    target, drafter
):
    stack, spec, prompt = stack_of(target, drafter), spec_for(), [*range(90)]
    cache = stack.new_cache(spec)
    scores_after(target, cache.texts[0], array("I", prompt))
    lacking = draft_item(stack, cache, spec, prompt, 4)
    other = draft_item(stack, stack.new_cache(spec), spec, PROMPT, 4)
    assert lacking.row_count() == 1, "of the model that is thought to be asked"
    outcome, _ = stack.run([lacking, other], NEVER, row_limit=10)
    assert (outcome.row_count, outcome.stage) == (90, 1)
    assert not stack.cuts_prompts


def test_under_rejection_every_token_comes_with_a_distribution_that_has_it(target, drafter):
    stack = stack_of(target, drafter, matrix=((4, 3, 4), (0, 3, 4), (0, 0, 4)), leniency=2)
    spec = spec_for(SAMPLED, 3, VerificationRule.REJECTION)
    tokens, distributions = draft(stack, spec, PROMPT, 30)
    assert len(distributions) == 30
    for token, said in zip(tokens, distributions, strict=True):
        assert token in said.token_ids
        assert sum(said.probabilities) == pytest.approx(1, abs=1e-4)


def test_under_exact_no_token_comes_with_a_distribution_not_even_max_grams(target, drafter):
    stack = stack_of(target, drafter, matrix=((2, 0, 6), (0, 2, 4), (0, 0, 4)))
    found, distributions = draft(stack, spec_for(), PROMPT, 40)
    assert len(found) == 40
    assert stack.proposed_count > 0
    assert distributions == []


@pytest.mark.parametrize("max_gram", [MaxGram, None])
@pytest.mark.usefixtures("no_collector")
def test_a_text_whose_draft_was_broken_off_is_gone_without_a_collector(target, drafter, max_gram):
    """It has keys and values in every model, and a collector may come late."""
    matrix = ((9, 4, 4), (0, 3, 4), (0, 0, 4)) if max_gram else ((9, 4), (0, 3))
    stack, spec = stack_of(target, drafter, matrix=matrix, max_gram=max_gram), spec_for()
    text = stack.new_cache(spec)
    item = draft_item(stack, text, spec, PROMPT, 9)
    stack.run([item], NEVER)
    assert text.draft.wanted is not None, "the draft goes on"
    gone = [weakref.ref(each) for each in (text, *text.texts)]
    index = weakref.ref(text._last) if max_gram else lambda: None
    del item, text
    stack.run([draft_item(stack, stack.new_cache(spec), spec, PROMPT, 1)], NEVER)
    assert [each() for each in (*gone, index)] == [None] * 4


def test_models_with_different_tokenizers_make_no_stack(target, drafter):
    other = TransformersBackend.__new__(TransformersBackend)
    other.description = replace(drafter.description, tokenizer_fingerprint="x", name="other")
    other.tokenizer = b'{"model": {"vocab": {"a": 0}}}'
    told = r"--then other: has another tokenizer than target \(token 0 is 'a' and '<\|end\|>'; "
    with pytest.raises(ModelLoadError, match=told):
        stack_of(target, other)


def test_another_stack_has_another_fingerprint(target, drafter):
    prints = {
        stack.description.fingerprint
        for stack in (
            stack_of(target, drafter),
            stack_of(target, drafter, leniency=2),
            stack_of(target, drafter, matrix=((2, 0, 0), (0, 3, 4), (0, 0, 4))),
            stack_of(target, drafter, matrix=((1, 0), (0, 3)), max_gram=None),
        )
    }
    assert len(prints | {target.description.fingerprint}) == 5


def test_a_chosen_matrix_changes_no_token(target, drafter):
    stack = StackBackend([target, drafter], matrix=None, new_max_gram=MaxGram)
    stack.measure(NEVER)
    spec = spec_for(SAMPLED, 6)
    for start in range(4):
        prompt = [*PROMPT, start]
        alone = continuation(ModelText(target, spec), prompt, 40)
        assert draft(stack, spec, prompt, 40)[0] == alone


def test_it_tells_how_often_its_stages_agree_and_what_their_forwards_take(target, drafter):
    clock = iter(range(0, 10**9, 1000))
    stack = StackBackend(
        [target, drafter],
        matrix=((1, 0, 0), (0, 3, 0), (0, 0, 4)),
        new_max_gram=MaxGram,
        clock_ns=lambda: next(clock),
    )
    draft(stack, spec_for(), PROMPT, 40)
    largest, smaller, text = stack.stage_measures
    assert [each.model_name for each in (largest, smaller, text)] == [
        "target",
        "drafter",
        "max-gram",
    ]
    assert {each.median_ns for each in (*largest.forwards, *smaller.forwards)} == {1000}
    (by_model, by_text), ((judged, accepted),) = largest.verdicts, smaller.verdicts
    assert 0 < by_model[1] < by_model[0]
    assert by_text == (0, 0), "no row has Max-Gram draft for the largest"
    assert 0 < judged <= stack.proposed_count
    assert 0 <= accepted <= judged
    assert (text.forwards, text.verdicts) == ((), ())


def test_a_long_prompt_is_indexed_in_parts(target, drafter):
    made: list[MaxGram] = []

    def new_max_gram() -> MaxGram:
        made.append(MaxGram(tie=Tie.LATEST))
        return made[-1]

    stack = stack_of(target, drafter, max_gram=new_max_gram)
    cache = stack.new_cache(SessionSpec(4096))
    prefix = array("I", [n % 7 for n in range(2500)])
    item = Item(cache, spec_for(), prefix=prefix, task=Draft(4))
    cache.begin(item, forced=target.forced)
    assert len(made[0]) == 1024
    cache.next_item(item, leniency=1)
    cache.next_item(item, leniency=1)
    assert len(made[0]) == 2500


def test_nothing_is_indexed_where_no_row_asks_max_gram(target, drafter):
    stack = stack_of(target, drafter, matrix=((1, 0, 0), (0, 3, 0), (0, 0, 0)))
    cache = stack.new_cache(SessionSpec(4096))
    cache.begin(
        Item(cache, spec_for(), prefix=array("I", PROMPT), task=Draft(4)), forced=target.forced
    )
    assert len(cache._last._max_gram) == 0


async def test_a_host_drafts_with_a_stack_as_with_any_model(target, drafter):
    stack = stack_of(target, drafter)
    spec = spec_for(SAMPLED, 8)
    alone = continuation(ModelText(target, spec), PROMPT, 20)
    async with running(stack) as host:
        session = host.open_session(spec).session_id
        call = call_on(session, 1, base=[], append=PROMPT)
        chunks = [
            chunk async for chunk in host.draft(call, DraftOptions(max_tokens=20, chunk_tokens=3))
        ]
        assert [token for chunk in chunks for token in chunk.proposal.token_ids] == alone
        for stage, count in enumerate(stack.forward_counts):
            ran = [chunk.timing.stages[stage] for chunk in chunks]
            assert sum(each.forward_count for each in ran) == count
            assert sum(each.forward_ns for each in ran) > 0
        assert stack.description.stage_names == ("target", "drafter")
        # After a rejection: the session keeps the prompt and three tokens.
        held = PROMPT + alone[:3]
        after = call_on(session, 2, base=held, append=[7])
        expected = continuation(ModelText(target, spec), [*held, 7], 5)
        chunks = [chunk async for chunk in host.draft(after, DraftOptions(max_tokens=5))]
        assert [chunk.proposal.token_ids[0] for chunk in chunks] == expected
        now = host.statistics()
        assert now.draft_tokens == 25
        assert now.prefill_parts == 0
        assert dict(now.model_forwards) == dict(stack.model_forwards)
        assert now.forwards == sum(stack.forward_counts)


def test_the_model_of_the_first_forward_is_known_before_a_draft_begins(target, drafter):
    stack = stack_of(target, drafter)
    text_alone = stack_of(target, drafter, matrix=((0, 0, 6), (0, 2, 4), (0, 0, 4)))
    for backend, count, stage in [(stack, 12, 1), (stack, 1, 0), (text_alone, 12, 1)]:
        item = draft_item(backend, backend.new_cache(spec_for()), spec_for(), [5, 17, 9], count)
        assert item.stage == stage
        (outcome,) = backend.run([item], NEVER)
        assert outcome.stage == stage


async def test_what_the_smaller_model_takes_is_never_counted_as_the_largest_ones(target, drafter):
    stack = stack_of(target, drafter)
    async with running(stack) as host:
        session = host.open_session(spec_for()).session_id
        call = call_on(session, 1, base=[], append=PROMPT)
        async for _ in host.draft(call, DraftOptions(max_tokens=2)):
            pass
        counted = {forward.rows for forward in host.latencies().forwards}
    # The smaller model's forward on the prompt has 5 rows, and counts among those of about 4.
    assert counted
    assert 4 not in counted


async def test_a_cancelled_draft_ends_its_inner_work_at_once(target, drafter):
    stack = stack_of(target, drafter)
    async with running(stack) as host:
        session = host.open_session(spec_for()).session_id
        call = call_on(session, 1, base=[], append=PROMPT)
        async with aclosing(host.draft(call, DraftOptions(max_tokens=100))) as drafting:
            await anext(drafting)
        ran = sum(stack.forward_counts)
        other = host.open_session(spec_for()).session_id
        async for _ in host.draft(
            call_on(other, 1, base=[], append=PROMPT), DraftOptions(max_tokens=1)
        ):
            pass
        assert sum(stack.forward_counts) <= ran + 2, "one that ran, and the other session's"
        assert host.statistics().queue_length == 0


async def test_what_max_gram_alone_finds_needs_no_forward(target, drafter):
    stack = stack_of(target, drafter, matrix=((0, 0, 6), (0, 2, 4), (0, 0, 4)))
    async with running(stack) as host:
        session = host.open_session(spec_for()).session_id
        call = call_on(session, 1, base=[], append=PROMPT)
        async with aclosing(
            host.draft(call, DraftOptions(max_tokens=3, chunk_tokens=3))
        ) as drafting:
            (chunk,) = [chunk async for chunk in drafting]
        assert list(chunk.proposal.token_ids) == [9, 5, 17]
        assert chunk.timing.forward_count == 0
        assert stack.forward_counts == [0, 0]
        assert host.statistics().forwards == 0


async def test_streams_on_a_stack_share_forwards_at_the_host(target, drafter):
    stack = stack_of(target, drafter, matrix=((1, 0), (0, 2)), max_gram=None)
    specs = [spec_for(SAMPLED, seed) for seed in range(4)]
    alone = [continuation(ModelText(target, spec), PROMPT, 12) for spec in specs]
    async with running(stack) as host:

        async def stream(spec):
            session = host.open_session(spec).session_id
            call = call_on(session, 1, base=[], append=PROMPT)
            return [
                token
                async for chunk in host.draft(call, DraftOptions(max_tokens=12))
                for token in chunk.proposal.token_ids
            ]

        assert await asyncio.gather(*map(stream, specs)) == alone
        now = host.statistics()
        assert now.items > 1.5 * now.forwards
    assert torch.get_num_threads() == 1


@pytest.fixture(scope="session")
def small_models(sixteen_token_model, tmp_path_factory):
    """A target, and two other models of its vocabulary of 16."""
    tokenizer = Tokenizer.from_file(str(sixteen_token_model / "tokenizer.json"))
    directories = [sixteen_token_model]
    for seed in (7, 8):
        directory = tmp_path_factory.mktemp(f"sixteen-{seed}")
        directories.append(
            build_model(
                directory, tokenizer, layer_count=1, seed=seed, head_padding=0, sharpness=1.0
            )
        )
    return [TransformersBackend(str(directory)) for directory in directories]


@pytest.mark.parametrize("leniency", [pytest.param(1, marks=pytest.mark.long), 2.5])
def test_with_a_stack_as_drafter_the_output_is_distributed_as_the_targets(small_models, leniency):
    """Two tokens of 350 texts, false alarm below 1e-6; the prompt repeats, for Max-Gram."""
    judge, base, small = small_models
    sampling = SamplingParameters(temperature=1.3)
    matrix = ((1, 1, 2), (0, 1, 2), (0, 0, 2))
    prompt, counts = [1, 2, 3, 4, 1, 2, 3], Counter()
    stack = stack_of(base, small, matrix=matrix, leniency=leniency)
    for seed in range(350):
        spec = spec_for(sampling, seed, VerificationRule.REJECTION)
        text, target = list(prompt), ModelText(judge, spec)
        while len(text) < len(prompt) + 2:
            tokens, said = draft(stack, spec, text, 3)
            judgement = target.judge(text, tokens, distributions=said)
            text += [*tokens[: len(judgement.accepted_path)], judgement.next_token]
        counts[tuple(text[len(prompt) : len(prompt) + 2])] += 1
    assert min(stack.forward_counts) > 0
    assert stack.proposed_count > 0
    assert fit(counts, pair_probabilities(judge, prompt, sampling)).p_value > 1e-6


def pair_probabilities(judge, prompt, sampling):
    spec = spec_for(sampling)

    def following(text):
        scores = scores_after(judge, judge.new_cache(spec), array("I", text))
        return filtered_scores(scores, sampling)[0].softmax(-1).tolist()

    return {
        (first, second): one * two
        for first, one in enumerate(following(prompt))
        for second, two in enumerate(following([*prompt, first]))
    }


@pytest.mark.parametrize("matrix", [VERTICAL, ((3, 4, 0), (0, 2, 0), (0, 0, 0)), ((0, 4, 2),) * 3])
@pytest.mark.parametrize("reach", [len(PROMPT) + it for it in (-1, 0, 11, 12, 13, 30)])
def test_a_smaller_model_rests_where_its_context_ends_and_the_others_draft_on(
    target, drafter, matrix, reach, monkeypatch
):
    short = replace(drafter.description, context_length=reach)
    monkeypatch.setattr(drafter, "description", short)
    seen = []
    run = drafter.run

    def watched(items, *arguments, **options):
        seen.extend(len(it.prefix) + len(it.task.proposal) for it in items)
        return run(items, *arguments, **options)

    monkeypatch.setattr(drafter, "run", watched)
    stack = stack_of(target, drafter, matrix=matrix)
    assert stack.description.context_length == target.description.context_length
    spec = spec_for()
    text = [*PROMPT]
    for _ in range(3):
        found, _ = draft(stack, spec, text, 12)
        assert len(found) == 12
        text += continuation(ModelText(target, spec), text, 12)
    assert max(seen, default=0) <= reach
    assert bool(seen) is (reach >= len(PROMPT) + 12)
