"""What is let in at a limit, and refused one beyond it; and what two fields say of each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ContextLengthExceededError, InvalidFieldError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_orchestrator.fleet.wire import ModelFacts
from paceline_orchestrator.front.request_validation import (
    allowed_tokens,
    check,
    check_lengths,
    check_tokens,
    seed_of,
)

MODEL = ModelFacts(
    model_name="m",
    fingerprint="f",
    tokenizer_fingerprint="t",
    vocabulary_size=50,
    eos_token_ids=frozenset({49}),
    context_length=40,
    rejection_sampling=True,
    forward_latencies=(),
    prefill_fixed_ns=0,
    prefill_ns_per_token=0,
)


def sampling(**fields):
    return {"sampling": sampling_pb2.SamplingParameters(**fields)}


WARM = sampling(temperature=0.5)


def ids(token_id):
    return pb.TokenIds(ids=[token_id])


def request(**fields):
    if "text" not in fields:
        fields.setdefault("token_ids", ids(1))
    return pb.GenerateRequest(**fields)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("text", {"text": "x"}, {"text": ""}),
        ("max_tokens", {"max_tokens": 1}, {"max_tokens": 0}),
        ("stop_strings", {"stop_strings": ["a"] * 64}, {"stop_strings": ["a"] * 65}),
        ("stop_strings", {"stop_strings": ["\u00fc" * 512]}, {"stop_strings": ["\u00fc" * 513]}),
        ("stop_strings", {"stop_strings": ["a", "b"]}, {"stop_strings": ["a", ""]}),
        ("sampling.temperature", sampling(temperature=100), sampling(temperature=100.001)),
        ("sampling.top_p", sampling(top_p=1), sampling(top_p=1.001)),
        ("sampling.top_p", sampling(top_p=1e-9), sampling(top_p=0)),
        ("sampling.min_p", sampling(min_p=1), sampling(min_p=1.001)),
        ("sampling.min_p", sampling(min_p=0), sampling(min_p=-0.001)),
        ("seed", {"seed": 2**53 - 1}, {"seed": 2**53}),
        ("lookahead", {"lookahead": 64}, {"lookahead": 65}),
        ("lookahead", {"lookahead": 1}, {"lookahead": 0}),
        ("target_count", {"target_count": 64}, {"target_count": 65}),
        ("target_count", {"target_count": 1}, {"target_count": 0}),
        ("drafter_count", {"drafter_count": 8}, {"drafter_count": 9}),
        ("drafter_count", {"drafter_count": 1}, {"drafter_count": 0}),
        ("width", {"width": 16}, {"width": 17}),
        ("width", {"width": 1}, {"width": 0}),
        ("top_logprobs", {"top_logprobs": 20}, {"top_logprobs": 21}),
        ("branches", {"width": 2, "branches": 64}, {"width": 2, "branches": 65}),
        # Two fields at once.
        ("branches", {"width": 2, "branches": 1}, {"width": 1, "branches": 1}),
        ("branches", {"width": 1, "branches": 0}, {"branches": 1}),
        ("resume_token_ids", {"resume_token_ids": [1]}, {"resume_token_ids": [1]} | WARM),
        (
            "resume_token_ids",
            {"resume_token_ids": [1], "seed": 0} | WARM,
            {"resume_token_ids": [1]} | WARM,
        ),
        ("request_id", {"request_id": "x" * 64}, {"request_id": "x" * 65}),
    ],
)  # fmt: skip
def test_a_field_has_its_limit_and_no_other(field, good, bad):
    check(request(**good))
    with pytest.raises(InvalidFieldError) as refused:
        check(request(**bad))
    assert [it.field for it in refused.value.violations] == [field]


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("token_ids.ids", {"token_ids": ids(49)}, {"token_ids": ids(50)}),
        ("resume_token_ids", {"resume_token_ids": [49]}, {"resume_token_ids": [50]}),
        ("resume_token_ids", {"resume_token_ids": [1, 49]}, {"resume_token_ids": [49, 1]}),
        (
            "resume_token_ids",
            {"resume_token_ids": [49, 1], "ignore_eos": True},
            {"resume_token_ids": [49, 49]},
        ),
        ("sampling.top_k", sampling(top_k=50), sampling(top_k=51)),
    ],
)  # fmt: skip
def test_a_field_has_the_models_limit_and_no_other(field, good, bad):
    def check_asked(**fields):
        asked = request(**fields)
        check_tokens(asked, MODEL, prompt=tuple(asked.token_ids.ids))

    check_asked(**good)
    with pytest.raises(InvalidFieldError) as refused:
        check_asked(**bad)
    assert [it.field for it in refused.value.violations] == [field]


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "allowed"),
    [(1, None, 39), (1, 39, 39), (1, 5, 5), (39, None, 1), (39, 1, 1), (30, 10, 10)],
)
def test_prompt_and_text_fill_the_context_to_its_last_token(prompt_length, max_tokens, allowed):
    asked = request(max_tokens=max_tokens)
    assert allowed_tokens(asked, MODEL, prompt_length=prompt_length) == allowed
    beyond = request(max_tokens=41 - prompt_length)
    with pytest.raises(ContextLengthExceededError, match=rf"\[1, {40 - prompt_length}\]"):
        allowed_tokens(beyond, MODEL, prompt_length=prompt_length)


def test_a_prompt_that_leaves_no_room_is_too_long():
    with pytest.raises(ContextLengthExceededError, match="must be less than 40 tokens, and is 40"):
        allowed_tokens(request(), MODEL, prompt_length=40)


def test_by_default_a_text_has_256_tokens_where_there_is_room():
    roomy = replace(MODEL, context_length=300)
    assert allowed_tokens(request(), roomy, prompt_length=43) == 256
    assert allowed_tokens(request(), roomy, prompt_length=44) == 256
    assert allowed_tokens(request(), roomy, prompt_length=45) == 255


@pytest.mark.parametrize(
    ("max_tokens", "most", "refusal", "words"),
    [
        (7, 7, InvalidFieldError, r"at most max_tokens \(7\)"),
        (None, 10, ContextLengthExceededError, "at most 10 with this prompt"),
    ],
)
def test_as_many_tokens_may_be_resumed_as_generated(max_tokens, most, refusal, words):
    asked = request(max_tokens=max_tokens, resume_token_ids=[1] * most)
    assert allowed_tokens(asked, MODEL, prompt_length=30) == most
    asked.resume_token_ids.append(1)
    with pytest.raises(refusal, match=words):
        allowed_tokens(asked, MODEL, prompt_length=30)


@pytest.mark.parametrize("field", ["token_ids.ids", "resume_token_ids"])
def test_ids_are_counted_before_anything_is_made_of_them(field):
    def asked(count):
        many = [1] * count
        if field == "resume_token_ids":
            return request(resume_token_ids=many)
        return request(token_ids=pb.TokenIds(ids=many))

    check_lengths(asked(39), MODEL)
    with pytest.raises(ContextLengthExceededError, match="less than 40 tokens, and is 40"):
        check_lengths(asked(40), MODEL)


@pytest.mark.parametrize("seed", [0, 1, 2**53 - 1])
def test_a_seed_that_is_said_is_used_zero_too(seed):
    assert seed_of(request(seed=seed)) == seed


def test_a_seed_that_is_not_said_is_another_each_time_and_within_its_limit():
    seeds = {seed_of(request()) for _ in range(50)}  # equal ones: below 2^-42
    assert len(seeds) == 50
    assert max(seeds) < 2**53
