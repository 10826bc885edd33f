"""SWI: what forwards make of a generation, with the costs that a person gives."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from paceline import Chunk, Completion
from paceline.responses import read_finished, read_started
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_cli.generate import GenerateSettings
from paceline_cli.model_costs import ModelCosts, improvement_told
from paceline_cli.streamed_text import statistics_line
from paceline_serving.command_line import parse

COSTS = TypeAdapter(ModelCosts)


def took(*, target_forwards=4, cancelled=0, **models):
    message = pb.GenerationStatistics(
        target_forward_count=target_forwards,
        cancelled_rpc_count=cancelled,
        drafter_models=[
            pb.ModelForwards(model_name=name, forward_count=count) for name, count in models.items()
        ],
    )
    return read_finished(pb.GenerationFinished(statistics=message))


def told(costs, **forwards):
    statistics = took(**forwards).statistics
    return improvement_told(statistics, token_count=12, costs=COSTS.validate_python(costs))


@pytest.mark.parametrize(
    ("costs", "forwards", "expected"),
    [
        ("base=0.1", {"base": 10}, "SWI 2.40"),
        ("base=0.1, small=0.05", {"base": 10, "small": 20}, "SWI 2.00"),
        (["base=0.1", "small=0.05"], {"base": 10, "small": 20}, "SWI 2.00"),
        ({"target": 2, "base": 0.2}, {"base": 10}, "SWI 2.40"),
        ("base=0", {"base": 10}, "SWI 3.00"),
        ("base=0.1,small=0.05", {}, "SWI 3.00"),
        ("", {"base": 10}, ""),
    ],
)
def test_forwards_count_at_their_costs(costs, forwards, expected):
    assert told(costs, **forwards) == expected


def test_the_flag_can_be_given_again():
    options = ["--model-costs=base=0.1,tiny=0", "--model-costs=small=0.05"]
    settings = parse(GenerateSettings, options, program="test", environment={})
    assert settings.model_costs == {"base": 0.1, "tiny": 0, "small": 0.05}


def test_plain_decoding_has_one():
    assert told("base=0.1", target_forwards=12) == "SWI 1.00"


def test_where_forwards_or_costs_are_not_known_nothing_is_claimed():
    said = told("base=0.1", base=10, small=3, tiny=1)
    assert said == "SWI unknown: --model-costs has no cost for small, tiny"
    said = told("base=0.1", base=10, cancelled=2)
    assert said == "SWI unknown: 2 calls withdrawn, and the forwards in them are not counted"
    assert told("base=0.1", target_forwards=0) == ""


@pytest.mark.parametrize("words", ["base", "=0.1", "base=-1", "base=nan", "base=inf", "target=0"])
def test_other_costs_are_refused(words):
    with pytest.raises(ValidationError, match=rf"'{words}' is not MODEL=COST|costs something"):
        COSTS.validate_python(words)


def test_the_last_line_has_it_where_costs_are_given_and_for_the_tokens_of_this_part():
    token_ids = tuple(range(12))
    chunk = Chunk(position=0, token_ids=token_ids, text="", logprobs=(), origins=())
    started = read_started(pb.GenerationStarted())
    completion = Completion(
        started=started, chunks=(chunk,), finished=took(base=10), resumed_token_count=4
    )
    assert " · SWI 1.60 · seed" in statistics_line(completion, costs={"base": 0.1})
    assert "SWI" not in statistics_line(completion)
