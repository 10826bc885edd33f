"""A tokenizer comes with a model: what it does to one text costs that request, and no other."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import suppress

import grpc
import pytest

from paceline import errors
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.settings import OrchestratorSettings
from support.fake_models import FakeModelServer, serving
from support.fake_text import byte_tokenizer, continuation
from support.orchestrating import PROMPT, new_orchestrator, orchestrating, targets
from support.waiting import until


def panicking_on_long_runs():
    """Return a tokenizer whose regular expression gives up on many letters a before another."""
    content = json.loads(byte_tokenizer().to_str())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, content["pre_tokenizer"]],
    }
    return json.dumps(content).encode()


@pytest.mark.parametrize("length", [100, 1000])
async def test_a_text_that_the_tokenizer_gives_up_on_is_refused_by_name(length):
    async with orchestrating(targets=targets(1, tokenizer=panicking_on_long_runs())) as system:
        for _ in range(2):
            with pytest.raises(errors.InvalidFieldError) as refused:
                await system.generate(text="a" * length + "b")
            assert refused.value.violations[0].field == "text"
            assert "tokenizer cannot take it" in refused.value.message
        served = await system.generate()
        assert served.token_ids == continuation(PROMPT, 24)


async def test_a_damaged_tokenizer_is_fetched_once_and_requests_are_told_why(monkeypatch, caplog):
    monkeypatch.setattr(shortage, "WAIT_SECONDS", 0.5)
    (target,) = targets(1, tokenizer=b"{}")
    async with serving(target):
        settings = OrchestratorSettings(
            listen="127.0.0.1:0", health_listen="", targets=(target.address,), drain_seconds=0.05
        )
        process, _ = new_orchestrator(settings)
        beginning = asyncio.ensure_future(process.begin())
        await until(lambda: "not fetched again" in caplog.text, what="it is refused")
        async with grpc.aio.insecure_channel(process.addresses["address"]) as channel:
            request = pb.GenerateRequest(text="a", max_tokens=1)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await OrchestratorServiceStub(channel).Generate(request, timeout=30).read()
        assert "tokenizer cannot be read" in decode(refused.value).message
        beginning.cancel()
        await asyncio.wait((beginning,))
        await process.finish(drain=False)
    assert caplog.text.count("not fetched again") == 1


class WithoutItsTokenizer(FakeModelServer):
    """A target that names a tokenizer, and does not know the question for it."""

    def info(self):
        said = super().info()
        tokenizer = byte_tokenizer().to_str().encode()
        said.tokenizer_fingerprint = hashlib.sha256(tokenizer).hexdigest()
        return said


async def test_where_no_target_has_the_tokenizer_that_it_names_token_ids_are_served():
    old = WithoutItsTokenizer("target", tokenizer=None)
    async with orchestrating(targets=[old]) as system:
        assert (await system.generate()).token_ids == continuation(PROMPT, 24)
        with pytest.raises(errors.UnsupportedError, match="no tokenizer"):
            await system.generate(text="once upon a time")


async def test_a_target_without_the_tokenizer_that_it_names_does_not_speak_for_the_others():
    old = WithoutItsTokenizer("target", tokenizer=None)
    async with orchestrating(targets=[old, *targets(1)]) as system, asyncio.timeout(60):
        received = None
        while received is None:  # the other target may have come later
            with suppress(errors.UnsupportedError):
                received = await system.generate(text="once upon a time")
        assert received.token_ids == continuation(PROMPT, 24)
