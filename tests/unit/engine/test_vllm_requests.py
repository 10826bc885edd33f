"""What can be said of vLLM's outputs, and of its options, without vLLM; the rest: tests/on_vllm."""

from __future__ import annotations

import math
import threading
from array import array
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from paceline.errors import InternalError
from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Decode, Item, Judge
from paceline_engine.vllm_backend.backend import PrefixText, VllmBackend
from paceline_engine.vllm_backend.options import (
    node_rank,
    parse_options,
    set_environment,
    told_dtype,
)
from paceline_engine.vllm_backend.requests import GivenTokens, Stream
from paceline_engine.vllm_backend.row_tasks import model_of_row_task, read_row_task, row_task
from paceline_model_server.settings import ModelServerSettings

NAN = math.nan
SURE = ({5: -0.1, 7: -3.0}, {6: -0.2, 9: -2.0})
LAST = {8: -0.3}


def output(*, prompt_rows=(), last=LAST, cached=3, token=8):
    told = [
        {key: SimpleNamespace(logprob=value) for key, value in row.items()} for row in prompt_rows
    ]
    row = {key: SimpleNamespace(logprob=value) for key, value in last.items()}
    completion = SimpleNamespace(token_ids=[token], logprobs=[row])
    return SimpleNamespace(
        prompt_logprobs=[None] * 4 + told,
        outputs=[completion],
        num_cached_tokens=cached,
        finished=True,
    )


def given(proposal=(5, 6)):
    cache, spec = PrefixText("salt"), SessionSpec(99)
    item = Item(cache, spec, prefix=array("I", [1, 2, 3, 4]), task=Judge(Proposal(proposal)))
    return GivenTokens(item, vocabulary_size=50)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (output(prompt_rows=SURE), (2, 8)),
        (output(prompt_rows=(SURE[0], {6: -3.0, 9: -2.0})), (1, 9)),
        # Rows of cached tokens are uninitialised: row 4 follows token 3, which has to be computed.
        (output(prompt_rows=SURE, cached=4), None),
        # Two logits may have become one number.
        (output(prompt_rows=(SURE[0], {6: -0.2, 9: -0.20001})), None),
        # A head may be wider than the vocabulary; without a second token nothing is sure.
        (output(prompt_rows=({50: -0.1, 5: -0.3, 7: -3.0}, SURE[1])), (2, 8)),
        (output(prompt_rows=({50: -0.1, 5: -0.3}, SURE[1])), None),
        (output(prompt_rows=SURE[:1]), None),
        # Memory of other rows: it does not name the token that was given.
        (output(prompt_rows=({3: -0.1, 4: -0.3}, SURE[1])), None),
        (output(prompt_rows=({5: NAN, 7: NAN}, SURE[1])), InternalError),
        (output(prompt_rows=SURE, last={8: NAN}), InternalError),
    ],
)
def test_prompt_log_probabilities_decide_only_with_a_certificate(told, expected):
    work = given()
    assert not work.is_ready
    work.take(0, told)
    assert work.is_ready
    if expected is InternalError:
        with pytest.raises(InternalError, match="not finite"):
            work.answer()
        return
    judged = work.answer()
    assert (judged and (len(judged.accepted_path), judged.next_token)) == expected


def test_a_token_that_no_number_decided_is_an_error_of_its_call_alone():
    item = Item(PrefixText("a"), SessionSpec(9), prefix=array("I", [1]), task=Decode(3))
    work = Stream(item)
    work.take(0, output(last={8: NAN}))
    with pytest.raises(InternalError, match="not finite"):
        work.answer()


class FakeEngine:
    """Answers each request in the next step, as it is told."""

    cache_tokens, block_size, step_tokens = 9999, 16, 512
    fingerprint = "a"

    def __init__(self, answers):
        self.requests, self._answers, self._names = [], answers, []

    def add(self, name, request, **_):
        self._names.append(name)
        self.requests.append(request)

    def abort(self, names):
        raise AssertionError(names)

    def step(self):
        names, self._names = self._names, []
        for answer, name in zip(self._answers, names, strict=False):
            answer.request_id = name
        return self._answers


def backend_over(engine):
    description = SimpleNamespace(vocabulary_size=50)
    return VllmBackend(engine, description, tokenizer=b"", chat_template=None)


def test_a_request_that_vllm_ends_without_a_token_is_an_error_of_its_call():
    """It would be waited for without an end."""
    ended = output(cached=0)
    ended.outputs = [SimpleNamespace(token_ids=[], logprobs=[])]
    backend = backend_over(FakeEngine([ended]))
    spec = SessionSpec(99)
    item = Item(backend.new_cache(spec), spec, prefix=array("I", [1, 2]), task=Decode(3))
    (error,) = backend.run([item], threading.Event())
    assert isinstance(error, InternalError)


@pytest.mark.parametrize(("length", "count"), [(500, 1), (600, 4)])
def test_a_proposal_after_a_prompt_that_is_not_computed_yet_has_no_scores_of_all_its_rows(
    length, count
):
    engine = FakeEngine([])
    backend, spec = backend_over(engine), SessionSpec(999)
    task = Judge(Proposal((5, 6, 7)))
    item = Item(backend.new_cache(spec), spec, prefix=array("I", range(1, length)), task=task)
    backend.run([item], threading.Event())
    assert len(engine.requests) == count
    assert all(("prompt_logprobs" in it.settings) == (count == 1) for it in engine.requests)


