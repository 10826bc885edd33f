"""Servers that do not say what they are asked of their model work all the same."""

from __future__ import annotations

import asyncio

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.model_service_pb2 import ChatTemplate
from support.fake_text import continuation
from support.orchestrating import PROMPT, orchestrating
from support.orchestrating import targets as real_targets
from support.virtual_servers import targets
from support.virtual_system import virtual_system
from support.virtual_time import virtually
from support.waiting import until

ASKED = pb.GetSystemChatTemplateRequest()


@pytest.mark.parametrize(
    "error", [errors.InternalError("a bug"), errors.DeadlineError("too late")], ids=repr
)
@virtually
async def test_targets_that_fail_to_tell_their_chat_template_decode_meanwhile(error):
    models = targets(2)
    async with virtual_system(*models) as system:
        for model in models:
            model.question_error = error
        for _ in range(60):
            with pytest.raises(errors.NoTargetError, match="no target tells its chat template"):
                await system.servicer.GetSystemChatTemplate(ASKED, None)
            assert all(it.ready for it in system.pool.servers)
            await asyncio.sleep(0.5)
        assert (await system.generate()).token_ids == continuation(PROMPT, 24)
        assert all(it.question_count <= 8 for it in models), "asked less often each time"


@virtually
async def test_the_chat_template_comes_from_another_target_and_later_from_the_same():
    failing, other = targets(2)
    other.chat_template = ChatTemplate(fingerprint="it", source="{{ messages }}")
    async with virtual_system(failing, other) as system:
        failing.question_error = errors.InternalError("a bug")
        for _ in range(10):
            told = await system.servicer.GetSystemChatTemplate(ASKED, None)
            assert told.chat_template.source == "{{ messages }}"
        assert failing.question_count == 1
        failing.question_error = None
        failing.chat_template, other.chat_template = other.chat_template, None
        await asyncio.sleep(0.5)
        told = await system.servicer.GetSystemChatTemplate(ASKED, None)
        assert told.chat_template.source == "{{ messages }}"


@pytest.mark.parametrize("index", [0, 1])
async def test_a_target_that_fails_to_say_that_there_is_no_tokenizer_decodes_meanwhile(index):
    models = real_targets(2, tokenizer=None)
    failing = models[index]
    failing.question_error = errors.InternalError("a bug")
    async with orchestrating(targets=models) as system:
        pool = system.application.pool
        asked = failing.question_count
        await until(lambda: failing.question_count > asked, what="it is asked again, after seconds")
        assert all(it.ready for it in pool.servers)
        assert not any(it.failure_count for it in pool.servers)
