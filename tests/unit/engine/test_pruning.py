"""Trees are pruned before the upper layers: fewer rows, and the same output."""

from __future__ import annotations

from array import array
from contextlib import contextmanager

import pytest
import torch

from paceline_contract.calls import VerifyOptions
from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.sampling import noisy_scores
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.terms.rank_paths import cartesian_tree
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.self_drafting import FedTree, _likelihoods
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_model_server.loading import new_host
from paceline_model_server.settings import ModelServerSettings
from support.self_speculation import StreamingDecoder
from support.tiny_adapters import write_adapter
from unit.engine.conftest import NEVER, call_on, chain, continuation, running
from unit.engine.models import check_as_alone, loaded, mixed_judgements, reference, specs

SPECS = specs()
SPEC = SPECS[0]
PROMPT = [5, 6, 7, 8, 9]
# So many first guesses that some are right, of random weights too.
PATHS = (*cartesian_tree((60,)), (0, 0), (0, 1), (3, 0), (0, 0, 0), (0, 1, 0), (0, 1, 2))
# Of random weights the early exit gives a token 1/320, give or take.
THRESHOLD = 0.002
VOCABULARY_SIZE = 300


@pytest.fixture(scope="module")
def adapter(tiny_pair, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapters") / "streams"
    return write_adapter(directory, tiny_pair.target, kind="streams", tree=PATHS)


@pytest.fixture(scope="module", params=["one by one", "together"])
def backend(request, tiny_pair, adapter):
    model = TransformersBackend(str(tiny_pair.target), adapter=str(adapter), prune_below=THRESHOLD)
    assert isinstance(model.decoder, FusedLlama), "else nothing is pruned"
    model.together = request.param == "together"
    return model


@pytest.fixture(scope="module")
def plain(tiny_pair):
    return TransformersBackend(str(tiny_pair.target))


@contextmanager
def pruning(backend, threshold):
    drafter = backend.own_guesses.drafter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "_prune_below", threshold)
        patch.setattr(drafter, "prunes", threshold > 0)
        yield


def as_own(backend, cache, tree):
    """Let a tree count as what the model proposed for a text: only that is pruned."""
    backend.own_guesses._proposed[cache] = tree


def decode(text, *, count):
    """Decode by the model's own proposals; return tokens, and for each forward its rows."""
    made, proposal, rows = [], Proposal(), []
    while len(made) < count:
        judged = text.judge(
            [*PROMPT, *made], proposal.token_ids, parents=proposal.parents, propose=True
        )
        made += [*proposal.along(judged.accepted_path), judged.next_token]
        rows.append((len(proposal), text.dropped_count))
        proposal = judged.proposal
    return made, rows


@pytest.mark.parametrize(
    ("spec", "threshold"), [(SPEC, THRESHOLD), *((spec, 0.02) for spec in SPECS)]
)
def test_the_output_is_that_of_plain_decoding(spec, threshold, backend, plain):
    with pruning(backend, threshold):
        made, rows = decode(ModelText(backend, spec), count=12)
    assert made == continuation(ModelText(plain, spec), PROMPT, len(made))
    assert sum(dropped for _, dropped in rows) > 0


def test_threshold_zero_drops_nothing_and_above_one_all(backend):
    with pruning(backend, 0):
        _, rows = decode(ModelText(backend, SPEC), count=12)
        assert {dropped for _, dropped in rows} == {0}
        assert len(rows) < 12
    with pruning(backend, 1.1):
        _, rows = decode(ModelText(backend, SPEC), count=12)
        assert all(dropped == proposed for proposed, dropped in rows)
        assert len(rows) == 12


def test_a_guess_is_as_likely_as_the_noise_makes_it_after_its_own_parent():
    sampling = SamplingParameters(1.0)
    logits = torch.randn((2, 300), generator=torch.Generator().manual_seed(5))
    tree = Proposal((3, 4, 5), parents=(0, 1, 1))
    fed = FedTree(
        tree=tree, position=20, entering=torch.empty(0), spec=SessionSpec(200, sampling, seed=3)
    )
    after_text, after_first = (
        noisy_scores(row[None], positions=[at], parameters=sampling, seed=3)[0].softmax(-1)
        for row, at in zip(logits, (20, 21), strict=True)
    )
    expected = [after_text[3], after_first[4], after_first[5]]
    assert _likelihoods(fed, [0, 1], logits) == pytest.approx([float(it) for it in expected])


