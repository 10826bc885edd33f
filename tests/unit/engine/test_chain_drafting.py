"""Targets with an EAGLE head: their proposals are the slow head's, and leave no trace."""

from __future__ import annotations

from array import array

import pytest
import torch

from paceline_contract.proposal import Proposal
from paceline_engine.deciding.decisions import rank_from
from paceline_engine.model_files.files import find_model_files
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.items import Item, Judge
from paceline_engine.terms.rank_paths import propose
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_engine.torch_backend.chain_drafting import ChainDrafter
from paceline_engine.torch_backend.cuda_graphs import CapturedForward
from paceline_engine.torch_backend.int8_linear import Int8Product
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_training.run import AdapterSizes, TextPlan, run_training
from paceline_training.training import TrainingPlan
from support.eagle_reference import SlowHead
from support.tiny_adapters import write_adapter
from unit.engine.conftest import NEVER, continuation
from unit.engine.models import (
    check_any_past,
    check_as_alone,
    check_guesses,
    check_kept_beginning,
    check_prompt_in_parts,
    decode_by_proposals,
    drafting,
    mixed_judgements,
    reference,
    specs,
)

SPECS = specs()
SPEC = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
REACH = 3
VOCABULARY_SIZE = 300
# A chain with runners-up.
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0), (0, 0, 1))
# The last ones are rows of the target's head that stand for no token.
SHAPE = {"token_ids": [*range(2, 302, 3), 310, 319]}


@pytest.fixture(scope="module")
def adapter(tiny_pair, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapters") / "eagle"
    return write_adapter(
        directory, tiny_pair.target, kind="eagle", tree=PATHS, reach=REACH, shape=SHAPE
    )


@pytest.fixture(
    scope="module",
    params=["fused", "library", "together", "captured", "invariant", "int8", "int4"],
)
def backend(request, tiny_pair, adapter):
    weights = request.param if request.param in {"int8", "int4"} else "plain"
    model = drafting(tiny_pair.target, request.param, adapter, weights=weights)
    assert isinstance(model.own_guesses.drafter, ChainDrafter)
    model.rounded_to, model.is_rounded = weights, weights != "plain"
    return model


@pytest.fixture(scope="module")
def expected(tiny_pair, adapter):
    """What is to be proposed after a text and the next token, by the slow head."""
    model, head = reference(tiny_pair.target, adapter, dtype=torch.float64)
    known = {}

    @torch.no_grad()
    def guess(text, next_token, spec=SPEC):
        if (key := (*text, next_token, spec.seed)) in known:
            return known[key]
        trunk = compute_trunk(model, torch.tensor([text]), feature_layers=head.feature_layers)
        ranked = []

        def choose(step, logits):
            position = len(text) + 1 + step
            own = logits[None, :VOCABULARY_SIZE].float()
            (found,) = rank_from(own, spec=spec, positions=[position], count=3)
            ranked.append([token for token, _ in found])
            return ranked[-1][0]

        slow = SlowHead(head.state_dict(), head.shape, model)
        slow.chain(trunk.features[0], [*text, next_token], steps=REACH, choose=choose)
        known[key] = propose(PATHS, ranked)
        return known[key]

    return guess


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "nucleus", "top-k"])
def test_what_is_proposed_is_what_the_slow_head_guesses(backend, expected, spec):
    if backend.is_rounded:
        pytest.skip("its features are others in eight bits")
    check_guesses(backend, spec, PROMPT, lambda text, token: expected(text, token, spec))


def test_decoding_by_proposals_is_plain_decoding(backend, tiny_pair):
    plain = TransformersBackend(str(tiny_pair.target), dtype="float32", weights=backend.rounded_to)
    for spec in SPECS:
        made, judgements = decode_by_proposals(ModelText(backend, spec), PROMPT, count=19)
        for judged in judgements:
            assert len(judged.proposal) == len(PATHS) or spec is not SPEC  # filters leave fewer
            assert max(judged.proposal.token_ids) < VOCABULARY_SIZE
        assert made == continuation(ModelText(plain, spec), PROMPT, len(made))


def test_chains_are_judged_in_replayed_forwards_which_keep_features_too(
    tiny_pair, tmp_path, monkeypatch
):
    chain = ((0,), (0, 0), (0, 0, 0))
    adapter = write_adapter(
        tmp_path / "chain", tiny_pair.target, kind="eagle", tree=chain, reach=REACH, shape=SHAPE
    )
    replayed = []
    replay = CapturedForward.__call__

    def note(forward, texts, token_ids):
        replayed.append(len(token_ids))
        return replay(forward, texts, token_ids)

    monkeypatch.setattr(CapturedForward, "__call__", note)

    def decode(backend, spec):
        """As a server does, which judges a chain as such."""
        text, made, block, judgements = ModelText(backend, spec), [], (), []
        while len(made) < 19:
            judged = text.judge([*PROMPT, *made], block, propose=True)
            made += [*(block[index] for index in judged.accepted_path), judged.next_token]
            assert judged.proposal.is_chain
            block = judged.proposal.token_ids
            judgements.append(judged)
        # What comes where other tokens were before: their features are gone.
        for end, others in (((), (7, 8, 9)), ((3,), ()), ((4,), (2,)), ((3,), ())):
            judgements.append(text.judge([*PROMPT, *end], others, propose=True))
        return judgements

    computed, captured = (
        drafting(tiny_pair.target, way, adapter) for way in ("together", "captured")
    )
    for spec in SPECS:
        assert decode(captured, spec) == decode(computed, spec)
    # Each size was recorded once, beside a forward that is computed; all others are replayed.
    assert len(replayed) > 30
    assert max(replayed) > 3


