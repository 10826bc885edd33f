"""Who is there: what GetSystemInfo tells, and a request that waits for the first target."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from paceline import AsyncClient, Client
from paceline.errors import UnsupportedError
from paceline.v1 import model_service_pb2 as model_pb
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub
from paceline_orchestrator.settings import OrchestratorSettings
from support.fake_models import serving
from support.fake_text import VOCABULARY_SIZE, continuation
from support.orchestrating import PROMPT, a_drafter, new_orchestrator, orchestrating, targets
from support.waiting import until as soon

TARGET_ROLE = model_pb.MODEL_ROLE_TARGET


async def test_system_info_tells_who_is_there():
    async with orchestrating(drafters=[a_drafter()], targets=targets(2)) as system:
        await system.generate()
        info = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=60)
        assert info.model_name == "fake-target"
        assert info.vocabulary_size == VOCABULARY_SIZE
        assert [(it.name, it.role, it.ready) for it in info.servers] == [
            ("drafter-0", model_pb.MODEL_ROLE_DRAFTER, True),
            ("target-0", model_pb.MODEL_ROLE_TARGET, True),
            ("target-1", model_pb.MODEL_ROLE_TARGET, True),
        ]
        assert info.running_request_count == 0
        assert info.tokenizer_fingerprint


async def test_a_stream_is_never_shared_by_targets_with_the_same_bits_and_without():
    # They take so long that DSI needs both, also on a machine that is late.
    odd, alike = targets(1), targets(2, is_invariant=True, latency_seconds=0.1)
    async with orchestrating(drafters=[a_drafter()], targets=[*odd, *alike]) as system:
        received = await system.generate(strategy=pb.STRATEGY_DISTRIBUTED, target_count=3)
        info = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=60)
        assert received.finished.targets_used == 2
        assert not odd[0].calls
        assert [(it.standing, it.ready) for it in info.servers if it.role == TARGET_ROLE] == [
            (pb.SERVER_STANDING_OTHER_INVARIANCE, False),
            (pb.SERVER_STANDING_USED, True),
            (pb.SERVER_STANDING_USED, True),
        ]
        assert info.servers[1].standing_detail == ("it runs without --invariant, most targets with")


async def test_the_version_is_told_without_a_file(monkeypatch):
    async with orchestrating(targets=targets(1)) as system:
        # Each look at a package's metadata opens files, and a process may have no descriptor left.
        monkeypatch.setattr("importlib.metadata.version", lambda _: pytest.fail("it reads a file"))
        info = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=60)
    assert info.version


async def test_system_info_still_tells_the_model_when_the_last_target_is_gone():
    async with orchestrating(targets=targets(1)) as system:
        before = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=60)
        await system.targets[0].kill()
        async with asyncio.timeout(10):
            info = before
            while info.servers[0].ready:
                info = await system.stub.GetSystemInfo(pb.GetSystemInfoRequest(), timeout=60)
        assert info.model_fingerprint == before.model_fingerprint == "target-model"
        assert info.vocabulary_size == VOCABULARY_SIZE


async def test_the_chat_template_is_the_targets_as_it_is_now():
    target = targets(1)[0]
    async with orchestrating(drafters=[a_drafter()], targets=[target]) as system:
        async with AsyncClient(system.address) as client:
            with pytest.raises(UnsupportedError, match="no chat template"):
                await client.chat_template()
            fingerprints = set()
            for source in ("{{ messages }}", "{{ other }}"):
                target.chat_template = model_pb.ChatTemplate(
                    fingerprint="what the target says",
                    source=source,
                    named_tokens={"bos_token": "<s>"},
                    added_token_ids={"<tool_call>": 7},
                )
                told = await client.chat_template()
                assert told.source == source
                fingerprints.add(told.fingerprint)
                assert told.named_tokens == {"bos_token": "<s>"}
                assert told.added_token_ids == {"<tool_call>": 7}
                assert told.model_fingerprint == "target-model"
            assert len(fingerprints) == 2, "none is kept under the name of the other"
        with Client(system.address) as client:
            assert await asyncio.to_thread(client.chat_template) == told


async def test_a_request_just_after_the_start_waits_for_the_first_target():
    target = targets(1)[0]
    async with serving(target):
        await target.set_serving(False)
        settings = OrchestratorSettings(
            listen="127.0.0.1:0", health_listen="", targets=(target.address,)
        )
        process, _ = new_orchestrator(settings)
        beginning = asyncio.create_task(process.begin())
        await soon(lambda: "address" in process.addresses, what="the orchestrator listens")
        async with grpc.aio.insecure_channel(process.addresses["address"]) as channel:
            stub = OrchestratorServiceStub(channel)
            call = stub.Generate(
                pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), max_tokens=4), timeout=60
            )
            while not (await stub.GetSystemInfo(pb.GetSystemInfoRequest())).running_request_count:
                assert not call.done()
            await target.set_serving(True)
            token_ids = [id_ async for message in call for id_ in message.chunk.token_ids]
        await beginning
        await process.finish()
    assert token_ids == continuation(PROMPT, 4)
