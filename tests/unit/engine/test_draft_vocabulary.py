"""A drafter that scores some tokens drafts as the whole model does with the others filtered out."""

from __future__ import annotations

import math
from array import array

import pytest
import torch

from paceline_contract.calls import VerificationRule
from paceline_contract.max_gram import MaxGram
from paceline_contract.proposal import NOTHING
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.decisions import draft_from, rank_from
from paceline_engine.deciding.sampling import top_logprobs
from paceline_engine.deciding.shaping import Shaper
from paceline_engine.model_files.files import find_model_files
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_model_server.loading import new_host
from paceline_model_server.settings import ModelServerSettings
from support.draft_vocabularies import narrowed
from support.made_models import KINDS, make
from unit.engine.conftest import NEVER, continuation, scores_after

PROMPT = [5, 6, 7, 8, 9]
VOCABULARY_SIZE = 300
# Odd ids and even ones, neighbours and none: the noise of ids is made in pairs.
SCORED = sorted({*range(60), *range(61, 300, 5)})
SAMPLINGS = {
    "greedy": SamplingParameters(),
    "temperature 1": SamplingParameters(temperature=1.0),
    "top-k": SamplingParameters(temperature=1.2, top_k=20),
    "top-k above the scored": SamplingParameters(temperature=1.2, top_k=250),
    "top-p": SamplingParameters(temperature=0.8, top_p=0.9),
    "min-p": SamplingParameters(temperature=1.1, min_p=0.05),
    # The second token is not scored, so that no bias makes it a draft.
    "biased": SamplingParameters(logit_bias=((4, 3.0), (60, 90.0)), repetition_penalty=1.5),
    "biased, temperature 1": SamplingParameters(
        temperature=1.0, logit_bias=((60, 90.0),), presence_penalty=1.0, frequency_penalty=0.5
    ),
}
RULES = (VerificationRule.EXACT, VerificationRule.REJECTION)


def _refuse(_):
    raise ValueError("not through the interface")


WAYS = {
    "fused": {},
    "library": {"can_fuse": lambda _: False},
    "library, one text at a time": {"can_fuse": lambda _: False, "LibraryDecoder": _refuse},
    "invariant": {},
}


@pytest.fixture(scope="module")
def narrow_folder(tiny_pair, tmp_path_factory):
    made = tmp_path_factory.mktemp("narrow") / "drafter"
    return narrowed(tiny_pair.drafter, made, token_ids=SCORED)


@pytest.fixture(scope="module", params=WAYS)
def narrow(request, narrow_folder):
    with pytest.MonkeyPatch.context() as patch:
        for name, change in WAYS[request.param].items():
            patch.setattr(f"paceline_engine.torch_backend.decoders.{name}", change)
        return TransformersBackend(str(narrow_folder), invariant=request.param == "invariant")


def filtered(scores):
    """The whole model's logits, with the tokens filtered out that are not scored."""
    kept = torch.full_like(scores, -math.inf)
    kept[:, SCORED] = scores[:, SCORED]
    return kept


def shaped(scores, spec, text):
    """The logits with the biases and penalties of a request."""
    if not spec.sampling.shapes:
        return scores
    return Shaper(spec, vocabulary_size=VOCABULARY_SIZE).shape(scores, text, NOTHING)


def spec_of(sampling, rule=VerificationRule.EXACT) -> SessionSpec:
    return SessionSpec(128, SAMPLINGS[sampling], seed=7, rule=rule)


