"""What has to be said in several places is said in all of them: what a change is likely to forget.

docs/extending.md has the places, change by change.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry, Histogram

from paceline import DrafterKind, GenerateOptions, Strategy, VerificationRule
from paceline.v1 import orchestrator_service_pb2 as orchestrator_pb
from paceline.v1 import sampling_pb2
from paceline_cli import generate
from paceline_contract import limits
from paceline_contract.sampling import NEUTRAL_VALUES, SamplingParameters
from paceline_engine.loading import BACKENDS
from paceline_engine.terms import validation
from paceline_gateway.metrics import GatewayMetrics
from paceline_model_server.records import CallRecorder, HostCollector
from paceline_model_server.settings import ModelServerSettings
from paceline_orchestrator.decoding.metrics import RequestMetrics
from paceline_orchestrator.planning import measurements
from paceline_protocol import ranks, task
from paceline_serving.server_settings import ProcessSettings
from paceline_serving.telemetry import RpcMetrics
from support.conformance.cases import all_cases
from support.model_contract import a_host

ROOT = Path(__file__).parents[2]


def test_limits_of_packages_that_do_not_see_each_other_are_the_same():
    assert ranks.MOST_WIDTH == limits.MOST_WIDTH
    assert task.DRAFTED_LIMIT == validation.MOST_DRAFTED
    assert task.SPECULATION_LIMIT <= validation.MOST_TOKENS
    assert limits.MOST_LOOKAHEAD <= validation.MOST_TREE_DEPTH
    assert measurements.MOST_TREE_TOKENS <= validation.MOST_TREE_TOKENS


def test_every_backend_can_be_chosen_and_is_named_on_the_wire():
    assert set(get_args(ModelServerSettings.model_fields["backend"].annotation)) == set(BACKENDS)
    proto = (ROOT / "protos/paceline/v1/model_service.proto").read_text()
    (comment,) = re.findall(r"// The backend that computes: (.*)\.\n", proto)
    assert set(re.findall(r'"(\w+)"', comment)) == set(BACKENDS)


def test_the_parameters_and_their_neutral_values_are_those_of_the_proto():
    wire = sampling_pb2.SamplingParameters.DESCRIPTOR.fields
    assert [it.name for it in fields(SamplingParameters)] == [it.name for it in wire]
    text = (ROOT / "protos/paceline/v1/sampling.proto").read_text()
    message = text.partition("message SamplingParameters {")[2].partition("\n}")[0]
    told = re.findall(r"Default (\S+)\.\n[^;]*? (\w+) = \d+;", message)
    assert {name: float(value) for value, name in told} == {
        name: value for name, value in NEUTRAL_VALUES.items() if isinstance(value, int | float)
    }


def test_the_case_of_every_option_which_all_languages_play_has_every_option():
    """So a field that is added fails here until each client can be asked for it."""
    (case,) = (it for it in all_cases() if it.name == "every option reaches the wire")
    (step,), (seen,) = case.steps, case.servers_saw["requests"]
    options, request = step["request"]["options"], seen["$exactly"]
    assert options.keys() == GenerateOptions.__annotations__.keys() - {"resume_token_ids"}
    on_the_wire = set(orchestrator_pb.GenerateRequest.DESCRIPTOR.fields_by_name)
    prompts = orchestrator_pb.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"].fields
    others = {it.name for it in prompts} - {"text"}
    assert request.keys() == on_the_wire - others - {"resume_token_ids"}
    sampling = set(sampling_pb2.SamplingParameters.DESCRIPTOR.fields_by_name)
    assert request["sampling"].keys() == sampling


@pytest.mark.parametrize(
    "source",
    [
        "clients/python/paceline/generation.py",
        "clients/typescript/src/generation.ts",
        "clients/go/generation.go",
        "clients/cpp/include/paceline/words.hpp",
    ],
)
def test_every_word_that_a_request_can_say_stands_in_each_client(source):
    wire = orchestrator_pb.GenerateRequest.DESCRIPTOR
    enums = [field.enum_type for field in wire.fields if field.enum_type is not None]
    known = set(re.findall(r'"([a-z_]+)"', (ROOT / source).read_text()))
    assert len(enums) > 3
    for enum in enums:
        unspecified, *names = enum.values_by_name
        prefix = unspecified.removesuffix("UNSPECIFIED")
        assert {name.removeprefix(prefix).lower() for name in names} <= known


@pytest.mark.parametrize("words", [Strategy, DrafterKind, VerificationRule])
def test_every_word_that_the_gateway_takes_stands_on_its_page(words):
    page = set(re.findall(r"[a-z_]+", (ROOT / "docs/http.md").read_text()))
    assert {it.value for it in words} - {"unknown"} <= page


def test_what_generate_has_a_flag_for_reaches_the_request():
    shared = generate.GenerateSettings.model_fields.keys() & GenerateOptions.__annotations__.keys()
    said = dict.fromkeys(shared, 1) | {"strategy": "si", "drafter": "both"}
    assert generate._options(generate.GenerateSettings.model_construct(**said)).keys() >= shared


def of_requests(registry):
    RequestMetrics(registry)


def of_a_model(registry):
    CallRecorder(registry, role="target")
    registry.register(HostCollector(a_host(), role="target"))


@pytest.mark.parametrize(
    ("who", "register"), [("orchestrator", of_requests), ("model server", of_a_model)]
)
def test_every_metric_has_a_row_in_the_table_that_operators_read(who, register):
    """tests/e2e/test_metrics.py asks real servers, for the other direction and for labels, too."""
    registry = CollectorRegistry()
    register(registry)
    table = (ROOT / "docs/operations.md").read_text()
    listed = set(re.findall(rf"^\| {who} \| `(\w+)", table, re.MULTILINE))
    shown = {f"{it.name}_total" if it.type == "counter" else it.name for it in registry.collect()}
    assert shown <= listed


@pytest.mark.parametrize("register", [of_requests, of_a_model, RpcMetrics, GatewayMetrics])
def test_histograms_of_times_reach_beyond_the_longest_call(register, monkeypatch):
    longest_seconds = ProcessSettings().call_limit_seconds
    limits_of = {}
    make = Histogram.__init__

    def noted(self, name, *arguments, **more):
        limits_of[name] = more["buckets"]
        make(self, name, *arguments, **more)

    monkeypatch.setattr(Histogram, "__init__", noted)
    register(CollectorRegistry())
    times = {name: buckets for name, buckets in limits_of.items() if "_seconds" in name}
    assert {name for name, buckets in times.items() if max(buckets) <= longest_seconds} == set()
    assert times