def test_recordings_that_keep_wrong_features_are_not_used(
    tiny_pair, adapter, expected, monkeypatch, caplog
):
    store = CapturedForward._store

    def store_others(forward, features, *, first_layer):
        store(forward, features + 1, first_layer=first_layer)

    monkeypatch.setattr(CapturedForward, "_store", store_others)
    backend = drafting(tiny_pair.target, "captured", adapter)
    check_guesses(backend, SPEC, PROMPT, expected)
    assert not backend.captures
    assert "forwards are not captured: they are off" in caplog.text


def test_a_trained_head_saves_forwards_also_in_eight_bits(tiny_pair, tmp_path):
    files = find_model_files(str(tiny_pair.target))
    plain = TransformersBackend(str(tiny_pair.target), dtype="float32")
    prompts = [[5 + n, 6, 7, 8] for n in range(8)]
    texts = [[*each, *continuation(ModelText(plain, SPEC), each, 28)] for each in prompts]
    learnt = torch.tensor(texts)
    torch.set_num_threads(1)
    run_training(
        files,
        sizes=AdapterSizes(
            kind="eagle",
            reach=3,
            layers=0,
            rank=0,
            exit_rank=0,
            tree_nodes=3,
            draft_vocabulary=160,
        ),
        text=TextPlan(streams=[learnt], validation=learnt, window=32, batch=8, seed=1),
        plan=TrainingPlan(
            steps=80,
            rate=1e-2,
            decay="cosine",
            warm_up_share=0.1,
            labels="model",
            report_steps=1000,
        ),
        out=tmp_path / "head",
        checkpoint=tmp_path / "checkpoint.pt",
        device="cpu",
        tell=lambda _: None,
    )
    for weights in ("plain", "int8"):
        how = {"weights": weights}
        backend = TransformersBackend(str(tiny_pair.target), adapter=str(tmp_path / "head"), **how)
        plain = TransformersBackend(str(tiny_pair.target), **how)
        forwards = 0
        for text in texts[:3]:
            made, judgements = decode_by_proposals(ModelText(backend, SPEC), text[:4], count=28)
            assert made == continuation(ModelText(plain, SPEC), text[:4], len(made))
            forwards += len(judgements)
        assert forwards < 0.7 * 3 * 28


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_beside_whole_numbers_the_heads_products_have_eight_bits(
    tiny_pair, adapter, weights, monkeypatch
):
    shapes = []
    build = Int8Product.__init__

    def noted(product, weight, *rest):
        shapes.append(tuple(weight.shape))
        build(product, weight, *rest)

    monkeypatch.setattr(Int8Product, "__init__", noted)
    TransformersBackend(str(tiny_pair.target), adapter=str(adapter), weights=weights)
    head = reference(tiny_pair.target, adapter, dtype=torch.float32)[1]
    linears = [it for it in head.modules() if isinstance(it, torch.nn.Linear)]
    own = [tuple(it.weight.shape) for it in linears]
    assert shapes[-len(own) - 1 :] == [*own, (len(SHAPE["token_ids"]), head.width)]


def test_whatever_happened_before_guesses_are_those_of_the_text_alone(backend, expected):
    check_any_past(backend, SPEC, None if backend.is_rounded else expected)


def test_a_text_that_begins_as_a_kept_one_has_its_features_too(backend, expected):
    if backend.is_rounded:
        pytest.skip("its features are others in eight bits")
    check_kept_beginning(backend, SPEC, expected)


def test_what_long_texts_lack_is_made_in_parts(backend, expected, monkeypatch):
    if backend.is_rounded:
        pytest.skip("its features are others in eight bits")
    made = []
    compute = EagleHead.keys_and_values

    def noted(head, read, *, positions):
        made.append(len(positions))
        return compute(head, read, positions=positions)

    items = [
        Item(
            backend.new_cache(SPEC),
            SPEC,
            prefix=array("I", range(5, 5 + length)),
            task=Judge(Proposal(), propose=True),
        )
        for length in (11, 2, 1, 4, 8)
    ]
    monkeypatch.setattr("paceline_engine.torch_backend.chain_drafting._ROWS_AT_ONCE", 4)
    with monkeypatch.context() as patch:
        patch.setattr(EagleHead, "keys_and_values", noted)
        judged = [outcome.judgement for outcome in backend.run(items, NEVER)]
    for item, each in zip(items, judged, strict=True):
        assert each.proposal == expected(item.prefix, each.next_token)
    assert made == [4, 4, 3, 2 + 1, 4, 4, 4, *[len(items)] * REACH]