# Every two of a way, a sampling and a rule meet; all three in `make test-long`.
@pytest.mark.parametrize(
    ("narrow", "sampling", "rule"),
    [
        pytest.param(way, sampling, rule, marks=[pytest.mark.long] * ((row + column + place) % 2))
        for row, way in enumerate(WAYS)
        for column, sampling in enumerate(SAMPLINGS)
        for place, rule in enumerate(RULES)
    ],
    indirect=["narrow"],
)
def test_its_drafts_are_the_whole_models_without_the_tokens_that_are_not_scored(
    narrow, drafter, sampling, rule
):
    spec = spec_of(sampling, rule)
    text, own, whole = array("I", PROMPT), ModelText(narrow, spec), drafter.new_cache(spec)
    differs = 0
    for _ in range(20):
        scores = scores_after(drafter, whole, text)
        meant = shaped(filtered(scores), spec, text)
        expected = draft_from(meant, spec=spec, position=len(text))
        drafted = own.draft(text)
        assert drafted.token_ids == expected.token_ids
        for said, right in zip(drafted.distributions, expected.distributions, strict=True):
            assert {*said.token_ids} <= {*SCORED}
            assert said.token_ids == right.token_ids
            assert said.probabilities == pytest.approx(right.probabilities, rel=1e-3, abs=1e-6)
        of_all = draft_from(shaped(scores, spec, text), spec=spec, position=len(text))
        differs += drafted.token_ids != of_all.token_ids
        text.extend(drafted.token_ids)
    assert differs, "the whole model would have drafted a token that is not scored"


@pytest.mark.parametrize("sampling", ["greedy", "temperature 1", "top-k", "biased"])
def test_its_trees_have_the_likeliest_of_the_scored_tokens(narrow, drafter, sampling):
    spec = spec_of(sampling)
    text = array("I", PROMPT)
    scores = shaped(filtered(scores_after(drafter, drafter.new_cache(spec), text)), spec, text)
    (expected,) = rank_from(scores, spec=spec, positions=[len(text)], count=4)
    found = ModelText(narrow, spec).rank(text, width=4)
    assert [token for token, _ in found] == [token for token, _ in expected]
    # The same softmax, over the tokens that are scored.
    assert [share for _, share in found] == pytest.approx(
        [share for _, share in expected], rel=1e-3
    )


def test_log_probabilities_are_those_of_the_scored_tokens(narrow, drafter):
    spec = spec_of("greedy")
    scores = filtered(scores_after(drafter, drafter.new_cache(spec), array("I", PROMPT)))
    judged = ModelText(narrow, spec).judge(PROMPT, logprobs=True, top_logprobs=3)
    (expected,) = top_logprobs(scores, 3)
    (found,) = judged.top_logprobs
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert judged.logprobs == pytest.approx([expected[0][1]], rel=1e-4)


def test_texts_side_by_side_are_drafted_as_alone(narrow):
    specs = [spec_of("greedy"), spec_of("temperature 1"), spec_of("top-p", RULES[1])]
    alone = [ModelText(narrow, spec).draft(PROMPT) for spec in specs]
    items = [
        Item(narrow.new_cache(spec), spec, prefix=array("I", PROMPT), task=Draft())
        for spec in specs
    ]
    assert [it.drafted.token_ids for it in narrow.run(items, NEVER)] == [
        it.token_ids for it in alone
    ]


def test_a_prompt_may_have_every_token(narrow):
    unscored = sorted({*range(VOCABULARY_SIZE)} - {*SCORED})
    assert {*continuation(ModelText(narrow, spec_of("greedy")), unscored[:20], 5)} <= {*SCORED}


