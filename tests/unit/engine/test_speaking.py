"""A drafter of another vocabulary: its drafts are the target's tokens, with their noise."""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections import Counter
from functools import cache

import pytest

from paceline_contract.calls import VerificationRule
from paceline_contract.max_gram import MaxGram
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.noise import Purpose, noise_bits, uniform
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.model_files.target_tokens import find_target_tokens
from paceline_engine.scheduling.latencies import LatencyMeter, measure
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from support.distributions import fit
from support.speakers import KINDS, TEXTS, make_speaker
from unit.engine.conftest import NEVER
from unit.engine.models import draft, draft_together
from unit.engine.test_spoken_text import vocabulary_of

FEW = [("byte level", "pieces"), ("unigram", "byte level")]
PAIRS = [
    pair if pair in FEW else pytest.param(*pair, marks=pytest.mark.long)
    for pair in itertools.permutations(KINDS, 2)
]
SAMPLINGS = (SamplingParameters(), SamplingParameters(temperature=0.9, top_p=0.9, top_k=200))


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    """Load a drafter of a kind for a target of another kind; each pair once."""
    root = tmp_path_factory.mktemp("speaking")

    @cache
    def folder(kind):
        return make_speaker(kind, root / kind, seed=len(kind))

    @cache
    def load(target, drafter):
        return load_backend(LoadOptions(model=str(folder(drafter)), speak=str(folder(target))))

    load.folder = folder
    return load


def spec_for(sampling, *, seed=0, rule=VerificationRule.EXACT) -> SessionSpec:
    return SessionSpec(reserve_length=64, sampling=sampling, seed=seed, rule=rule)


def gumbel(seed, position, token_id) -> float:
    bits = noise_bits(seed, position, token_id=token_id, purpose=Purpose.EXACT)
    return -math.log(-math.log(uniform(bits)))


def prefixes(target):
    """Beginnings in every script, cut anywhere, also within characters; and any ids at all."""
    theirs = vocabulary_of(target)
    found = [theirs.encode(text.encode())[: 5 + n] for n, text in enumerate(TEXTS)]
    return [*found, [*theirs.end_ids, *found[0]], [0, theirs.size - 1, theirs.size - 2, 5]]


@pytest.mark.parametrize(("target", "drafter"), FEW[:1])
def test_it_is_a_drafter_of_the_targets_vocabulary_to_everybody(speaking, target, drafter):
    backend = speaking(target, drafter)
    theirs = load_backend(LoadOptions(model=str(speaking.folder(target)))).description
    own = load_backend(LoadOptions(model=str(speaking.folder(drafter)))).description
    told = backend.description
    assert told.tokenizer_fingerprint == theirs.tokenizer_fingerprint
    assert (told.vocabulary_size, told.eos_token_ids) == (
        theirs.vocabulary_size,
        theirs.eos_token_ids,
    )
    assert len({told.fingerprint, own.fingerprint, theirs.fingerprint}) == 3
    # A model with the target's own tokenizer drafts as it is.
    folder = str(speaking.folder(target))
    same = load_backend(LoadOptions(model=folder, speak=folder))
    assert same.description == theirs


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_a_draft_is_a_function_of_the_prefix(speaking, target, drafter, sampling):
    backend = speaking(target, drafter)
    spec = spec_for(sampling, seed=3)
    used = backend.new_cache(spec)
    for prefix in prefixes(target)[::3]:
        chain, _ = draft(backend, spec, prefix, 5, cache=used)
        assert all(0 <= token < backend.description.vocabulary_size for token in chain)
        assert chain == draft(backend, spec, prefix, 5)[0]
        for count in (1, 3):
            # Whatever the window, and whatever the session had been asked before.
            later, _ = draft(backend, spec, [*prefix, *chain[:count]], 2)
            assert chain[count : count + 2] == later


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_a_drafted_token_has_the_noise_of_the_targets_id(speaking, target, drafter):
    backend = speaking(target, drafter)
    warm = SamplingParameters(temperature=1.1)
    for seed, prefix in enumerate(prefixes(target)):
        told = spec_for(warm, seed=seed, rule=VerificationRule.REJECTION)
        _, (drawn_from,) = draft(backend, told, prefix, 1)
        assert math.fsum(drawn_from.probabilities) == pytest.approx(1, abs=1e-4)
        chances = dict(zip(drawn_from.token_ids, drawn_from.probabilities, strict=True))

        (token,), _ = draft(backend, spec_for(warm, seed=seed), prefix, 1)
        noised = {
            each: math.log(chance) + gumbel(seed, len(prefix), each)
            for each, chance in chances.items()
        }
        assert token == max(noised, key=noised.__getitem__)


def test_under_rejection_a_token_is_drawn_from_what_is_reported(speaking):
    # n draws of one token; a right source fails once in a million runs.
    backend = speaking("byte level", "pieces")
    prefix = prefixes("byte level")[0]
    warm = SamplingParameters(temperature=0.7, top_k=12)
    counts: Counter[int] = Counter()
    reported = None
    for seed in range(200):
        spec = spec_for(warm, seed=seed, rule=VerificationRule.REJECTION)
        (token,), (drawn_from,) = draft(backend, spec, prefix, 1)
        counts[token] += 1
        assert reported in (None, drawn_from)
        reported = drawn_from
    expected = dict(zip(reported.token_ids, reported.probabilities, strict=True))
    found = fit(counts, expected)
    assert found.p_value > 1e-6
    assert found.detected_distance(false_alarm=1e-6) < 0.5


