"""Items of several texts in one forward: each gets what it would get alone."""

from __future__ import annotations

import math
import random
import weakref
from array import array

import pytest
import torch

from paceline.errors import InternalError, InvalidFieldError, OverloadedError
from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms import validation
from paceline_engine.terms.backend import DeviceLostError, ForwardInterrupted
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Judge, Outcome
from paceline_engine.torch_backend.key_values import KeyValues
from paceline_engine.torch_backend.kv_arena import Slabs
from paceline_engine.torch_backend.transformers import TransformersBackend
from unit.engine.conftest import NEVER, StopAtLayer, chain, continuation, instant
from unit.engine.models import draft_together, loaded, specs

SPECS = specs()
SPEC = SPECS[0]


WAYS = ["simulated", "fused", "library", "library, together", "library, one by one"]


@pytest.fixture(scope="module", params=WAYS)
def backend(request, tiny_pair):
    if request.param == "simulated":
        return instant()
    return loaded(tiny_pair.target, request.param)


def item(backend, prompt, task, spec=SPEC) -> Item:
    return Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=task)


def drafts(backend, count: int) -> list[Item]:
    return [
        item(backend, [7 + n, *range(n)], Draft(9), SPECS[n % len(SPECS)]) for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(2))
def test_texts_that_share_forwards_by_chance_are_what_they_are_alone(backend, seed):
    chance = random.Random(seed)
    prompts = [[chance.randrange(300) for _ in range(chance.randint(1, 90))] for _ in range(7)]
    specs = [chance.choice(SPECS) for _ in prompts]
    oracle = [
        continuation(ModelText(backend, spec), prompt, 24)
        for prompt, spec in zip(prompts, specs, strict=True)
    ]
    caches = [backend.new_cache(spec) for spec in specs]
    done, cut = [0] * len(prompts), 0
    for _ in range(60):
        group = chance.sample(range(len(prompts)), chance.randint(1, len(prompts)))
        items = []
        for n in group:
            text = array("I", prompts[n] + oracle[n][: done[n]])
            right = oracle[n][done[n] : done[n] + chance.randint(0, 4)]
            block = right + [(oracle[n][-1] + 1) % 300] * chance.randint(0, 2)
            task = chance.choice([Draft(), Judge(chain(block[: 23 - done[n]]))])
            items.append(Item(caches[n], specs[n], prefix=text, task=task))
        rows = [each.row_count() for each in items]
        limit = chance.choice([None, sum(rows[:-1]) + chance.randint(1, 8)])
        answers = backend.run(items, NEVER, row_limit=limit)
        for n, each, answer in zip(group, items, answers, strict=True):
            if not answer.is_whole:
                cut += 1
                assert each is items[-1]
                longest = rows[-1] - len(each.block) - 1
                assert 0 < answer.row_count == min(limit - sum(rows[:-1]), longest)
            elif answer.judgement is None:
                assert answer.drafted.token_ids == (oracle[n][done[n]],)
                done[n] = min(done[n] + 1, 20)
            else:
                accepted = len(answer.judgement.accepted_path)
                expected = oracle[n][done[n] : done[n] + accepted + 1]
                assert [
                    *each.task.proposal.token_ids[:accepted],
                    answer.judgement.next_token,
                ] == expected
                done[n] = min(done[n] + accepted + 1, 20)
    assert cut


