"""Streams go along in the forward that decides: the same guesses, and no second way for them."""

from __future__ import annotations

import random
from array import array
from contextlib import contextmanager

import pytest
import torch

from paceline_contract.proposal import Proposal
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_adapters import write_adapter
from support.trees import random_tree
from unit.engine.conftest import NEVER

SPEC = SessionSpec(200)
PROMPT = [5, 6, 7, 8, 9]
# Of the three streams that the adapter has, two are asked for anything.
PATHS = ((0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0))
DEPTH = 2
VOCABULARY_SIZE = 300
TREE = Proposal((3, 4, 5, 6), parents=(0, 1, 1, 0))


@pytest.fixture(scope="module", params=["one by one", "together", "shared weights"])
def backend(request, tiny_pair, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapters") / "streams"
    rank = 0 if request.param == "shared weights" else 4
    write_adapter(directory, tiny_pair.target, kind="streams", tree=PATHS, rank=rank)
    model = TransformersBackend(str(tiny_pair.target), adapter=str(directory))
    assert isinstance(model.decoder, FusedLlama)
    model.together = request.param == "together"
    return model


@contextmanager
def waiting(backend):
    """Streams wait for the verdict, and go through the library's layers by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.own_guesses.drafter, "stream_weights", None)
        yield


@contextmanager
def counting(backend, monkeypatch):
    """Lists how many rows each layer has had, and how often streams went by themselves."""
    counts, alone = [], []
    guess = backend.own_guesses.drafter._adapter.guess
    with monkeypatch.context() as patch:
        patch.setattr(
            backend.own_guesses.drafter._adapter,
            "guess",
            lambda *given, **named: alone.append(1) or guess(*given, **named),
        )
        hooks = [
            layer.register_forward_pre_hook(lambda _, given: counts.append(len(given[0])))
            for layer in backend.decoder.layers
        ]
        yield counts, alone
        for hook in hooks:
            hook.remove()


def item(backend, prompt, task, spec=SPEC):
    return Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=task)


def judge(backend, tree, spec=SPEC, prompt=PROMPT):
    text = ModelText(backend, spec)
    return text.judge(prompt, tree.token_ids, parents=tree.parents, propose=True)


@pytest.mark.parametrize(
    "tree", [Proposal(), TREE, Proposal((3, 4, 5))], ids=["-", "tree", "chain"]
)
def test_upper_layers_have_streams_beside_each_row_that_may_decide(backend, tree, monkeypatch):
    with counting(backend, monkeypatch) as (counts, alone):
        judge(backend, tree)
    rows, scored = len(PROMPT) + len(tree), 1 + len(tree)
    assert counts == [rows, rows, *[rows + DEPTH * scored] * 2]
    assert not alone


def items_for(backend):
    chance = random.Random(5)
    made = []
    for n in range(7):
        size = n if n % 3 else 0
        tree = random_tree(chance, (), size=size, vocabulary_size=VOCABULARY_SIZE)
        task = Judge(tree, propose=n != 2)
        made.append(item(backend, [7 + n, *range(3 * n)], task))
    return made


def test_guesses_are_those_of_streams_that_wait(backend, monkeypatch):
    with counting(backend, monkeypatch) as (_, alone):
        along = backend.run(items_for(backend), NEVER)
    assert not alone
    with waiting(backend), counting(backend, monkeypatch) as (_, alone):
        after = backend.run(items_for(backend), NEVER)
    assert alone
    assert [each.judgement for each in along] == [each.judgement for each in after]
    assert [len(each.judgement.proposal) for each in along] == [7, 7, 0, 7, 7, 7, 7]


def test_guesses_after_an_accepted_path_are_those_of_streams_that_wait(backend):
    with waiting(backend):
        text = ModelText(backend, SPEC)
        right = [text.judge(PROMPT).next_token]
        while len(right) < 3:
            right.append(text.judge([*PROMPT, *right]).next_token)
        wrong = (right[0] + 1) % VOCABULARY_SIZE
        tree = Proposal((wrong, right[0], wrong, right[1]), parents=(0, 0, 2, 2))
        expected = judge(backend, tree)
    assert judge(backend, tree) == expected
    assert expected.accepted_path == (1, 3)
    assert expected.proposal != judge(backend, Proposal()).proposal


def test_what_decides_is_what_decides_without_them_but_for_rounding(backend):
    logits = []
    for proposes in (False, True):
        items = [item(backend, PROMPT, Judge(TREE, propose=proposes))]
        items.append(item(backend, [9, 8], Judge(Proposal((4, 5)), propose=proposes)))
        feeds = [backend._feed(each, None) for each in items]
        for feed in feeds:
            backend._make_room(feed)
        logits.append(torch.cat(backend._forward(feeds, NEVER)).clone())
        backend.own_guesses.end_forward()
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_the_text_is_as_without_them(backend):
    judged = judge(backend, TREE)
    text = ModelText(backend, SPEC)
    text.judge(PROMPT, TREE.token_ids, parents=TREE.parents, propose=True)
    prefix = [*PROMPT, *TREE.along(judged.accepted_path), judged.next_token]
    assert text.judge(prefix, [1, 2], propose=True) == judge(
        backend, Proposal((1, 2)), prompt=prefix
    )
    assert text.row_count == 3


@pytest.mark.parametrize(("most", "goes_along"), [(4, True), (3, False)])
def test_beside_too_many_guesses_they_wait(most, goes_along, backend, monkeypatch):
    expected = judge(backend, TREE)
    monkeypatch.setattr(backend.own_guesses.drafter, "most_beside", most)
    with counting(backend, monkeypatch) as (counts, alone):
        assert judge(backend, TREE) == expected
    assert bool(alone) != goes_along
    assert (counts[0] < counts[-1]) == goes_along


def test_the_guesses_of_a_forward_count_together(backend, monkeypatch):
    monkeypatch.setattr(backend.own_guesses.drafter, "most_beside", 7)
    items = [item(backend, [n, 8], Judge(TREE, propose=True)) for n in range(2)]
    with counting(backend, monkeypatch) as (_, alone):
        backend.run(items, NEVER)
    assert alone


def test_they_take_no_memory_that_is_not_reserved(backend, monkeypatch):
    expected = judge(backend, TREE)
    needed = len(PROMPT) + len(TREE)
    beside = DEPTH * (1 + len(TREE))
    for reserved, goes_along in ((needed + beside - 1, False), (needed + beside, True)):
        spec = SessionSpec(reserved)
        text = ModelText(backend, spec)
        with counting(backend, monkeypatch) as (_, alone):
            judged = text.judge(PROMPT, TREE.token_ids, parents=TREE.parents, propose=True)
        assert judged == expected
        assert bool(alone) != goes_along
        assert text.cache.capacity <= reserved


def test_who_does_not_ask_has_none(backend, monkeypatch):
    with counting(backend, monkeypatch) as (counts, alone):
        ModelText(backend, SPEC).judge(PROMPT, TREE.token_ids, parents=TREE.parents)
    assert set(counts) == {len(PROMPT) + len(TREE)}
    assert not alone


def test_an_invariant_model_has_none_in_its_forwards(tiny_pair, tmp_path, monkeypatch):
    directory = write_adapter(tmp_path / "a", tiny_pair.target, kind="streams", tree=PATHS)
    model = TransformersBackend(str(tiny_pair.target), adapter=str(directory), invariant=True)
    with counting(model, monkeypatch) as (counts, alone):
        assert len(judge(model, Proposal()).proposal) == len(PATHS)
    assert len(set(counts)) == 1
    assert alone
