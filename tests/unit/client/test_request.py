import math
from typing import get_args

import pytest

from paceline import DispatchPolicy, DrafterKind, Strategy, VerificationRule, errors
from paceline.prompts import FillIn, PromptPart
from paceline.request import DispatchName, DrafterName, RuleName, StrategyName, build_request
from paceline.v1 import orchestrator_service_pb2 as pb


def test_what_is_left_out_is_left_to_the_server():
    assert build_request("def f", {}) == pb.GenerateRequest(text="def f")


def test_options_are_said_in_the_wires_words():
    request = build_request(
        [1, 2],
        {
            "max_tokens": 8,
            "stop": "\n\n",
            "temperature": 0.0,
            "seed": 0,
            "strategy": "distributed",
            "targets": 2,
            "rule": VerificationRule.REJECTION,
            "dispatch": "blocks",
            "add_special_tokens": False,
        },
    )
    assert list(request.token_ids.ids) == [1, 2]
    assert request.HasField("seed")
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("top_p")
    assert list(request.stop_strings) == ["\n\n"]
    assert request.strategy == pb.STRATEGY_DISTRIBUTED
    assert request.target_count == 2
    assert request.verification_rule == 2
    assert request.dispatch_policy == pb.DISPATCH_POLICY_BLOCKS
    assert request.HasField("add_special_tokens")


def test_every_field_of_the_wire_can_be_asked_for():
    every = {
        "max_tokens": 1,
        "stop": ["a"],
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 0.5,
        "min_p": 0.5,
        "seed": 1,
        "strategy": Strategy.AUTO,
        "lookahead": 1,
        "targets": 1,
        "drafters": 1,
        "width": 2,
        "branches": 1,
        "drafter": "max_gram",
        "rule": "exact",
        "dispatch": "work_conserving",
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "prompt_logprobs": 2,
        "include_token_bytes": True,
        "include_prompt": True,
        "predicted_text": "p",
        "lora": "a",
        "add_special_tokens": True,
        "parse_special_tokens": True,
        "include_timeline": True,
        "stream_timeline": True,
        "request_id": "r",
        "resume_token_ids": [1],
    }
    request = build_request("x", every)
    unset = set(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {
        f.name for f, _ in request.ListFields()
    }
    assert unset == {"token_ids", "parts", "fill_in"}
    assert len(request.sampling.ListFields()) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("seed", -1),
        ("top_k", 2**40),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("strategy", "fastest"),
        ("strategy", "unknown"),
        ("stop", [1]),
    ],
)
def test_a_value_that_cannot_be_sent_names_its_field(name, value):
    with pytest.raises(errors.InvalidFieldError, match=name):
        build_request("x", {name: value})


def test_a_prompt_can_be_parts_of_a_text_or_two_texts_with_a_gap():
    parts = [PromptPart("<s>", parse_special_tokens=True), PromptPart("</s>")]
    expected = [pb.PromptPart(text="<s>", parse_special_tokens=True), pb.PromptPart(text="</s>")]
    assert build_request(parts, {}) == pb.GenerateRequest(parts=pb.PromptParts(parts=expected))
    gap = pb.FillIn(prefix="a", suffix="")
    assert build_request(FillIn("a", ""), {}) == pb.GenerateRequest(fill_in=gap)
    assert build_request(FillIn("", ""), {}).HasField("fill_in")


@pytest.mark.parametrize(
    "prompt",
    [b"def f", None, 7, [-1], ["a"], "\ud800", [PromptPart("a"), 1], [1, PromptPart("a")],
     [PromptPart(1)], FillIn("a", None), FillIn("\ud800", "")],
)  # fmt: skip
def test_a_prompt_is_one_of_its_kinds(prompt):
    with pytest.raises(errors.InvalidFieldError):
        build_request(prompt, {})


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="max_token"):
        build_request("x", {"max_token": 1})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (StrategyName, Strategy),
        (DrafterName, DrafterKind),
        (RuleName, VerificationRule),
        (DispatchName, DispatchPolicy),
    ],
)
def test_the_names_that_types_know_are_the_enums_words(names, words):
    assert set(get_args(names)) == set(words.accepted())


@pytest.mark.parametrize(
    ("option", "short", "member"),
    [
        ("strategy", "non-si", Strategy.AUTOREGRESSIVE),
        ("strategy", "si", Strategy.SPECULATIVE),
        ("strategy", "dsi", Strategy.DISTRIBUTED),
        ("strategy", "self", Strategy.SELF_SPECULATIVE),
        ("strategy", "self-si", Strategy.SELF_SPECULATIVE),
        ("drafter", "max-gram", DrafterKind.MAX_GRAM),
        ("drafter", "both", DrafterKind.SERVER_AND_MAX_GRAM),
    ],
)
def test_the_command_lines_short_words_mean_what_the_long_ones_do(option, short, member):
    assert build_request("x", {option: short}) == build_request("x", {option: member.value})
    assert type(member)(short) is member


def test_a_word_that_is_none_is_told_both_forms_of_the_others():
    with pytest.raises(errors.InvalidFieldError) as caught:
        build_request("x", {"strategy": "SI"})
    assert caught.value.message == (
        "strategy: must be one of auto, autoregressive (non-si), speculative (si),"
        " distributed (dsi), self_speculative (self), not 'SI'"
    )
