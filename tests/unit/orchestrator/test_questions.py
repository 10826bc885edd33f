"""Servers that do not say what they are asked of their model work all the same."""

from __future__ import annotations

import asyncio

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.model_service_pb2 import ChatTemplate
from paceline_orchestrator.front.served_tokenizer import ServedTokenizer
from paceline_orchestrator.front.tokenizer import Codecs
from support.fake_text import byte_tokenizer, continuation
from support.orchestrating import PROMPT, orchestrating
from support.orchestrating import targets as real_targets
from support.virtual_servers import targets
from support.virtual_system import VirtualDiscovery, now, virtual_system
from support.virtual_time import virtually
from support.waiting import until

ASKED = pb.GetSystemChatTemplateRequest()
TEMPLATE = ChatTemplate(fingerprint="it", source="{{ messages }}")
TOKENIZER = byte_tokenizer().to_str().encode()


async def ask(system):
    told = await system.servicer.GetSystemChatTemplate(ASKED, None)
    assert told.chat_template.source == TEMPLATE.source


async def ask_in_vain(system):
    with pytest.raises(errors.NoTargetError, match="no target tells its chat template"):
        await system.servicer.GetSystemChatTemplate(ASKED, None)


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
            await ask_in_vain(system)
            assert all(it.ready for it in system.pool.servers)
            await asyncio.sleep(0.5)
        assert (await system.generate()).token_ids == continuation(PROMPT, 24)
        assert all(it.question_count <= 8 for it in models), "asked less often each time"


@virtually
async def test_the_chat_template_comes_from_another_target_and_later_from_the_same():
    failing, other = targets(2)
    other.chat_template = TEMPLATE
    async with virtual_system(failing, other) as system:
        failing.question_error = errors.InternalError("a bug")
        for _ in range(10):
            await ask(system)
        assert failing.question_count == 1
        failing.question_error = None
        failing.chat_template, other.chat_template = other.chat_template, None
        await asyncio.sleep(0.5)
        await ask(system)


@virtually
async def test_one_failure_that_many_clients_hear_of_is_one():
    (model,) = targets(1, chat_template=TEMPLATE)
    async with virtual_system(model) as system:
        model.question_error = errors.InternalError("a glitch")
        await asyncio.gather(*(ask_in_vain(system) for _ in range(10)))
        model.question_error = None
        await ask_in_vain(system)
        await asyncio.sleep(0.5)
        await ask(system)


@virtually
async def test_after_an_answer_a_failure_is_a_first_one_again():
    (model,) = targets(1, chat_template=TEMPLATE)
    async with virtual_system(model) as system:
        for _ in range(4):
            model.question_error = errors.InternalError("a bug")
            await ask_in_vain(system)
            model.question_error = None
            await asyncio.sleep(0.5)
            await ask(system)


@virtually
async def test_another_process_is_not_held_to_what_the_one_before_it_failed_to_tell():
    (model,) = targets(1, chat_template=TEMPLATE, incarnation="1")
    async with virtual_system(model) as system:
        model.question_error = errors.InternalError("a bug")
        for _ in range(5):
            await ask_in_vain(system)
            await asyncio.sleep(10)
        await ask_in_vain(system)
        await model.kill()
        model.question_error, model.incarnation = None, "2"
        await model.start()
        await system.until(lambda: not system.server("target-0").ready)
        await system.until(lambda: system.server("target-0").ready)
        await ask(system)


@virtually
async def test_a_target_whose_connection_broke_is_asked_again_as_soon_as_it_is_back():
    (model,) = targets(1, chat_template=TEMPLATE)
    async with virtual_system(model) as system:
        model.link.hold("GetChatTemplate")
        asking = asyncio.create_task(ask_in_vain(system))
        await asyncio.sleep(0.1)
        await model.kill()
        await asking
        model.link.release()
        await model.start()
        await system.until(lambda: system.server("target-0").ready)
        await ask(system)