def test_a_row_task_is_plain_data_that_says_the_whole_rule():
    sampling = SamplingParameters(0.5, top_k=3, logit_bias=((4, -1.5), (9, 2.0)), min_tokens=2)
    spec = SessionSpec(1, sampling, seed=2**53 - 1, prompt_length=7, end_token_ids=(0, 2))
    told = row_task(spec, fingerprint="a")
    assert read_row_task(told) == spec
    assert model_of_row_task(told) == "a"
    assert read_row_task(None) is None
    assert read_row_task({"another": 1}) is None


def test_engine_options_are_keys_and_values():
    told = ["tensor-parallel-size=4", "quantization=fp8", 'hf_overrides={"a": [1, 2]}', "x=True"]
    assert parse_options(told) == {
        "tensor_parallel_size": 4,
        "quantization": "fp8",
        "hf_overrides": {"a": [1, 2]},
        "x": True,
    }


def test_the_dtype_says_which_options_change_the_numbers_and_differs_where_they_do():
    def told(*options):
        return told_dtype("bfloat16", parse_options(options))

    assert told() == told("tensor_parallel_size=4") == "bfloat16"
    assert told("quantization=fp8", "max_model_len=9") == 'bfloat16 with quantization="fp8"'
    both = 'bfloat16 with kv_cache_dtype="fp8", quantization="awq"'
    assert told("quantization=awq", "kv_cache_dtype=fp8") == both
    long = [told(f'hf_overrides={{"key": "{"é" * 99}{last}"}}') for last in "ab"]
    assert long[0] != long[1]
    assert [len(it.encode()) for it in long] == [64, 64]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("quantization", "KEY=VALUE"),
        ("=4", "KEY=VALUE"),
        ("a b=4", "KEY=VALUE"),
        ("dtype=half", "use --dtype"),
        ("enforce-eager=true", "use --no-capture"),
        ("trust_remote_code=true", "cannot be chosen"),
        ("load_format=pt", "cannot be chosen"),
        ("async-scheduling=true", "cannot be chosen"),
    ],
)
def test_an_engine_option_that_cannot_be_given_is_refused_by_name(option, said):
    with pytest.raises(ModelLoadError, match=said):
        parse_options([option])


OVER_TWO = ("nnodes=2", "master_addr=a")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("nnodes=0",), "nnodes=0 is not a whole number of 1 or more"),
        (("nnodes=two",), "nnodes=two is not"),
        (("node_rank=-1",), "node_rank=-1 is not a whole number of 0 or more"),
        (("tensor_parallel_size=2.0",), "tensor_parallel_size=2.0 is not"),
        (("pipeline-parallel-size=true",), "pipeline_parallel_size=True is not"),
        (("node_rank=1",), "node_rank=1 is not below nnodes=1"),
        ((*OVER_TWO, "tensor_parallel_size=4", "node_rank=2"), "not below nnodes=2"),
        ((*OVER_TWO, "tensor_parallel_size=3"), "is 3, which nnodes=2 does not divide"),
        (("nnodes=2", "tensor_parallel_size=2"), "needs master_addr"),
    ],
)
def test_nodes_that_do_not_fit_the_parts_of_a_model_are_refused_before_it_is_read(options, said):
    with pytest.raises(ModelLoadError, match=said):
        node_rank(parse_options(options))
    with pytest.raises(ValidationError, match=said):
        ModelServerSettings(backend="vllm", model="a", engine_option=options)


def test_a_node_beyond_the_first_has_a_part_and_serves_nothing():
    parts = (*OVER_TWO, "tensor_parallel_size=2", "pipeline_parallel_size=3")
    ranks = [
        ModelServerSettings(backend="vllm", model="a", engine_option=(*parts, *more)).is_node_part
        for more in ((), ("node_rank=0",), ("node_rank=1",))
    ]
    assert ranks == [False, False, True]
    options = (*parts, "node_rank=1")
    with pytest.raises(ModelLoadError, match="only the node with node_rank=0 serves"):
        load_backend(LoadOptions(backend="vllm", model="a", engine_options=options))


def test_without_vllm_the_option_says_what_installs_it():
    with pytest.raises(ModelLoadError, match="make install-vllm"):
        load_backend(LoadOptions(backend="vllm", model="no such model"))


def test_the_operators_variables_stay_and_invariance_is_asked_for():
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    set_environment(environment, invariant=True)
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["VLLM_BATCH_INVARIANT"] == "1"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "vllm"}, "--model is needed"),
        ({"backend": "vllm", "model": "m", "device": "cuda"}, "CUDA_VISIBLE_DEVICES"),
        ({"backend": "vllm", "model": "m", "weights": "int8"}, "--weights needs"),
        ({"backend": "vllm", "model": "m", "adapter": "a"}, "--adapter needs"),
        ({"model": "m", "engine_option": ("a=1",)}, "--engine-option needs --backend vllm"),
    ],
)
def test_settings_that_vllm_cannot_follow_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ModelServerSettings(**settings)
