"""Targets that draft for themselves: what is proposed, and that nothing else changes."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch

from paceline_contract.calls import VerificationRule, VerifyOptions
from paceline_contract.proposal import Proposal
from paceline_engine.deciding.decisions import judge_by, rank_from
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.items import Item, Judge
from paceline_engine.terms.rank_paths import cartesian_tree, propose
from paceline_engine.torch_backend.adapters.trunk import compute_trunk
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_model_server.loading import new_host
from paceline_model_server.settings import ModelServerSettings
from support.device import on_a_cpu
from support.self_speculation import StreamingDecoder
from support.tiny_adapters import write_adapter
from unit.engine import models
from unit.engine.conftest import NEVER, call_on, chain, continuation, running
from unit.engine.models import (
    check_as_alone,
    check_guesses,
    decode_by_proposals,
    drafting,
    loaded,
    mixed_judgements,
    specs,
)

SPECS = specs()
SPEC = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
REACH = 3
# Unequal paths; more first guesses than there are likely ones, so that some are right.
PATHS = (*((rank,) for rank in range(60)), (0, 0), (0, 1), (3, 0), (0, 0, 0), (0, 1, 0), (0, 1, 2))
VOCABULARY_SIZE = 300


@pytest.fixture(scope="module", params=["medusa", "streams"])
def adapter(request, tiny_pair, tmp_path_factory):
    """A directory."""
    directory = tmp_path_factory.mktemp("adapters") / request.param
    return write_adapter(directory, tiny_pair.target, kind=request.param, tree=PATHS, reach=REACH)


@pytest.fixture(scope="module", params=["fused", "library", "together", "captured"])
def backend(request, tiny_pair, adapter):
    return drafting(tiny_pair.target, request.param, adapter)


@pytest.fixture(scope="module")
def plain(tiny_pair):
    return TransformersBackend(str(tiny_pair.target), dtype="float32")


@pytest.fixture(scope="module")
def reference(tiny_pair, adapter):
    """What the modules guess beside a text's last row: (J, V)."""
    model, module = models.reference(tiny_pair.target, adapter, dtype=torch.float32)
    # Without the rows that stand for no token.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:VOCABULARY_SIZE])

    @torch.no_grad()
    def guess(text):
        trunk = compute_trunk(model, torch.tensor([text]), upper_layers=module.upper_layers)
        rows = [each[0, -1] for each in module.draft_logits(model, trunk)]
        return torch.stack(rows)[:, :VOCABULARY_SIZE]

    guess.model, guess.module = model, module
    return guess


def expected(reference, text, spec=SPEC) -> Proposal:
    """The card's tree with the guesses after a text, whose next token is at its length."""
    positions = range(len(text) + 1, len(text) + 1 + REACH)
    ranked = rank_from(reference(text), spec=spec, positions=positions, count=60)
    return propose(PATHS, [[token for token, _ in own] for own in ranked])


def item(backend, prompt, task, spec=SPEC) -> Item:
    return Item(backend.new_cache(spec), spec, prefix=array("I", prompt), task=task)


@pytest.mark.parametrize(("guesses", "count"), [(0, len(PATHS)), (3, 3)])
async def test_it_makes_so_many_guesses_the_likeliest_by_the_cards_hit_rates(
    tiny_pair, tmp_path, guesses, count
):
    training = {"hit_rates": [[0.5, 0.3], [0.4, 0.1], [0.2]]}
    sizes = {"kind": "medusa", "tree": PATHS, "reach": REACH}
    adapter = write_adapter(tmp_path / "rated", tiny_pair.target, **sizes, training=training)
    settings = ModelServerSettings(
        model=str(tiny_pair.target), adapter=str(adapter), guesses=guesses
    )
    host = new_host(settings, role="target", on_failure=print)
    await host.start()
    try:
        call = call_on(host.open_session(SPEC).session_id, 1, base=[], append=PROMPT)
        verdict = await host.verify(call, Proposal(), options=VerifyOptions(propose=True))
    finally:
        await host.stop()
    assert len(verdict.proposal) == count
    if guesses:
        assert verdict.proposal.parents == (0, 0, 1)