@virtually
async def test_a_target_that_is_listed_twice_is_no_other_one_that_may_have_a_chat_template():
    models = targets(2, incarnation="the same process")
    async with virtual_system(*models, discovery=VirtualDiscovery(*models)) as system:
        await system.until(lambda: system.server("target-1").twin is not None)
        with pytest.raises(errors.UnsupportedError, match="no chat template"):
            await system.servicer.GetSystemChatTemplate(ASKED, None)


@virtually
async def test_targets_that_hang_do_not_hide_the_one_that_tells_its_chat_template():
    models = targets(4, chat_template=TEMPLATE)
    async with virtual_system(*models) as system:
        for model in models[:3]:
            model.link.hold("GetChatTemplate")
        began = now()
        await ask(system)
        assert now() - began == pytest.approx(3, abs=0.1)
        began = now()
        await ask(system)
        assert now() - began < 0.1


@virtually
async def test_a_target_that_keeps_clients_waiting_is_asked_after_one_that_answers():
    hung, other = targets(2, chat_template=TEMPLATE)
    async with virtual_system(hung, other) as system:
        hung.link.hold("GetChatTemplate")
        await ask(system)
        for _ in range(5):
            await asyncio.sleep(60)
            began = now()
            await ask(system)
            assert now() - began < 0.1


# --- tokenizers --------------------------------------------------------------------------------


@pytest.mark.parametrize("hung_count", range(4))
@virtually
async def test_targets_that_hang_do_not_hide_the_one_that_tells_its_tokenizer(hung_count):
    models = targets(4, tokenizer=TOKENIZER)
    async with virtual_system(*models) as system:
        for model in models[:hung_count]:
            model.link.hold("GetTokenizer")
        began = now()
        async with asyncio.timeout(600):
            assert await ServedTokenizer(system.pool, Codecs()).fetch() is not None
        assert now() - began == pytest.approx(hung_count, abs=0.1)


@virtually
async def test_of_many_targets_that_hang_four_are_asked_at_a_time():
    models = targets(9, tokenizer=TOKENIZER)
    async with virtual_system(*models) as system:
        before = len(system.records("GetTokenizer"))
        for model in models[:8]:
            model.link.hold("GetTokenizer")
        fetching = asyncio.create_task(ServedTokenizer(system.pool, Codecs()).fetch())
        await asyncio.sleep(9)
        assert len(system.records("GetTokenizer")) - before == 4
        async with asyncio.timeout(15):
            assert await fetching is not None


@virtually
async def test_a_target_that_hesitates_and_answers_first_is_taken():
    models = targets(3, tokenizer=TOKENIZER)
    async with virtual_system(*models) as system:
        for model in models:
            model.link.hold("GetTokenizer")
        fetching = asyncio.create_task(ServedTokenizer(system.pool, Codecs()).fetch())
        await asyncio.sleep(5)
        models[0].link.release()
        async with asyncio.timeout(1):
            assert await fetching is not None


@virtually
async def test_a_target_is_asked_again_though_its_pause_ends_before_anybody_waits_for_that():
    """Between the two the orchestrator tells its own health."""
    (model,) = targets(1, tokenizer=TOKENIZER)
    async with virtual_system(model) as system:
        tokenizer, changed = ServedTokenizer(system.pool, Codecs()), asyncio.Event()
        model.question_error = errors.InternalError("a glitch")
        assert await tokenizer.fetch() is None
        model.question_error = None
        await asyncio.sleep(0.6)
        began = now()
        await tokenizer.wait(changed)
        assert now() == began
        assert await tokenizer.fetch() is not None


@virtually
async def test_while_no_target_is_ready_nobody_looks_again_for_its_tokenizer():
    (model,) = targets(1, tokenizer=TOKENIZER)
    async with virtual_system(model) as system:
        tokenizer, changed = ServedTokenizer(system.pool, Codecs()), asyncio.Event()
        model.question_error = errors.InternalError("a glitch")
        assert await tokenizer.fetch() is None
        await model.kill()
        await asyncio.sleep(0.6)
        for _ in range(2):
            assert await tokenizer.fetch() is None
            waiting = asyncio.create_task(tokenizer.wait(changed))
            await asyncio.sleep(60)
            assert not waiting.done()
            changed.set()
            await waiting
            changed.clear()


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