@pytest.mark.parametrize("rule", VerificationRule)
@pytest.mark.parametrize(("target", "drafter"), FEW)
def test_a_stack_drafts_the_tokens_of_its_largest_model(speaking, target, drafter, rule):
    backend = speaking(target, drafter)
    alone = StackBackend([backend], matrix=((1, 0), (0, 0)), new_max_gram=MaxGram)
    both = StackBackend([backend], matrix=((1, 0), (0, 6)), new_max_gram=MaxGram)
    for sampling in SAMPLINGS[: 2 if rule is VerificationRule.EXACT else 1]:
        spec = spec_for(sampling, seed=8, rule=rule)
        for prefix in prefixes(target)[:12:4]:
            twice = [*prefix, *prefix]
            assert draft(both, spec, twice, 6)[0] == draft(alone, spec, twice, 6)[0]
    assert both.proposed_count > 0


def test_a_text_beyond_the_models_context_gets_guesses_without_a_forward(speaking):
    backend = speaking("byte level", "pieces")
    spec = SessionSpec(reserve_length=512, rule=VerificationRule.REJECTION)
    chain, distributions = draft(backend, spec, [60] * 511, 3)
    assert chain == [60] * 3
    assert [each.probabilities for each in distributions] == [(1.0,)] * 3


def test_buffers_do_not_grow_row_by_row_where_a_text_has_more_tokens_than_was_likely(speaking):
    backend = speaking("unigram", "byte level")  # three bytes for each letter
    spec = SessionSpec(reserve_length=64)
    cache, capacities = backend.new_cache(spec), set()
    text = vocabulary_of("unigram").encode("สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัข".encode() * 4)
    for length in range(30, 64):
        draft(backend, spec, text[:length], 1, cache=cache)
        capacities.add(cache.inner.capacity)
    assert max(capacities) > 100
    assert len(capacities) < 7


def test_what_a_target_chooses_is_agreed_to_far_more_often_than_by_chance(speaking):
    backend = speaking("byte level", "pieces")
    target = load_backend(LoadOptions(model=str(speaking.folder("byte level"))))
    warm = SamplingParameters(temperature=1.0)
    prefix = prefixes("byte level")[0]
    same = 0
    for seed in range(24):
        spec = spec_for(warm, seed=seed)
        same += draft(backend, spec, prefix, 1)[0] == draft(target, spec, prefix, 1)[0]
    assert same >= 3  # by chance one of 420, with their own noise


@pytest.mark.parametrize("place", ["folder", "file", "nowhere"])
def test_the_targets_tokenizer_is_found_in_its_folder_or_beside_its_file(speaking, place):
    folder = speaking.folder("pieces")
    if place == "nowhere":
        with pytest.raises(ModelLoadError, match="no folder with a tokenizer"):
            find_target_tokens(str(folder / place))
        return
    path = folder if place == "folder" else folder / "tokenizer.json"
    found = find_target_tokens(str(path))
    assert (found.vocabulary_size, found.end_ids) == (420, (2,))


def test_a_token_id_that_would_take_all_memory_is_refused(tmp_path):
    added = {"id": 4_000_000_000, "content": "<x>", "special": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [added]}))
    with pytest.raises(ModelLoadError, match="has the token id 4000000000"):
        find_target_tokens(str(tmp_path))


def test_a_target_without_a_tokenizer_of_bytes_is_refused_before_the_model_is_read(tmp_path):
    with pytest.raises(ModelLoadError, match="--speak"):
        load_backend(LoadOptions(model=str(tmp_path / "m"), speak=str(tmp_path / "t")))


def test_rows_of_several_sequences_are_computed_in_one_forward(speaking):
    backend = speaking("pieces", "byte level")
    spec = spec_for(SAMPLINGS[0])
    several = prefixes("pieces")[:3]
    alone = [[*prefix, *draft(backend, spec, prefix, 1)[0]] for prefix in several]
    items = [
        Item(backend.new_cache(spec), spec, prefix=array("I", prefix), task=Draft(1))
        for prefix in several
    ]
    assert draft_together(backend, items) == alone


@pytest.mark.parametrize("backend", ["simulated", "vllm"])
def test_a_model_that_computes_no_rows_cannot_speak(speaking, backend):
    options = LoadOptions(backend=backend, model="m", speak=str(speaking.folder("pieces")))
    with pytest.raises(ModelLoadError, match=f"the {backend} backend cannot speak"):
        load_backend(options)


@pytest.mark.parametrize(("target", "drafter"), FEW)
def test_what_the_models_state_can_be_cut_to_is_told_in_the_targets_tokens(
    speaking, monkeypatch, target, drafter
):
    backend = speaking(target, drafter)
    spec = spec_for(SAMPLINGS[0])
    text = backend.new_cache(spec)
    prefix = max(prefixes(target), key=len)
    draft(backend, spec, prefix, 1, cache=text)
    length, own, total = len(prefix), text.inner.length, len(text.text)
    assert text.reachable(length) == length
    assert text.reachable(length + 50) == total >= length
    # Where a target's token is less than one of the model's, none of these is kept for one.
    assert text.reachable(1) == min(1, own // total)
    for reached in (0, own // 2):
        monkeypatch.setattr(text.inner, "reachable", lambda _, reached=reached: reached)
        share = reached / own
        assert text.reachable(length) == pytest.approx(share * length, abs=2)


def test_it_judges_as_its_model_does(speaking, monkeypatch):
    backend = speaking("pieces", "byte level")
    assert not backend.judges_row_by_row
    (model,) = backend.models
    monkeypatch.setattr(type(model), "judges_row_by_row", True)
    assert backend.judges_row_by_row


def test_what_forwards_cost_can_be_measured(speaking):
    # Blocks of any ids, one after another on one sequence: each is computed in one step.
    for pair in FEW:
        meter = LatencyMeter()
        measure(speaking(*pair), meter, rounds=2, interrupt=NEVER)
        assert {1, 8} <= {each.rows for each in meter.latencies().forwards}
