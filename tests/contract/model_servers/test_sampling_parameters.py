"""Each model server names the sampling parameters that it applies: those, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UnsupportedError
from paceline.v1 import sampling_pb2
from paceline_contract.max_gram import MaxGram
from paceline_contract.sampling import FILTERS, SAMPLING_PARAMETERS
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.model_contract import a_host, connected
from support.model_servers import DRAFTER, TARGET
from support.speakers import make_speaker
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

PROMPT = (5, 9, 9, 17, 40, 9)
COUNT = 24
# Without the parameter, and with it; what changes nothing alone stands beside what lets it.
WARM: dict[str, Any] = {"temperature": 30.0}
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "temperature": ({}, 30.0),
    "top_k": (WARM, 1),
    "top_p": (WARM, 0.01),
    "min_p": (WARM, 1.0),
    "logit_bias": ({}, {7: 100.0}),
    "presence_penalty": ({}, 2.0),
    "frequency_penalty": ({}, 1.5),
    "repetition_penalty": ({}, 1.6),
    "min_tokens": ({"logit_bias": {0: 100.0}}, 3),
    "grammar": ({}, sampling_pb2.Grammar(choices={"texts": ["import target"]})),
}


def transformers(pair, _folder):
    return TARGET, TransformersBackend(str(pair.target))


def drafting(pair, _folder):
    return DRAFTER, TransformersBackend(str(pair.drafter))


def stack(pair, _folder):
    models = [TransformersBackend(str(each)) for each in (pair.target, pair.drafter)]
    return DRAFTER, StackBackend(
        models, matrix=((3, 0, 0), (0, 3, 0), (0, 0, 3)), new_max_gram=MaxGram
    )


def speaking(_pair, folder):
    target, drafter = (
        make_speaker(it, folder / it, seed=len(it)) for it in ("byte level", "pieces")
    )
    return DRAFTER, load_backend(LoadOptions(model=str(drafter), speak=str(target)))


BACKENDS = {
    transformers: SAMPLING_PARAMETERS,
    stack: SAMPLING_PARAMETERS,
    speaking: FILTERS,
}


async def said(client, **sampling) -> list[int]:
    """Return what a target decodes, or a drafter drafts, after the prompt."""
    given = {name: it for name, it in sampling.items() if it is not None}
    session = await client.open(
        sampling=sampling_pb2.SamplingParameters(**given),
        seed=3,
        prompt_length=len(PROMPT),
        end_token_ids=[0],
    )
    call = client.call(session, 1, new=PROMPT)
    if client.info.role == TARGET.wire:
        answers = await client.decode(call, COUNT)
        tokens = [token for each in answers for token in each.token_ids]
    else:
        answers = await client.draft(call, COUNT, chunk_tokens=COUNT)
        tokens = [token for each in answers for token in each.proposal.token_ids]
    await client.close(session)
    return tokens


@pytest.mark.parametrize("load", BACKENDS, ids=lambda it: it.__name__)
async def test_each_parameter_that_a_backend_names_changes_what_it_says(load, tiny_pair, tmp_path):
    """And a parameter that it does not name is refused by its name."""
    role, backend = load(tiny_pair, tmp_path)
    host = ModelHost(lambda: backend, limits=HostLimits(warm_up_rounds=0))
    async with connected(role, host) as client:
        assert {*client.info.sampling_parameters} == BACKENDS[load]
        for name in sorted(SAMPLING_PARAMETERS):
            beside, value = CHANGES[name]
            if name in BACKENDS[load]:
                assert await said(client, **beside) != await said(client, **{**beside, name: value})
                continue
            refused = await client.error_of(said(client, **{name: value}))
            assert isinstance(refused, UnsupportedError)
            assert f"spec.sampling.{name}: " in refused.message


@pytest.mark.parametrize("load", [drafting, stack, speaking], ids=lambda it: it.__name__)
async def test_a_drafter_tells_distributions_under_rejection_at_temperature_0_too(
    load, tiny_pair, tmp_path
):
    """So is a drafter asked that applies no temperature, by a request that has one."""
    role, backend = load(tiny_pair, tmp_path)
    host = ModelHost(lambda: backend, limits=HostLimits(warm_up_rounds=0))
    async with connected(role, host) as client:
        session = await client.open(verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION)
        (answer,) = await client.draft(client.call(session, 1, new=PROMPT), 6, chunk_tokens=6)
    told = [(*it.token_ids, *it.probabilities) for it in answer.proposal.distributions]
    assert told == [(token, 1.0) for token in answer.proposal.token_ids]
    assert len(told) == 6


async def test_a_backend_with_one_possible_token_takes_filters_and_refuses_the_rest():
    async with connected(TARGET, a_host()) as client:
        assert {*client.info.sampling_parameters} == FILTERS
        for name in sorted(SAMPLING_PARAMETERS - FILTERS):
            _, value = CHANGES[name]
            assert isinstance(
                await client.error_of(said(client, **{name: value})), UnsupportedError
            )


async def test_every_server_takes_what_it_names(target):
    for name in CHANGES.keys() & set(target.info.sampling_parameters):  # it may be a newer one
        beside, value = CHANGES[name]
        await said(target, **beside, **{name: value})


@pytest.mark.parametrize(
    ("unknown", "named"),
    [(b"\xfa\x01\x01x", "field number 31"), (b"\x52\x05\x12\x01a\x78\x01", "of one of its parts")],
    ids=["a parameter", "a part of a grammar"],
)
async def test_a_field_of_a_later_version_is_refused_and_not_left_out(target, unknown, named):
    sampling = sampling_pb2.SamplingParameters.FromString(unknown)
    refused = await target.error_of(target.open(sampling=sampling))
    assert isinstance(refused, UnsupportedError)
    assert named in refused.message