@pytest.mark.parametrize(
    "training",
    [{}, {"hit_rates": 0.5}, {"hit_rates": []}, {"hit_rates": [[0.9]] * (REACH + 1)}],
    ids=["none", "no list", "empty", "beyond its reach"],
)
def test_guesses_cannot_be_chosen_without_hit_rates_of_its_reach(tiny_pair, tmp_path, training):
    sizes = {"kind": "medusa", "tree": PATHS, "reach": REACH}
    adapter = write_adapter(tmp_path / "odd", tiny_pair.target, **sizes, training=training)
    with pytest.raises(ModelLoadError, match="choose 9 guesses: its card has no hit rates"):
        TransformersBackend(str(tiny_pair.target), adapter=str(adapter), guesses=9)


def test_it_says_how_far_and_with_what(backend, adapter, plain):
    said = backend.description
    assert (said.self_draft_depth, said.self_draft_kind) == (REACH, adapter.name)
    assert replace(said, self_draft_depth=0, self_draft_kind="") == plain.description


@pytest.mark.parametrize("spec", SPECS, ids=["greedy", "nucleus", "top-k"])
def test_what_is_proposed_is_what_the_modules_guess(backend, reference, spec):
    check_guesses(backend, spec, PROMPT, lambda text, _next_token: expected(reference, text, spec))


def test_decoding_by_proposals_takes_the_forwards_that_the_paper_says(backend, reference, plain):
    made, judgements = decode_by_proposals(ModelText(backend, SPEC), PROMPT, count=25)
    assert made == continuation(ModelText(plain, SPEC), PROMPT, len(made))
    assert len(judgements) < len(made), "some guesses are right"
    if isinstance(backend.decoder, FusedLlama) and reference.module.upper_layers:
        slow = StreamingDecoder(reference.model, reference.module, PATHS)
        assert slow.decode(PROMPT, count=len(made)) == made
        assert slow.forwards == len(judgements)


@on_a_cpu
def test_logits_are_to_the_bit_what_they_are_without_an_adapter(backend, tiny_pair):
    if backend.together:
        pytest.skip("the other way of attending is asked for at load only")
    way = "fused" if isinstance(backend.decoder, FusedLlama) else "library"
    without = loaded(tiny_pair.target, way)
    found = []
    for model, proposes in [(backend, True), (backend, False), (without, False)]:
        items = [
            item(model, PROMPT, Judge(Proposal((1, 2, 3), (0, 0, 1)), propose=proposes)),
            item(model, [9, 8], Judge(Proposal((4, 5)))),
        ]
        feeds = [model._feed(each, None) for each in items]
        for feed in feeds:
            model._make_room(feed)
        found.append(torch.cat(model._forward(feeds, NEVER)).clone())
        if model.own_guesses:
            model.own_guesses.end_forward()
    assert torch.equal(found[1], found[2])
    if backend.own_guesses.drafter.stream_weights is None:
        assert torch.equal(found[0], found[2])
    # Else they are rows of products with others: test_streams_along.py.


def test_each_gets_what_it_would_get_alone(backend):
    together = check_as_alone(backend, lambda: mixed_judgements(backend, PROMPT, count=7))
    proposed = [len(each.judgement.proposal) > 0 for each in together[:-1]]
    assert proposed == [n % 3 != 2 for n in range(7)]


def test_who_does_not_ask_has_nothing_computed_for_it(backend, monkeypatch):
    computed = []
    monkeypatch.setattr(
        backend.own_guesses.drafter, "_guess", lambda rows: computed.append(rows) or iter(())
    )
    assert ModelText(backend, SPEC).judge(PROMPT, [1]).proposal == Proposal()
    assert (computed, backend.own_guesses._read) == ([], {})


def test_what_is_left_is_the_prefix_and_the_accepted_path(backend):
    right = continuation(ModelText(backend, SPEC), PROMPT, 3)
    wrong = (right[0] + 1) % VOCABULARY_SIZE
    served = ModelText(backend, SPEC)
    served.judge(PROMPT, [wrong, right[0], right[1]], parents=[0, 0, 2], propose=True)
    assert served.cache.token_ids.tolist() == [*PROMPT, *right[:2]]
    again = served.judge([*PROMPT, *right], propose=True)
    assert served.row_count == 1
    assert again == ModelText(backend, SPEC).judge([*PROMPT, *right], propose=True)


def test_only_tokens_that_there_are_are_proposed(backend):
    # The head has 20 rows more, and random heads like them as well.
    for first in range(20):
        proposal = ModelText(backend, SPEC).judge([first, 3], propose=True).proposal
        assert max(proposal.token_ids) < VOCABULARY_SIZE