def test_each_gets_what_it_would_get_alone(backend):
    together = check_as_alone(backend, lambda: mixed_judgements(backend, PROMPT, count=7))
    proposed = [len(each.judgement.proposal) > 0 for each in together[:-1]]
    assert proposed == [n % 3 != 2 for n in range(7)]


def test_a_long_prompt_in_parts_is_a_prompt(backend, expected):
    if backend.is_rounded:
        pytest.skip("its features are others in eight bits")
    check_prompt_in_parts(backend, SPEC, expected, length=30, row_limit=8)


def test_features_are_paid_for_and_logits_are_to_the_bit_as_without(tiny_pair, adapter):
    how = {"dtype": "float32"}
    with_head = TransformersBackend(str(tiny_pair.target), adapter=str(adapter), **how)
    without = TransformersBackend(str(tiny_pair.target), **how)
    shape = with_head._slabs.shape
    before, after = (each.token_memory().bytes_per_token for each in (without, with_head))
    assert after == before * shape.layers // 4
    assert shape.layers > 4
    found = []
    for model in (with_head, without):
        task = Judge(Proposal((1, 2, 3), (0, 0, 1)), propose=model is with_head)
        item = Item(model.new_cache(SPEC), SPEC, prefix=array("I", PROMPT), task=task)
        feed = model._feed(item, None)
        model._make_room(feed)
        found.append(model._forward([feed], NEVER)[0].clone())
    assert torch.equal(*found)


def test_guesses_are_chosen_by_hit_rates_and_only_the_best_have_guesses_after_them(
    tiny_pair, tmp_path
):
    training = {"hit_rates": [[0.6, 0.3], [0.5, 0.4], [0.5, 0.1]]}
    sizes = {"kind": "eagle", "tree": PATHS, "reach": REACH, "shape": SHAPE}
    rated = write_adapter(tmp_path / "rated", tiny_pair.target, **sizes, training=training)
    model = TransformersBackend(str(tiny_pair.target), adapter=str(rated), guesses=4)
    proposal = ModelText(model, SPEC).judge(PROMPT, propose=True).proposal
    assert proposal.parents == (0, 0, 1, 1)  # of 0.6, 0.3, 0.3 and 0.24
    assert model.description.self_draft_depth == 2
    bushy = write_adapter(
        tmp_path / "bushy", tiny_pair.target, **{**sizes, "tree": ((0,), (1,), (1, 0))}
    )
    model = TransformersBackend(str(tiny_pair.target), adapter=str(bushy))
    assert ModelText(model, SPEC).judge(PROMPT, propose=True).proposal.parents == (0, 0)


def test_a_chain_ends_where_it_becomes_unlikely(tiny_pair, adapter):
    whole_chains, pruning = (
        TransformersBackend(str(tiny_pair.target), adapter=str(adapter), prune_below=least)
        for least in (0, 0.9)
    )
    prompts = [[5 + n, 6, 7] for n in range(12)]

    def proposals(model):
        items = []
        for prompt in prompts:
            cache, prefix = model.new_cache(SPEC), array("I", prompt)
            task = Judge(Proposal(), propose=True)
            items.append(Item(cache, SPEC, prefix=prefix, task=task))
        return [outcome.judgement.proposal for outcome in model.run(items, NEVER)]

    depths = set()
    for whole, short in zip(proposals(whole_chains), proposals(pruning), strict=True):
        depth = max([*short.depths(), -1]) + 1
        depths.add(depth)
        fits = [index for index, own in enumerate(whole.depths()) if own < depth]
        assert short == whole.only(fits)
    assert len(depths) > 1
    alone = [ModelText(pruning, SPEC).judge(prompt, propose=True).proposal for prompt in prompts]
    assert alone == proposals(pruning)


def test_a_head_of_other_keys_or_of_no_vocabulary_is_refused(tiny_pair, tmp_path):
    sizes = {"kind": "eagle", "tree": PATHS, "reach": REACH}

    def refusal(name, **shape):
        directory = write_adapter(
            tmp_path / name, tiny_pair.target, **sizes, shape={**SHAPE, **shape}
        )
        with pytest.raises(ModelLoadError) as caught:
            TransformersBackend(str(tiny_pair.target), adapter=str(directory))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "must be the same" in refusal("keys", kv_heads=2)
    assert "does not ascend" in refusal("order", token_ids=[5, 4, 9])
    assert "does not ascend" in refusal("beyond", token_ids=[5, 9, 320])
    assert "no token that the model can choose" in refusal("padding", token_ids=[310, 319])