@pytest.mark.parametrize("sampling", ["greedy", "temperature 1"])
@pytest.mark.parametrize("is_largest_narrow", [True, False])
def test_a_stack_drafts_what_its_largest_model_drafts(
    target, drafter, narrow_folder, sampling, is_largest_narrow
):
    narrow = TransformersBackend(str(narrow_folder))
    models = (narrow, drafter) if is_largest_narrow else (target, narrow)
    stack = StackBackend(models, matrix=((1, 0, 0), (0, 3, 4), (0, 0, 4)), new_max_gram=MaxGram)
    spec = spec_of(sampling)
    expected = continuation(ModelText(models[0], spec), PROMPT, 24)
    assert ModelText(stack, spec).draft_chain(PROMPT, count=24)[:24] == expected


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_scored_token_may_follow_another_one_is_drafted(
    tiny_pair, tmp_path, rule, temperature
):
    end = 0
    folder = narrowed(tiny_pair.drafter, tmp_path / "narrow", token_ids=[end])
    backend = TransformersBackend(str(folder))
    sampling = SamplingParameters(temperature=temperature, min_tokens=2)
    spec = SessionSpec(
        128, sampling, seed=7, rule=rule, prompt_length=len(PROMPT), end_token_ids=(end,)
    )
    first, second, *rest = continuation(ModelText(backend, spec), PROMPT, 4)
    assert end not in {first, second}
    assert rest == [end, end]


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_all_shapes_are_narrowed(kind, tmp_path):
    made = make(kind, tmp_path / "whole")
    missing = made.token_ids[2]
    token_ids = [each for each in range(made.tokenizer.get_vocab_size()) if each != missing]
    folder = narrowed(made.folder, tmp_path / "narrow", token_ids=token_ids)
    backend = TransformersBackend(str(folder))
    prompt = made.tokenizer.encode(made.prompt, add_special_tokens=False).ids
    text = ModelText(backend, SessionSpec(reserve_length=64))
    assert tuple(text.draft_chain(prompt, count=2)) == made.token_ids[:2]
    assert text.draft([*prompt, *made.token_ids[:2]]).token_ids[0] != missing
    assert text.draft([*prompt, *made.token_ids[:3]]).token_ids[0] == made.token_ids[3]


def test_it_is_another_model_of_the_same_tokenizer(narrow, drafter, tiny_pair, tmp_path):
    own, whole = narrow.description, drafter.description
    assert own.vocabulary_size == whole.vocabulary_size
    assert own.tokenizer_fingerprint == whole.tokenizer_fingerprint
    assert own.fingerprint != whole.fingerprint
    other = narrowed(tiny_pair.drafter, tmp_path / "other", token_ids=SCORED[1:])
    same = narrowed(tiny_pair.drafter, tmp_path / "same", token_ids=SCORED)
    path = same / "draft_vocabulary.json"
    path.write_text(path.read_text().replace(",", " ,\n"))
    fingerprint = own.fingerprint
    assert find_model_files(str(other)).fingerprint("float32") != fingerprint
    assert find_model_files(str(same)).fingerprint("float32") == fingerprint


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]", "no JSON object"),
        ('{"token_ids": []}', "no list"),
        ('{"token_ids": "12"}', "no list"),
        ('{"token_ids": [1, 2.0]}', "no id below 300"),
        ('{"token_ids": [true, 2]}', "no id below 300"),
        ('{"token_ids": [-1, 2]}', "no id below 300"),
        ('{"token_ids": [1, 300]}', "no id below 300"),
        ('{"token_ids": [1, 3, 2]}', "do not ascend"),
        ('{"token_ids": [1, 1]}', "do not ascend"),
        ("{", "not readable as JSON"),
    ],
)
def test_a_draft_vocabulary_that_is_none_is_refused(tiny_pair, tmp_path, content, said):
    folder = narrowed(tiny_pair.drafter, tmp_path / "model", token_ids=[1])
    (folder / "draft_vocabulary.json").write_text(content)
    with pytest.raises(ModelLoadError, match=f"draft_vocabulary.json.*{said}"):
        find_model_files(str(folder))


def test_it_takes_no_adapter(narrow_folder, tmp_path):
    with pytest.raises(ModelLoadError, match="takes no --adapter"):
        TransformersBackend(str(narrow_folder), adapter=str(tmp_path))


async def test_it_serves_as_a_drafter_and_is_refused_as_a_target(narrow_folder):
    settings = ModelServerSettings(listen="127.0.0.1:0", model=str(narrow_folder))
    with pytest.raises(ModelLoadError, match="a target has to score every token"):
        await new_host(settings, role="target", on_failure=print).start()
    host = new_host(settings, role="drafter", on_failure=print)
    await host.start()
    await host.stop()