def test_without_memory_for_guesses_there_is_a_verdict_all_the_same(backend, monkeypatch):
    def fail(_rows):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(backend.own_guesses.drafter, "_guess", fail)
    judged = ModelText(backend, SPEC).judge(PROMPT, propose=True)
    assert judged == ModelText(backend, SPEC).judge(PROMPT)


async def test_a_host_hands_proposals_out_and_under_rejection_none(backend):
    async with running(backend) as host:
        verdicts = []
        for rule in VerificationRule:
            session = host.open_session(replace(SPEC, rule=rule)).session_id
            call = call_on(session, 1, base=[], append=PROMPT)
            options = VerifyOptions(propose=True)
            verdicts.append(await host.verify(call, chain([]), options=options))
    exact, rejection = verdicts
    assert exact.proposal == ModelText(backend, SPEC).judge(PROMPT, propose=True).proposal
    assert rejection.proposal == Proposal()
    assert exact.next_token == rejection.next_token


def test_a_model_that_judges_chains_only_proposes_one(tiny_pair, adapter, monkeypatch):
    monkeypatch.setattr(
        "paceline_engine.torch_backend.computed_model.rotations_change", lambda _: True
    )
    model = TransformersBackend(str(tiny_pair.target), adapter=str(adapter))
    proposal = ModelText(model, SPEC).judge(PROMPT, propose=True).proposal
    assert proposal.parents == (0, 1, 2)
    assert model.description.self_draft_depth == 3


def test_an_invariant_model_proposes_trees_and_keeps_its_bits(tiny_pair, adapter):
    settings = {"adapter": str(adapter), "invariant": True, "prune_below": 0.9}
    backend = TransformersBackend(str(tiny_pair.target), **settings)
    text, tree = ModelText(backend, SPEC), Proposal()
    tokens, logprobs = list(PROMPT), []
    for _ in range(12):
        judged = text.judge(
            tokens, tree.token_ids, parents=tree.parents, propose=True, logprobs=True
        )
        tokens += [*tree.along(judged.accepted_path), judged.next_token]
        logprobs += judged.logprobs
        tree = judged.proposal
        assert not tree.is_chain
    for place, logprob in enumerate(logprobs, start=len(PROMPT)):
        plain = ModelText(backend, SPEC).judge(tokens[:place], logprobs=True)
        assert (plain.next_token, plain.logprobs) == (tokens[place], (logprob,))


def test_a_short_path_beside_a_longer_one_ends_where_it_ends():
    # Medusa's tables pad short paths; a pad that reads as token 0 would count as accepted.
    tree = propose(((0,), (1,), (0, 0)), [[3, 4], [0]])
    logits = torch.zeros(4, 6)
    logits[0, 4] = 1  # the path that is the shorter one
    logits[2, 0] = 1  # after it token 0, as a pad would have it
    logits[3, 0] = 1
    judged = judge_by(logits, Judge(tree), spec=SPEC, position=2)
    assert (judged.accepted_path, judged.next_token) == ((1,), 0)


def refusal(model, adapter) -> str:
    with pytest.raises(ModelLoadError) as caught:
        TransformersBackend(str(model), adapter=str(adapter))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["medusa", "streams"])
def test_what_is_no_adapter_for_the_model_is_refused(kind, tiny_pair, tmp_path):
    def write(name, **card):
        said = {"kind": kind, "tree": cartesian_tree((2, 1)), **card}
        return write_adapter(tmp_path / name, tiny_pair.target, **said)

    assert "fingerprint" in refusal(tiny_pair.drafter, write("good"))
    many = cartesian_tree((257,))
    assert "257 guesses" in refusal(tiny_pair.target, write("bushy", tree=many))
    assert "0 guesses" in refusal(tiny_pair.target, write("bare", tree=()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"role": "drafter", "model": "somewhere"}, "only a target drafts for itself"),
        ({"role": "target", "model": "nowhere"}, "nowhere"),
    ],
)
async def test_only_a_target_has_one(settings, words):
    role = settings.pop("role")
    host = new_host(ModelServerSettings(**settings, adapter="adapter"), role=role, on_failure=print)
    with pytest.raises(ModelLoadError, match=words):
        await host.start()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "simulated", "adapter": "a"}, "--adapter needs --backend transformers"),
        ({"model": "somewhere", "guesses": 2}, "--guesses goes with --adapter"),
    ],
)
def test_settings_that_an_adapter_does_not_go_with_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        ModelServerSettings(**settings)
