"""What a stack says of itself follows from what its models say, field by field."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from paceline_contract.calls import VerificationRule
from paceline_contract.max_gram import MaxGram
from paceline_engine.deciding.cascade import Draw, ReviewTask
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.stack_backend.stack_numbers import MeasuredStack
from paceline_engine.terms.backend import TokenMemory
from paceline_engine.terms.calls import ModelDescription, SamplingDefaults

EXACT, REJECTION = VerificationRule.EXACT, VerificationRule.REJECTION
LARGE = ModelDescription(
    name="large",
    revision="r1",
    fingerprint="f1",
    tokenizer_fingerprint="t",
    vocabulary_size=50,
    eos_token_ids=(3,),
    context_length=100,
    backend="b1",
    dtype="d1",
    device="cpu",
    layer_count=8,
    cancels_between_layers=True,
    shares_forwards=True,
    takes_trees=True,
    is_invariant=True,
    verification_rules=(EXACT, REJECTION),
)
SMALL = replace(LARGE, name="small", revision="r2", fingerprint="f2", layer_count=2)
# What the whole says, where only this field differs; what is left out is the largest model's.
WHOLE = {
    "name": ("large", "small", "large"),
    "revision": ("r1", "r2", "r1"),
    "eos_token_ids": ((3,), (4,), (3,)),
    "context_length": (100, 70, 100),
    "backend": ("b1", "b2", "b1"),
    "dtype": ("d1", "d2", "d1"),
    "device": ("cuda", "cpu", "cuda"),
    "layer_count": (8, 2, 8),
    "cancels_between_layers": (True, False, False),
    "shares_forwards": (True, False, False),
    "takes_trees": (True, True, False),
    "is_invariant": (True, False, False),
    "verification_rules": ((EXACT, REJECTION), (EXACT,), (EXACT,)),
    "hardware": (None, "h2", None),
    "fim_token_ids": ((1, 2, 3), (), (1, 2, 3)),
    "scores_every_token": (True, False, False),
    "samples_by": (frozenset("ab"), frozenset("bc"), frozenset("b")),
    "grammar_engine": ("e1", "e2", ""),
    "scores_prompts": (True, False, False),
    "configuration": ('{"a":1}', '{"a":2}', '{"a":1}'),
    "sampling_defaults": (SamplingDefaults(0.5), SamplingDefaults(), SamplingDefaults(0.5)),
}
# These are no model's alone (test_stack.py), or are the same in all.
OTHERS = {"fingerprint", "stage_names", "tokenizer_fingerprint", "vocabulary_size"}
OF_TARGETS = {"self_draft_depth", "self_draft_kind"}
# Stacks take none.
NEVER = {"lora_fingerprints"}


def stack(large=LARGE, small=SMALL, *, memories=(None, None), max_gram=None):
    models = [
        SimpleNamespace(
            description=each,
            tokenizer=b"",
            layers_run=layers,
            token_memory=lambda it=memory: it,
        )
        for each, memory, layers in zip((large, small), memories, (30, 4), strict=True)
    ]
    size = 3 if max_gram else 2
    matrix = tuple(tuple(int(column >= row) for column in range(size)) for row in range(size))
    return StackBackend(models, matrix=matrix, new_max_gram=max_gram)


def test_every_field_is_spoken_for():
    named = {it.name for it in fields(ModelDescription)}
    assert named == WHOLE.keys() | OTHERS | OF_TARGETS | NEVER


@pytest.mark.parametrize("name", WHOLE)
def test_a_field_of_the_whole_follows_from_those_of_the_models(name):
    of_large, of_small, expected = WHOLE[name]
    both = replace(LARGE, **{name: of_large}), replace(SMALL, **{name: of_small})
    assert getattr(stack(*both).description, name) == expected
    largest_only = {"layer_count", "takes_trees", "context_length"}
    if isinstance(of_large, bool | int) and name not in largest_only:
        other_way = replace(LARGE, **{name: of_small}), replace(SMALL, **{name: of_large})
        assert getattr(stack(*other_way).description, name) == expected


@pytest.mark.parametrize(
    "describe",
    [
        lambda: replace(LARGE, samples_by=frozenset()),
        lambda: replace(LARGE, samples_by=frozenset({"grammar"})),
        lambda: stack(*(replace(LARGE, samples_by=frozenset(it)) for it in ("ab", "cd"))),
    ],
    ids=["none", "grammars without an engine", "a stack of models that share none"],
)
def test_a_model_applies_a_sampling_parameter(describe):
    """It could not say that it applies none: an empty list says that the server is old."""
    with pytest.raises(AssertionError, match="large: applies no sampling parameter"):
        describe()


def test_it_names_its_models_largest_first_and_counts_the_layers_of_all():
    assert stack().description.stage_names == ("large", "small")
    assert stack().layers_run == 34


@pytest.mark.parametrize(
    ("frees", "device", "max_gram", "free", "per_token"),
    [
        ((1000, 800), "cpu", None, 800, 12),
        ((700, 800), "cuda", None, 700, 12),
        ((700, 800), "cuda", MaxGram, 700, 12),
        ((700, 700), "cpu", MaxGram, 700, None),
    ],
)
def test_a_token_lies_in_all_models_and_free_memory_is_there_once(
    frees, device, max_gram, free, per_token
):
    memories = [
        TokenMemory(free_bytes=each, usable_share=0.5, bytes_per_token=size, kept_share=0.25)
        for each, size in zip(frees, (7, 5), strict=True)
    ]
    large = replace(LARGE, device=device)
    memory = stack(large, memories=memories, max_gram=max_gram).token_memory()
    assert (memory.free_bytes, memory.usable_share, memory.kept_share) == (free, 0.5, 0.25)
    if per_token is not None:
        assert memory.bytes_per_token == per_token
    else:
        assert memory.bytes_per_token > 12, "Max-Gram's index lies beside a model on a CPU"


def test_a_model_that_does_not_know_its_memory_leaves_that_to_the_others():
    known = TokenMemory(free_bytes=9, usable_share=0.5, bytes_per_token=5, kept_share=0.25)
    assert stack(memories=(None, known)).token_memory() == known
    assert stack().token_memory() is None


# --- what it learns -------------------------------------------------------------------------------


def numbers():
    return MeasuredStack([None, None], has_max_gram=True)


def reviewed(draw_stages, *, by=0):
    return ReviewTask(EXACT, draws=tuple(Draw(9, stage=it) for it in draw_stages), stage=by)


@pytest.mark.parametrize(
    ("draw_stages", "accepted", "verdicts"),
    [
        ((1, 1, 1, 1), 1, [(2, 1), (0, 0)]),  # what follows the first rejected one was not judged
        ((1, 1, 1, 1), 0, [(1, 0), (0, 0)]),
        ((1, 1, 1, 1), 4, [(4, 4), (0, 0)]),
        ((1, 1, 2, 2), 2, [(2, 2), (1, 0)]),
        ((1, 2, 2, 2), 3, [(1, 1), (3, 2)]),
    ],
)
def test_a_review_teaches_what_it_judged_of_each_stage(draw_stages, accepted, verdicts):
    learnt = numbers()
    learnt.judge(reviewed(draw_stages), accepted_count=accepted)
    largest, smaller, text = learnt.measures(["large", "small", "text"])
    assert list(largest.verdicts) == verdicts
    assert (smaller.verdicts, text.verdicts) == (((0, 0),), ())


def test_an_acceptance_is_what_was_judged_beside_twenty_tokens_that_are_assumed():
    learnt = numbers()
    assert [learnt.acceptance(0, 1), learnt.acceptance(0, 2)] == [0.6, 0.3]
    learnt.judge(reviewed((1, 1, 1, 2)), accepted_count=3)
    learnt.judge(reviewed((2,), by=1), accepted_count=1)
    assert learnt.acceptance(0, 1) == (3 + 12) / (3 + 20)
    assert learnt.acceptance(0, 2) == (0 + 6) / (1 + 20)
    assert learnt.acceptance(1, 2) == (1 + 6) / (1 + 20)


def test_old_verdicts_count_half_once_there_are_many():
    learnt = numbers()
    for _ in range(2000):
        learnt.judge(reviewed((1,)), accepted_count=1)
    assert learnt.measures("abc")[0].verdicts[0] == (2000, 2000)
    learnt.judge(reviewed((1,)), accepted_count=0)
    assert learnt.measures("abc")[0].verdicts[0] == (1000, 1000)
    assert learnt.acceptance(0, 1) == (1000 + 12) / (1000.5 + 20)
