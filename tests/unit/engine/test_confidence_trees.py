"""Trees of the guesses that an EAGLE head, or a checkpoint's module, is surest of."""

from __future__ import annotations

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline_contract.proposal import Proposal
from paceline_engine.deciding.decisions import rank_from
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.items import Item, Judge
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_engine.torch_backend.growing_guesses import ConfidenceTree
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.eagle_reference import SlowHead, slow_tree
from support.mtp_checkpoints import LAYOUTS, build_with_module, module_reference
from support.tiny_adapters import write_adapter
from unit.engine.conftest import NEVER, continuation
from unit.engine.models import (
    check_any_past,
    check_as_alone,
    decode_by_proposals,
    drafting,
    mixed_judgements,
    reference,
    specs,
)

SPECS = specs()
SPEC = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
VOCABULARY_SIZE = 300
SIZE, BEAM = 18, 5
RATES = [[0.6, 0.2]] * 4
SHAPE = {"token_ids": [*range(2, 302, 3), 310, 319]}


class Expected:
    """Compares proposals with slow trees, by their paths."""

    def __init__(self, logits_after, depth):
        self._logits_after, self._depth = logits_after, depth
        self._known = {}

    def check(self, proposal, text, next_token, spec=SPEC):
        key = (*text, next_token, spec.seed)
        if key not in self._known:
            after = self._logits_after(text, next_token)

            def rank(path):
                own = after(path)[None, :VOCABULARY_SIZE].detach().float()
                position = len(text) + 1 + len(path)
                return rank_from(own, spec=spec, positions=[position], count=BEAM)[0]

            self._known[key] = slow_tree(rank, size=SIZE, beam=BEAM, depth=self._depth)
        assert len(proposal) == len(self._known[key])
        assert {proposal.along(path) for path in paths_of(proposal)} == self._known[key]


def paths_of(proposal):
    """Return each guess's path, as indices."""
    paths = [()]
    for index, parent in enumerate(proposal.parents):
        assert parent <= index, "a guess stands behind its parent"
        paths.append((*paths[parent], index))
    return paths[1:]


@pytest.fixture(scope="module")
def adapter(tiny_pair, tmp_path_factory):
    return write_adapter(
        tmp_path_factory.mktemp("adapters") / "eagle",
        tiny_pair.target,
        kind="eagle",
        tree=((0,), (0, 0)),
        reach=4,
        shape=SHAPE,
        training={"hit_rates": RATES},
    )


@pytest.fixture(scope="module", params=["fused", "library", "together", "invariant"])
def backend(request, tiny_pair, adapter):
    return drafting(tiny_pair.target, request.param, adapter, guesses=SIZE)


@pytest.fixture(scope="module")
def expected(tiny_pair, adapter):
    model, head = reference(tiny_pair.target, adapter, dtype=torch.float64)

    @torch.no_grad()
    def logits_after(text, next_token):
        trunk = compute_trunk(model, torch.tensor([text]), feature_layers=head.feature_layers)
        slow = SlowHead(head.state_dict(), head.shape, model)

        def after(path):
            found = slow.chain(
                trunk.features[0],
                [*text, next_token],
                steps=len(path) + 1,
                choose=lambda step, _: path[step] if step < len(path) else None,
            )
            return found[-1]

        return after

    return Expected(logits_after, depth=4)


def proposals(backend, spec, expected, *, count):
    """Decode by proposals, and compare each with the slow tree."""
    made, judgements = decode_by_proposals(ModelText(backend, spec), PROMPT, count=count)
    done = list(PROMPT)
    earlier = Proposal()
    for judged in judgements:
        done += earlier.along(judged.accepted_path)
        expected.check(judged.proposal, done, judged.next_token, spec)
        done.append(judged.next_token)
        earlier = judged.proposal
    assert done == [*PROMPT, *made]
    return made


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "nucleus", "top-k"])
def test_what_is_proposed_is_the_slow_tree_and_the_text_is_plain_decodings(
    backend, expected, tiny_pair, spec
):
    made = proposals(backend, spec, expected, count=9)
    plain = TransformersBackend(str(tiny_pair.target))
    assert made == continuation(ModelText(plain, spec), PROMPT, len(made))


def test_whatever_happened_before_leaves_no_trace(backend, expected):
    class Compared:
        def __init__(self, text, token):
            self._text, self._token = text, token

        def __eq__(self, proposal):
            expected.check(proposal, self._text, self._token)
            return True

        __hash__ = None

    check_any_past(backend, SPEC, Compared)


def test_each_text_of_a_forward_gets_what_it_would_get_alone(backend):
    check_as_alone(backend, lambda: mixed_judgements(backend, PROMPT, count=7))


# One of each layout; the other families in `make test-long`.
FEW = ("qwen3.5", "glm4-moe")