def test_it_has_the_forwards_and_rows_that_the_paper_says(backend, tiny_pair, adapter):
    made, rows = decode(ModelText(backend, SPEC), count=12)
    model, module = reference(tiny_pair.target, adapter, dtype=torch.float32)
    # Without the rows that stand for no token.
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:VOCABULARY_SIZE])
    slow = StreamingDecoder(model, module, PATHS, THRESHOLD)
    assert slow.decode(PROMPT, count=len(made)) == made
    assert slow.row_counts == [1 + proposed - dropped for proposed, dropped in rows]


def test_upper_layers_have_fewer_rows(backend, monkeypatch):
    counts = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, given: counts.append(len(given[0])))
        for layer in backend.decoder.layers
    ]
    text = ModelText(backend, SPEC)
    tree = text.judge(PROMPT, propose=True).proposal
    counts.clear()
    text.judge(PROMPT, tree.token_ids, parents=tree.parents, propose=True)
    for hook in hooks:
        hook.remove()
    rows = 1 + len(tree)
    # Each of those left has streams beside it.
    upper = (rows - text.dropped_count) * (1 + backend.own_guesses.drafter.depth)
    assert counts == [rows, rows, upper, upper]
    assert 0 < text.dropped_count < len(tree)
    # All of them were computed, if not all to the end.
    assert text.row_count == rows


def test_what_is_kept_gets_the_logits_that_it_gets_unpruned(backend):
    tree = ModelText(backend, SPEC).judge(PROMPT, propose=True).proposal
    scores = []
    for threshold in (0, THRESHOLD):
        with pruning(backend, threshold):
            task = Judge(tree, propose=True)
            item = Item(backend.new_cache(SPEC), SPEC, prefix=array("I", PROMPT), task=task)
            as_own(backend, item.cache, tree)
            feed = backend._feed(item, None)
            backend._make_room(feed)
            scores.append(backend._forward([feed], NEVER)[0].clone())
            backend.own_guesses.end_forward()
    rows = [0, *(index + 1 for index in feed.kept)]
    assert 1 < len(rows) < len(tree)
    torch.testing.assert_close(scores[1], scores[0][rows], rtol=1e-4, atol=1e-4)


def test_a_chain_is_cut_where_it_gets_unlikely(backend):
    right = continuation(ModelText(backend, SPEC), PROMPT, 6)
    with pruning(backend, 1.1):
        text = ModelText(backend, SPEC)
        as_own(backend, text.cache, Proposal(right[:4]))
        judged = text.judge(PROMPT, right[:4], propose=True)
        assert (judged.accepted_path, judged.next_token) == ((), right[0])
        assert text.dropped_count == 4
    text = ModelText(backend, SPEC)
    as_own(backend, text.cache, Proposal(right[:4]))
    judged = text.judge(PROMPT, right[:4], propose=True)
    assert judged.next_token == right[len(judged.accepted_path)]
    assert judged.accepted_path == tuple(range(len(judged.accepted_path)))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_only_own_guesses_of_who_asks_for_more_are_pruned(asks, is_own, backend):
    right = continuation(ModelText(backend, SPEC), PROMPT, 4)
    text = ModelText(backend, SPEC)
    # Of a drafter's tokens some may be the target's guesses as well.
    own = (*right[:3], 1) if is_own else right[:2]
    as_own(backend, text.cache, Proposal(own))
    with pruning(backend, 1.1):
        judged = text.judge(PROMPT, right[:3], parents=[0, 1, 2], propose=asks)
    if asks and is_own:
        assert (judged.accepted_path, judged.next_token) == ((), right[0])
        assert text.dropped_count == 3
    else:
        assert (judged.accepted_path, judged.next_token) == ((0, 1, 2), right[3])
        assert text.dropped_count == 0


def test_what_was_dropped_is_not_taken_for_computed(backend, plain, monkeypatch):
    right = continuation(ModelText(plain, SPEC), PROMPT, 6)

    def fail(_rows):
        raise torch.OutOfMemoryError

    # So the tree is still there when the next call comes, whose prefix goes through it.
    monkeypatch.setattr(backend.own_guesses.drafter, "_guess", fail)
    for threshold in (0.001, THRESHOLD, 0.01, 1.1):
        for away in range(1, 4):
            wrong = (right[0] + away) % VOCABULARY_SIZE
            text = ModelText(backend, SPEC)
            tree = Proposal((wrong, right[0], wrong + 1, right[1], right[2]), (0, 0, 1, 2, 4))
            as_own(backend, text.cache, tree)
            with pruning(backend, threshold):
                text.judge(PROMPT, tree.token_ids, parents=tree.parents, propose=True)
            judged = text.judge([*PROMPT, *right[:3]], right[3:5])
            assert (judged.accepted_path, judged.next_token) == ((0, 1), right[5])
            assert text.cache.token_ids.tolist() == [*PROMPT, *right[:5]]


