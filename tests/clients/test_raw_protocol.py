"""The protos alone are enough: Ruby with freshly generated stubs, and none of our client code."""

from __future__ import annotations

import json
import subprocess

import pytest

from support.conformance.drivers import ROOT
from support.conformance.stage import LiveStage
from support.conformance.toolchains import needs_toolchain
from support.streams import PROMPT

PROGRAM = ROOT / "clients/ruby/examples/protocol.rb"


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    """Stubs that were not there before."""
    needs_toolchain("ruby")
    folder, protos = tmp_path_factory.mktemp("stubs"), ROOT / "protos"
    command = ["grpc_tools_ruby_protoc", f"-I{protos}", f"--ruby_out={folder}"]
    sources = sorted(protos.glob("paceline/v1/*.proto"))
    subprocess.run([*command, f"--grpc_out={folder}", *sources], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def told(stubs, words_system):
    """What the Ruby program saw, and how its calls ended."""
    stage = LiveStage(words_system)
    command = ["ruby", "-I", stubs, PROGRAM, stage.address, PROMPT]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120)
    return {**json.loads(done.stdout), **stage.saw()}


@pytest.fixture(scope="module")
def expected(words_system):
    with words_system.client() as client:
        return client.generate(PROMPT, max_tokens=48).collect()


def test_a_stream_is_the_models_own_text(told, expected):
    assert told["text"] == expected.text
    assert tuple(told["token_ids"]) == expected.token_ids
    assert told["finish_reason"] == "FINISH_REASON_LENGTH"


def test_the_statistics_can_be_read(told):
    statistics = told["statistics"]
    assert statistics["target_forward_count"] > 0
    assert 0 < statistics["time_to_first_token_ns"] <= statistics["total_ns"]


def test_a_stream_that_was_left_goes_on_without_gap_or_duplicate(told, expected):
    assert 0 < told["resumed"]["left_after"] < len(expected.token_ids)
    assert told["resumed"]["text"] == expected.text
    assert tuple(told["resumed"]["token_ids"]) == expected.token_ids


def test_an_errors_details_can_be_decoded(told):
    info, bad_request = told["refused"]["details"]
    assert told["refused"]["code"] == 3  # INVALID_ARGUMENT
    assert (info["reason"], info["domain"]) == ("INVALID_FIELD", "paceline")
    assert info["metadata"]["request_id"]
    assert [violation["field"] for violation in bad_request["field_violations"]] == ["max_tokens"]


def test_what_was_cancelled_was_freed(told):
    ends = told["ends"]  # the stream that was left may have been over already
    assert ends["CANCELLED"] in {1, 2}
    assert ends["OK"] + ends["CANCELLED"] == 4
    assert (ends["DEADLINE_EXCEEDED"], ends["INVALID_ARGUMENT"]) == (0, 1)


def test_nothing_but_generated_stubs_is_used():
    required = [line for line in PROGRAM.read_text().splitlines() if line.startswith("require")]
    names = {line.split('"')[1].partition("/")[0] for line in required}
    assert names == {"json", "google", "paceline"}
    assert not list((ROOT / "clients/ruby").glob("lib/*"))