@pytest.mark.parametrize(
    "family", [pytest.param(it, marks=[pytest.mark.long] * (it not in FEW)) for it in LAYOUTS]
)
def test_a_checkpoints_module_proposes_trees_too(family, tmp_path):
    checkpoint = build_with_module(family, tmp_path / family)
    guess = module_reference(family, checkpoint)

    def logits_after(text, next_token):
        def after(path):
            found = []

            def choose(step, logits):
                found.append(logits)
                return path[step] if step < len(path) else 0

            guess([*text, next_token], steps=len(path) + 1, choose=choose)
            return found[-1]

        return after

    backend = TransformersBackend(str(checkpoint), adapter="mtp", guesses=SIZE)
    assert backend.description.self_draft_depth == 7
    made = proposals(backend, SPEC, Expected(logits_after, depth=7), count=4)
    plain = TransformersBackend(str(checkpoint))
    assert made == continuation(ModelText(plain, SPEC), PROMPT, len(made))


def test_unlikely_guesses_are_dropped_with_what_follows_them(tiny_pair, adapter):
    whole, pruned = (
        TransformersBackend(
            str(tiny_pair.target), adapter=str(adapter), guesses=40, prune_below=least
        )
        for least in (0, 0.02)
    )
    sizes = set()
    for n in range(12):
        found = [
            ModelText(it, SPEC).judge([5 + n, 6], propose=True).proposal for it in (whole, pruned)
        ]
        every, likely = ({each.along(path) for path in paths_of(each)} for each in found)
        assert likely <= every
        sizes.add(len(likely))
    assert len(sizes) > 1
    assert max(sizes) < 40


def test_fewer_guesses_than_sixteen_and_a_target_that_judges_chains_get_a_chain(tiny_pair, adapter):
    for guesses, way, is_tree in ((15, "fused", False), (16, "fused", True)):
        model = drafting(tiny_pair.target, way, adapter, guesses=guesses)
        proposal = ModelText(model, SPEC).judge(PROMPT, propose=True).proposal
        followed = {parent for parent in proposal.parents if parent}
        on_one_path = len(followed) == max(proposal.depths())
        assert is_tree != on_one_path
    with pytest.MonkeyPatch.context() as patch:
        module = "paceline_engine.torch_backend.computed_model.rotations_change"
        patch.setattr(module, lambda _: True)
        model = TransformersBackend(str(tiny_pair.target), adapter=str(adapter), guesses=30)
    proposal = ModelText(model, SPEC).judge(PROMPT, propose=True).proposal
    assert proposal.parents == tuple(range(len(proposal)))


def test_many_trees_share_a_heads_steps(tiny_pair, adapter):
    """As many steps as the tree is deep, however many sequences there are."""
    backend = TransformersBackend(str(tiny_pair.target), adapter=str(adapter), guesses=SIZE)
    head = backend.own_guesses.drafter._head
    rows = []
    score = head.score
    head.score = lambda model, output: rows.append(len(output)) or score(model, output)
    items = [
        Item(
            backend.new_cache(SPEC),
            SPEC,
            prefix=array("I", range(5 + n, 11 + n)),
            task=Judge(Proposal(), propose=True),
        )
        for n in range(3)
    ]
    outcomes = backend.run(items, NEVER)
    assert all(len(each.judgement.proposal) == SIZE for each in outcomes)
    assert rows[0] == 3
    assert len(rows) == 4
    assert all(3 < count <= 3 * BEAM for count in rows[1:])


probabilities = st.lists(st.floats(0, 1.001), min_size=1, max_size=6)


@given(
    st.integers(1, 40),
    st.integers(1, 6),
    st.data(),
)
def test_a_tree_is_a_tree_of_the_most_worth_whatever_probabilities_are(size, depth, data):
    """Also with equal ones, those that are zero, and those that rounding has made too large."""
    drawn = {}

    def rank(path):
        if path not in drawn:
            found = sorted(data.draw(probabilities), reverse=True)
            drawn[path] = [(len(path) * 10 + n, it) for n, it in enumerate(found)]
        return drawn[path]

    class Row:
        next_token = 7

    tree = ConfidenceTree(Row(), size, depth, 0.0)
    paths = [()]
    while tree.due:
        ranked = [rank(path)[: tree.width] for path in paths]
        found_by = tree.grow(ranked)
        paths = [(*paths[at], row.token) for at, row in zip(found_by, tree.due, strict=True)]
    proposal = tree.proposal()
    assert len(proposal) <= size
    assert max([*proposal.depths(), 0]) < depth
    found = {proposal.along(path) for path in paths_of(proposal)}
    assert len(found) == len(proposal)

    def worth(path):
        product = 1.0
        for at, token in enumerate(path):
            product *= min(1.0, dict(rank(path[:at]))[token])
        return product

    slow = slow_tree(rank, size=size, beam=tree.width, depth=depth)
    assert sorted(map(worth, found)) == pytest.approx(sorted(map(worth, slow)))