def test_each_gets_what_it_would_get_alone(backend):
    def items():
        chain_task = Judge(Proposal((1, 2)), propose=True)
        chain_item = Item(backend.new_cache(SPEC), SPEC, prefix=array("I", PROMPT), task=chain_task)
        made = [*mixed_judgements(backend, PROMPT, count=8), chain_item]
        for item in made:
            if isinstance(item.task, Judge):
                as_own(backend, item.cache, item.task.proposal)
        return made

    dropped = [each.dropped_count for each in check_as_alone(backend, items)]
    assert sum(dropped) > 0
    assert (dropped[2], dropped[5], dropped[8]) == (0, 0, 0)


def test_a_forward_that_failed_is_repeated_with_what_was_left(backend, plain, monkeypatch):
    tree = ModelText(backend, SPEC).judge(PROMPT, propose=True).proposal
    items = [
        Item(
            backend.new_cache(SPEC), SPEC, prefix=array("I", prefix), task=Judge(tree, propose=True)
        )
        for prefix in (PROMPT, [1, 2])
    ]
    for item in items:
        as_own(backend, item.cache, tree)
    last, failures = backend.decoder.layers[-1], [RuntimeError("once")]

    def fail(*_):
        if failures:
            raise failures.pop()

    hook = last.register_forward_pre_hook(fail)
    outcomes = backend.run(items, NEVER)
    hook.remove()
    for prefix, outcome in zip((PROMPT, [1, 2]), outcomes, strict=True):
        accepted = tree.along(outcome.judgement.accepted_path)
        said = [*accepted, outcome.judgement.next_token]
        assert said == continuation(ModelText(plain, SPEC), prefix, len(said))
        assert outcome.row_count == len(prefix) + len(tree)


def test_through_the_librarys_layers_nothing_is_pruned(tiny_pair, adapter):
    model = loaded(tiny_pair.target, "library", adapter=str(adapter), prune_below=1.0)
    text = ModelText(model, SPEC)
    decode(text, count=8)
    assert text.dropped_count == 0


@pytest.mark.parametrize(
    ("kind", "settings", "prunes"),
    [
        ("streams", {"prune_below": 0.01}, True),
        ("streams", {"prune_below": 0.0}, False),
        ("streams", {"prune_below": 0.01, "invariant": True}, False),
        ("medusa", {"prune_below": 0.01}, False),
    ],
)
def test_an_early_exit_and_trees_are_needed(kind, settings, prunes, tiny_pair, tmp_path):
    directory = write_adapter(tmp_path / kind, tiny_pair.target, kind=kind, tree=((0,),))
    options = LoadOptions(model=str(tiny_pair.target), adapter=str(directory), **settings)
    assert load_backend(options).own_guesses.drafter.prunes == prunes


async def test_what_becomes_of_guesses_is_counted(backend):
    async with running(backend) as host:
        session = host.open_session(SPEC).session_id
        options = VerifyOptions(propose=True)
        first = await host.verify(
            call_on(session, 1, base=[], append=PROMPT), chain([]), options=options
        )
        text = [*PROMPT, first.next_token]
        second = await host.verify(
            call_on(session, 2, base=PROMPT, append=text[len(PROMPT) :]),
            first.proposal,
            options=options,
        )
        held = [*text, *first.proposal.along(second.accepted_path)]
        await host.verify(
            call_on(session, 3, base=held, append=[second.next_token]),
            chain([1, 2]),
            options=VerifyOptions(),
        )
        now = host.statistics()
    alone = ModelText(backend, SPEC)
    as_own(backend, alone.cache, first.proposal)
    alone.judge(text, first.proposal.token_ids, parents=first.proposal.parents, propose=True)
    assert now.guesses_proposed == len(first.proposal) + len(second.proposal)
    assert now.guesses_judged == len(first.proposal)
    assert now.guesses_pruned == alone.dropped_count > 0
    assert now.guesses_accepted == len(second.accepted_path)
    assert now.judged_tokens == len(first.proposal) + 2


async def test_the_operator_says_below_what(monkeypatch):
    said = []
    monkeypatch.setattr(
        "paceline_model_server.loading.load_backend", lambda options: said.append(options) or 1 / 0
    )
    settings = ModelServerSettings(model="m", adapter="a", prune_below=0.25)
    with pytest.raises(ZeroDivisionError):
        await new_host(settings, role="target", on_failure=print).start()
    assert said[0].prune_below == 0.25
