"""Drafts of trees: the chain, and beside it what a forward for each place would say."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import pytest

from paceline_contract.proposal import Proposal
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ForwardInterrupted
from paceline_engine.terms.items import Draft, Item, Judge
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.trees import random_tree
from unit.engine.conftest import NEVER, StopAtLayer, chain, continuation, instant
from unit.engine.models import loaded, specs

SPECS = specs(300)
GREEDY = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
VOCABULARY_SIZE = 300


@pytest.fixture(scope="module", params=["simulated", "fused", "library", "together", "invariant"])
def backend(request, tiny_pair):
    if request.param == "simulated":
        return instant(vocabulary_size=VOCABULARY_SIZE, acceptance_rate=0.6)
    return loaded(tiny_pair.drafter, request.param)


def drafting(backend, task, spec=GREEDY, prefix=PROMPT, cache=None) -> Item:
    return Item(cache or backend.new_cache(spec), spec, prefix=array("I", prefix), task=task)


def step(backend, item):
    (outcome,) = backend.run([item], NEVER)
    return outcome, item.take(outcome)


def drafted(backend, item) -> tuple[Proposal, list[int]]:
    """Draft to the end: the tree, and the chain."""
    found, tokens = Proposal(), []
    is_last = False
    while not is_last:
        outcome, is_last = step(backend, item)
        news = outcome.drafted
        found = Proposal((*found.token_ids, *news.token_ids), (*found.parents, *news.parents))
        tokens.extend(outcome.chain)
    return found, tokens


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "nucleus", "top-k"])
@pytest.mark.parametrize(("width", "branch_count"), [(2, 0), (3, 4), (4, 1)])
def test_a_tree_is_what_forwards_of_each_place_would_say(backend, spec, width, branch_count):
    length = 8
    tree, tokens = drafted(
        backend, drafting(backend, Draft(length, width=width, branch_count=branch_count), spec)
    )
    assert tokens == continuation(ModelText(backend, spec), PROMPT, length)
    places: dict[int, list[int]] = {}
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        places.setdefault(parent, []).append(token)
    for parent, children in places.items():
        path = tuple(tree.ancestors(parent - 1))[::-1] if parent else ()
        alone = drafting(backend, Draft(1, width=width), spec, [*PROMPT, *tree.along(path)])
        outcome, _ = step(backend, alone)
        assert children == list(outcome.drafted.token_ids)
    assert length <= len(places) <= length + (length - 1) * branch_count
    if branch_count and spec is GREEDY:
        # All but the second forward have as many runners-up to follow as they may.
        first_ones = min(width - 1, branch_count)
        assert len(places) == length + first_ones + (length - 2) * branch_count


def test_a_forward_follows_several_tips_and_the_chain_is_at_no_other_place(backend):
    item = drafting(backend, Draft(6, width=3, branch_count=4))
    rows = []
    is_last = False
    while not is_last:
        outcome, is_last = step(backend, item)
        rows.append(outcome.row_count)
    # 3 runners-up less the chain's leave 2 to follow at first.
    assert rows == [len(PROMPT), 3, 5, 5, 5, 5]
    # The prefix is what was asked about: what is drafted is beyond it.
    assert item.prefix.tolist() == PROMPT


def test_a_restart_on_a_branch_costs_no_row_for_what_is_there(backend):
    item = drafting(backend, Draft(6, width=3, branch_count=4))
    tree, tokens = drafted(backend, item)
    paths = [tuple(tree.ancestors(index))[::-1] for index in item.draft_tree.followed]
    branches = [tree.along(path) for path in paths if tree.token_ids[path[0]] != tokens[0]]
    branch = max(branches, key=len)
    text = [*PROMPT, *branch, 3]
    restart = drafting(backend, Draft(4, width=2, branch_count=1), prefix=text, cache=item.cache)
    first, _ = step(backend, restart)
    assert first.row_count == 1
    fresh, _ = step(backend, drafting(backend, Draft(4, width=2, branch_count=1), prefix=text))
    assert (first.drafted, len(item.cache.tree)) == (fresh.drafted, 0)
    assert item.cache.token_ids.tolist() == text


def test_the_chain_of_a_tree_costs_no_row_again_either(backend):
    item = drafting(backend, Draft(5, width=2, branch_count=3))
    _, tokens = drafted(backend, item)
    text = [*PROMPT, *tokens]
    outcome, _ = step(backend, drafting(backend, Draft(1), prefix=text, cache=item.cache))
    assert outcome.row_count == 1
    assert list(outcome.chain) == continuation(ModelText(backend, GREEDY), text, 1)


def test_a_tree_whose_rows_are_lost_on_the_way_is_computed_again(backend):
    expected = drafted(backend, drafting(backend, Draft(6, width=3, branch_count=2)))
    for lost_at in range(1, 6):
        item = drafting(backend, Draft(6, width=3, branch_count=2))
        for _ in range(lost_at):
            step(backend, item)
        item.cache.clear()
        tokens, is_last = [], False
        while not is_last:
            needed = item.row_count()
            outcome, is_last = step(backend, item)
            assert outcome.row_count == needed
            tokens.extend(outcome.chain)
        assert item.draft_tree.found == expected[0]
        assert tokens == expected[1][lost_at:]


def test_a_draft_that_is_given_up_on_the_way_goes_on_as_if_it_had_not_been(tiny_pair):
    model = TransformersBackend(str(tiny_pair.drafter))
    expected, _ = drafted(model, drafting(model, Draft(6, width=3, branch_count=2)))
    item, is_last = drafting(model, Draft(6, width=3, branch_count=2)), False
    while not is_last:
        for layer in range(2):
            with pytest.raises(ForwardInterrupted):
                model.run([item], StopAtLayer(layer))
        _, is_last = step(model, item)
    assert item.draft_tree.found == expected


@pytest.mark.parametrize("seed", range(2))
def test_drafts_of_trees_share_forwards_with_all_else(backend, seed):
    chance = random.Random(seed)
    kinds = [
        Draft(5, width=3, branch_count=2),
        Draft(5, width=2, branch_count=0),
        Draft(5),
        Draft(7, width=4, branch_count=5),
        Draft(3, width=2, branch_count=8),
    ]
    prompts = [[chance.randrange(300) for _ in range(chance.randint(1, 70))] for _ in kinds]
    alone = [
        drafted(backend, drafting(backend, kind, SPECS[n % 3], prompt))
        for n, (kind, prompt) in enumerate(zip(kinds, prompts, strict=True))
    ]
    items = [
        drafting(backend, kind, SPECS[n % 3], prompt)
        for n, (kind, prompt) in enumerate(zip(kinds, prompts, strict=True))
    ]
    got: list[list[int]] = [[] for _ in items]
    judged = drafting(backend, Judge(chain([1, 2])))
    while left := [n for n, item in enumerate(items) if item.found_count < item.task.max_tokens]:
        group = chance.sample(left, chance.randint(1, len(left)))
        tree = random_tree(chance, [1, 2, 3], size=6, vocabulary_size=300)
        judged = drafting(backend, Judge(tree), cache=judged.cache)
        batch = [judged, *(items[n] for n in group)]
        needed = [each.row_count() for each in batch]
        limit = chance.choice([None, sum(needed[:-1]) + chance.randint(1, 9)])
        _, *answers = backend.run(batch, NEVER, row_limit=limit)
        for n, answer in zip(group, answers, strict=True):
            if answer.is_whole:
                got[n].extend(answer.chain)
                items[n].take(answer)
    for item, own, (tree, tokens) in zip(items, got, alone, strict=True):
        assert own == tokens
        assert item.draft_tree.found == tree or item.task.width == 1


def test_a_simulated_drafters_ranks_are_as_they_are_said_to_be():
    """Of 8,000 texts; each share is within 4 of its deviations, or one time in 2,000 it is not."""
    count, rate, decay, width = 8000, 0.6, 0.4, 6
    model = instant(vocabulary_size=VOCABULARY_SIZE, acceptance_rate=rate, rank_decay=decay)
    right = instant(vocabulary_size=VOCABULARY_SIZE)
    ranks: Counter[int] = Counter()
    for n in range(count):
        outcome, _ = step(model, drafting(model, Draft(1, width=width), prefix=[n % 300, n // 300]))
        tokens = outcome.drafted.token_ids
        assert len(set(tokens)) == width
        (token,) = continuation(ModelText(right, GREEDY), [n % 300, n // 300], 1)
        ranks[tokens.index(token) if token in tokens else width] += 1
    shares = [rate, *((1 - rate) * decay * (1 - decay) ** n for n in range(width - 1))]
    for rank, share in enumerate([*shares, 1 - sum(shares)]):
        deviation = (count * share * (1 - share)) ** 0.5
        assert abs(ranks[rank] - count * share) < 4 * deviation, (rank, ranks)