def test_one_forward_goes_through_the_layers_once(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    before = model.layers_run
    model.run(drafts(model, 12), NEVER)
    assert model.layers_run - before == 4


def test_a_distribution_that_is_none_is_its_items_error_alone(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    spec = SessionSpec(50, SamplingParameters(1.0), rule=VerificationRule.REJECTION)
    bad = chain([3], [SparseDistribution([3], [0.5])])
    wrong = item(model, [1, 2], Judge(bad), spec)
    answers = model.run([drafts(model, 1)[0], wrong, drafts(model, 2)[1]], NEVER)
    assert [type(each).__name__ for each in answers] == [
        "Outcome", InvalidFieldError.__name__, "Outcome",
    ]  # fmt: skip


def test_distributions_are_checked_once_however_many_parts_a_prompt_has(tiny_pair, monkeypatch):
    model = TransformersBackend(str(tiny_pair.target))
    spec = SessionSpec(50, SamplingParameters(1.0), rule=VerificationRule.REJECTION)
    good = chain([3], [SparseDistribution([3], [1.0])])
    asked = item(model, range(1, 41), Judge(good), spec)
    checked, check = [], validation.check_distributions
    monkeypatch.setattr(
        validation,
        "check_distributions",
        lambda *args, **size: [checked.append(1), check(*args, **size)],
    )
    answers = [model.run([asked], NEVER, row_limit=10)[0] for _ in range(5)]
    assert [answer.is_whole for answer in answers] == [False] * 4 + [True]
    assert len(checked) == 1


def test_a_text_without_memory_harms_no_other(tiny_pair, monkeypatch):
    model = TransformersBackend(str(tiny_pair.target))
    items, expected = drafts(model, 5), draft_together(model, drafts(model, 5))
    make_room = KeyValues.make_room

    def run_out(self, count, **beside):
        if self is items[2].cache:
            raise torch.OutOfMemoryError("out of memory")
        make_room(self, count, **beside)

    monkeypatch.setattr(KeyValues, "make_room", run_out)
    answers = model.run(items, NEVER)
    assert isinstance(answers[2], OverloadedError)
    assert items[2].cache.length == 0
    monkeypatch.undo()
    for each, answer in zip(items, answers, strict=True):
        if each is not items[2]:
            each.take(answer)
    assert draft_together(model, items) == expected


def test_a_bug_in_one_items_text_harms_no_other(tiny_pair, monkeypatch):
    model = TransformersBackend(str(tiny_pair.target))
    items = drafts(model, 3)
    monkeypatch.setattr(items[1].cache, "keep", lambda _: 1 / 0)
    answers = model.run(items, NEVER)
    assert [type(each) for each in answers] == [Outcome, ZeroDivisionError, Outcome]


def test_a_text_that_a_bug_left_half_done_is_computed_anew(tiny_pair, monkeypatch):
    model = TransformersBackend(str(tiny_pair.target))
    (broken,), (whole,) = drafts(model, 1), drafts(model, 1)
    for each in (broken, whole):
        each.take(model.run([each], NEVER)[0])
    with monkeypatch.context() as patch:
        patch.setattr(broken.cache, "adopt", lambda _: 1 / 0)
        model.run([broken], NEVER)
    assert broken.cache.length == 0
    assert draft_together(model, [broken]) == draft_together(model, [whole])


def test_a_device_that_is_lost_before_the_forward_is_no_items_error(tiny_pair, monkeypatch):
    model = TransformersBackend(str(tiny_pair.target))
    items = drafts(model, 2)

    def lose(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(items[1].cache, "keep", lose)
    with pytest.raises(DeviceLostError):
        model.run(items, NEVER)


def test_a_text_that_finds_no_memory_to_grow_keeps_what_it_has(tiny_pair, monkeypatch):
    model = TransformersBackend(str(tiny_pair.target))
    items, forwards = drafts(model, 3), []
    model.run(items, NEVER)
    held = [each.cache.token_ids for each in items]
    kept = items[1].cache.keys.clone()
    for each in items:
        each.prefix.append(5)
    place, compute = Slabs.place, model._forward

    def refuse(self, capacity, **how):
        raise torch.OutOfMemoryError("out of memory")

    def counted(feeds, interrupt):
        forwards.append(len(feeds))
        return compute(feeds, interrupt)

    items[1].prefix.extend([6] * 70)  # it has to grow, and alone
    monkeypatch.setattr(Slabs, "place", refuse)
    monkeypatch.setattr(model, "_forward", counted)
    answers = model.run(items, NEVER)
    assert [isinstance(each, OverloadedError) for each in answers] == [False, True, False]
    assert forwards == [2]
    assert items[1].cache.token_ids == held[1]
    assert torch.equal(items[1].cache.keys, kept)
    monkeypatch.setattr(Slabs, "place", place)
    (answer,) = model.run([items[1]], NEVER)
    assert answer.row_count == 71
    alone = ModelText(model, items[1].spec)
    expected = continuation(alone, items[1].prefix.tolist(), 1)
    assert [*answer.drafted.token_ids] == expected


def test_scores_that_are_no_numbers_are_their_items_error_alone(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    items = drafts(model, 3)
    model.run(items, NEVER)
    with torch.inference_mode():
        items[1].cache.keys.fill_(math.nan)
    for each in items:
        each.prefix.append(5)
    answers = model.run(items, NEVER)
    assert isinstance(answers[1], InternalError)
    assert not isinstance(answers[0], Exception)
    assert not isinstance(answers[2], Exception)


def test_what_fails_for_all_is_tried_alone_and_told_to_each(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    items = drafts(model, 3)
    hook = model._layers[1].register_forward_hook(lambda *_: 1 / 0)
    assert [type(each) for each in model.run(items, NEVER)] == [ZeroDivisionError] * 3
    hook.remove()
    expected = draft_together(model, drafts(model, 3))
    assert draft_together(model, items) == expected


def test_items_that_are_tried_alone_find_the_memory_of_the_forward_that_failed(
    tiny_pair, monkeypatch
):
    model = TransformersBackend(str(tiny_pair.target))
    items, compute, held = drafts(model, 3), model.decoder, []

    def run_out(rows):
        assert [each() for each in held] == [None] * len(held)
        hidden = torch.zeros(1)
        held.append(weakref.ref(hidden))
        if len(held) == 1 or len(held) == 3:
            raise torch.OutOfMemoryError("out of memory")
        return compute(rows)

    monkeypatch.setattr(model, "decoder", run_out)
    answers = model.run(items, NEVER)
    assert [type(each) for each in answers] == [Outcome, OverloadedError, Outcome]
    assert answers[1].__cause__.__traceback__ is not None  # its lines are there for the log


def test_a_shared_forward_that_is_given_up_has_changed_no_text(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    expected = draft_together(model, drafts(model, 4))
    items = drafts(model, 4)
    for layer in (0, 2, 3):
        held = [each.cache.token_ids for each in items]
        with pytest.raises(ForwardInterrupted):
            model.run(items, StopAtLayer(layer))
        assert [each.cache.token_ids for each in items] == held
        for each, answer in zip(items, model.run(items, NEVER), strict=True):
            each.take(answer)
    assert draft_together(model, items) == expected
