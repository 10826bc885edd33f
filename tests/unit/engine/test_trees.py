"""Trees: a verdict on one is the verdicts on its chains, and what is left of it is its path."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from paceline.errors import InternalError
from paceline_contract.proposal import Proposal
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ForwardInterrupted
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.trees import chains_of, random_tree
from unit.engine.conftest import NEVER, StopAtLayer, chain, continuation, instant
from unit.engine.models import loaded, specs

SPECS = specs()
SPEC = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
VOCABULARY_SIZE = 300


@pytest.fixture(
    scope="module", params=["simulated", "fused", "captured", "library", "together", "invariant"]
)
def backend(request, tiny_pair):
    if request.param == "simulated":
        return instant(vocabulary_size=VOCABULARY_SIZE)
    return loaded(tiny_pair.target, request.param)


def judged(tree: Proposal, *, right) -> tuple[tuple[int, ...], int]:
    """The verdict by definition, if this is what follows the prefix."""
    return tree.follow(lambda _, depth: right[depth])


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "nucleus", "top-k"])
def test_a_trees_verdict_is_the_verdicts_on_its_chains(backend, spec):
    chance = random.Random(spec.seed)
    right = continuation(ModelText(backend, spec), PROMPT, 20)
    lengths = set()
    for _ in range(8):
        tree = random_tree(
            chance, right[: chance.randint(0, 9)], size=20, vocabulary_size=VOCABULARY_SIZE
        )
        found = ModelText(backend, spec).judge(
            PROMPT, tree.token_ids, parents=tree.parents, logprobs=True, top_logprobs=3
        )
        on_chains = [
            (
                own,
                ModelText(backend, spec).judge(
                    PROMPT, tree.along(own), logprobs=True, top_logprobs=3
                ),
            )
            for own in chains_of(tree)
        ]
        own, longest = max(on_chains, key=lambda each: len(each[1].accepted_path))
        count = len(longest.accepted_path)
        assert (found.accepted_path, found.next_token) == (own[:count], longest.next_token)
        assert found.logprobs == pytest.approx(longest.logprobs, abs=1e-4)
        for tokens, others in zip(found.top_logprobs, longest.top_logprobs, strict=True):
            assert dict(tokens) == pytest.approx(dict(others), abs=1e-4)
        # And no other chain disagrees, as far as the text goes with it.
        for other, verdict in on_chains:
            common = len(verdict.accepted_path)
            assert found.accepted_path[:common] == other[:common]
            assert verdict.next_token == right[common]
        lengths.add(count)
    assert len(lengths) > 3


@pytest.mark.parametrize("seed", range(3))
def test_trees_beside_others_rows_and_parts_of_prompts_are_what_they_are_alone(backend, seed):
    chance = random.Random(seed)
    prompts = [
        [chance.randrange(VOCABULARY_SIZE) for _ in range(chance.randint(20, 60))] for _ in range(5)
    ]
    specs = [chance.choice(SPECS) for _ in prompts]
    oracle = [
        continuation(ModelText(backend, spec), prompt, 30)
        for prompt, spec in zip(prompts, specs, strict=True)
    ]
    caches = [backend.new_cache(spec) for spec in specs]
    done, met = [0] * len(prompts), set()
    for _ in range(40):
        group = chance.sample(range(len(prompts)), chance.randint(1, len(prompts)))
        items = []
        for n in group:
            if chance.random() < 0.1:
                caches[n].clear()
            right = oracle[n][done[n] : 25]
            tree = random_tree(chance, right[:6], size=9, vocabulary_size=VOCABULARY_SIZE)
            task = chance.choice([Judge(tree), Judge(tree), Judge(chain(right[:3])), Draft()])
            text = array("I", prompts[n] + oracle[n][: done[n]])
            items.append(Item(caches[n], specs[n], prefix=text, task=task))
        rows = [each.row_count() for each in items]
        limit = chance.choice([None, sum(rows[:-1]) + chance.randint(1, 12)])
        answers = backend.run(items, NEVER, row_limit=limit)
        for n, each, answer in zip(group, items, answers, strict=True):
            right = oracle[n][done[n] :]
            if not answer.is_whole:
                met.add("part")
                continue
            if answer.judgement is None:
                assert answer.drafted.token_ids == (right[0],)
                accepted = 0
            else:
                found = answer.judgement
                expected = judged(each.task.proposal, right=right)
                assert (found.accepted_path, found.next_token) == expected
                accepted = len(found.accepted_path)
                met.add("branch" if tuple(range(accepted)) != found.accepted_path else "chain")
            done[n] = (done[n] + accepted + 1) % 20
    assert met == {"part", "branch", "chain"}


def test_of_a_tree_its_path_is_kept_and_costs_no_row_again(backend):
    right = continuation(ModelText(backend, SPEC), PROMPT, 8)
    wrong = [(each + 1) % VOCABULARY_SIZE for each in right]
    #       wrong, right 1 beside it, on each a right and a wrong 2, then right 3
    tree = Proposal(
        (wrong[0], right[0], right[1], wrong[1], right[1], right[2]), (0, 0, 1, 2, 2, 5)
    )
    text = ModelText(backend, SPEC)
    found = text.judge(PROMPT, tree.token_ids, parents=tree.parents)
    assert (found.accepted_path, found.next_token, text.row_count) == ((1, 4, 5), right[3], 5 + 6)
    assert text.judge(PROMPT + right[:4]).next_token == right[4]
    assert text.row_count == 1
    assert text.cache.token_ids.tolist() == PROMPT + right[:4]
    assert len(text.cache.tree) == 0


def test_a_branch_that_another_call_goes_on_with_is_there_too(backend):
    """Whatever became of the verdict: what a prefix has in common with a tree is not computed."""
    right = continuation(ModelText(backend, SPEC), PROMPT, 3)
    wrong = [(each + 1) % VOCABULARY_SIZE for each in right]
    tree = Proposal((right[0], wrong[0], wrong[1], right[1]), (0, 0, 2, 1))
    fresh = ModelText(backend, SPEC)
    for branch, rows in (([wrong[0], wrong[1], 3], 1), ([wrong[0], 4], 1), ([7, 4], 2)):
        text = ModelText(backend, SPEC)
        text.judge(PROMPT, tree.token_ids, parents=tree.parents)
        found = text.judge(PROMPT + branch)
        assert (found, text.row_count) == (fresh.judge(PROMPT + branch), rows)


def test_a_tree_that_was_given_up_or_failed_has_changed_nothing(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    right = continuation(ModelText(model, SPEC), PROMPT, 8)
    tree = Proposal((right[0], 3, right[1], 4), (0, 0, 1, 1))
    item = Item(model.new_cache(SPEC), SPEC, prefix=array("I", PROMPT), task=Judge(tree))
    for layer in range(4):
        with pytest.raises(ForwardInterrupted):
            model.run([item], StopAtLayer(layer))
        assert (item.cache.length, len(item.cache.tree)) == (0, 0)
    # A tree that is there, and the next one given up: its path is the text, and no more.
    model.run([item], NEVER)
    later = Item(
        item.cache,
        SPEC,
        prefix=array("I", PROMPT + right[:2]),
        task=Judge(Proposal((1, 2), (0, 0))),
    )
    with pytest.raises(ForwardInterrupted):
        model.run([later], StopAtLayer(2))
    (outcome,) = model.run([later], NEVER)
    assert outcome.judgement.next_token == right[2]
    assert outcome.row_count == 1 + 2


def test_scores_that_are_no_numbers_are_an_error_also_in_a_tree(tiny_pair):
    model = TransformersBackend(str(tiny_pair.target))
    text = ModelText(model, SPEC)
    text.judge(PROMPT)
    with torch.inference_mode():
        text.cache.keys.fill_(torch.nan)
    with pytest.raises(InternalError):
        text.judge([*PROMPT, 3], (4, 5), parents=(0, 0))
