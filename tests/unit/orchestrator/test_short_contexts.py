"""Servers of unlike contexts: each works as far as its own goes, and nobody else hears of it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.proposal import Proposal
from paceline_protocol.draft_statistics import DraftStatistics
from paceline_protocol.methods import METHODS, Strategy
from support.fake_text import EOS, continuation, next_token
from support.orchestrating import PROMPT
from support.virtual_servers import VirtualServer, drafters, targets
from support.virtual_system import Stream, VirtualDiscovery, now, virtual_system
from support.virtual_time import virtually
from support.waiting import until

AUTO, SI, DSI = pb.STRATEGY_AUTO, pb.STRATEGY_SPECULATIVE, pb.STRATEGY_DISTRIBUTED
PLAIN = pb.STRATEGY_AUTOREGRESSIVE
COUNT = 40
BORDERS = [1, len(PROMPT) - 1, *range(len(PROMPT), len(PROMPT) + 6), len(PROMPT) + COUNT - 1]


def never(_position):
    return False


def drafts(system, name="drafter-0"):
    """Return where each draft of a server began, and where its window ended."""
    asked = [it.request for it in system.records("Draft", server=name)]
    begins = [it.call.base_length + len(it.call.token_ids) for it in asked]
    return [(begin, begin + it.max_tokens) for begin, it in zip(begins, asked, strict=True)]


async def decoded(system, count=COUNT, **request):
    """Decode; the text is that of plain decoding, nothing failed, and nothing is left."""
    stream = await system.generate(max_tokens=count, **request)
    await system.settle()
    assert stream.token_ids == continuation(PROMPT, count)
    assert system.leftovers() == []
    assert {it.end for it in system.records("OpenSession")} == {"answered"}
    return stream


@dataclass
class SmallTrees(VirtualServer):
    """Judges small trees alone, and refuses others."""

    most_tokens: int = 0
    most_depth: int = 0

    def info(self):
        told = super().info()
        told.tree_token_limit, told.tree_depth_limit = self.most_tokens, self.most_depth
        return told

    def call(self, request):
        tree = Proposal(request.proposal.token_ids, request.proposal.parents)
        if tree.parents and (len(tree) > self.most_tokens or tree.depth > self.most_depth):
            raise errors.InvalidFieldError.of("proposal.parents", "too large a tree")
        return super().call(request)


@pytest.mark.parametrize("limits", [(64, 3), (6, 64)], ids=["depth", "tokens"])
@pytest.mark.parametrize("context_length", [500, 1000])
@pytest.mark.parametrize("strategy", [SI, DSI])
@virtually
async def test_a_target_is_given_no_larger_or_deeper_tree_than_it_takes(
    strategy, context_length, limits
):
    most_tokens, most_depth = limits
    small = SmallTrees(
        "target", name="small", most_tokens=most_tokens, most_depth=most_depth, context_length=500
    )
    others = targets(2, context_length=context_length)
    async with virtual_system(*drafters(1), small, *others) as system:
        stream = await decoded(system, strategy=strategy, lookahead=8, width=3, branches=8)
        assert stream.fallbacks == {}
        assert stream.finished.statistics.branch_token_count


@pytest.mark.parametrize("target_count", [1, 3])
@pytest.mark.parametrize("strategy", [AUTO, SI, DSI])
@virtually
async def test_a_drafter_drafts_up_to_its_context_and_rests_beyond(strategy, target_count):
    reach = len(PROMPT) + 20
    models = [*drafters(1, context_length=reach), *targets(target_count)]
    async with virtual_system(*models) as system:
        stream = await decoded(system, strategy=strategy)
        assert stream.fallbacks == {}
        assert stream.finished.statistics.accepted_token_count >= 10
        assert max(end for _, end in drafts(system)) == reach


@pytest.mark.parametrize("strategy", [AUTO, SI, DSI])
@pytest.mark.parametrize(
    ("agrees", "width"), [(lambda _: True, 1), (lambda it: it % 3 > 0, 2), (never, 1)]
)
@virtually
async def test_the_text_is_the_same_wherever_the_drafter_s_context_ends(agrees, width, strategy):
    for reach in BORDERS:
        short = drafters(1, context_length=reach, agrees=agrees)
        async with virtual_system(*short, *targets(2)) as system:
            await decoded(system, strategy=strategy, lookahead=4, width=width)
            assert all(end <= reach for _, end in drafts(system))


@pytest.mark.parametrize("strategy", [AUTO, SI, DSI])
@virtually
async def test_a_short_answer_is_drafted_from_its_first_token_whatever_it_might_have_become(
    strategy,
):
    def token_after(text):
        return EOS if len(text) == len(PROMPT) + 12 else next_token(text)

    models = [*drafters(1, context_length=256), *targets(1, context_length=8192)]
    for model in models:
        model.token_after = token_after
    async with virtual_system(*models) as system:
        stream = await system.generate(max_tokens=4096, strategy=strategy)
        assert stream.token_ids == [*continuation(PROMPT, 12), EOS]
        assert drafts(system)[0][0] == len(PROMPT)
        assert stream.finished.statistics.accepted_token_count > 0
        assert stream.fallbacks == {}
        assert models[0].specs[0].limit_length == 256


@pytest.mark.parametrize("strategy", [SI, DSI])
@virtually
async def test_another_drafter_goes_on_where_one_s_context_ends(strategy):
    short = VirtualServer("drafter", name="a-short", latency_seconds=0.005, context_length=30)
    long = VirtualServer("drafter", name="b-long", latency_seconds=0.005)
    async with virtual_system(short, long, *targets(2)) as system:
        stream = await decoded(system, strategy=strategy)
        assert stream.fallbacks == {}
        assert max(end for _, end in drafts(system, "a-short")) == 30
        assert min(begin for begin, _ in drafts(system, "b-long")) >= 30
        assert system.server("a-short").session_count == 0, "its room is for others"


@virtually
async def test_a_prompt_that_is_too_long_for_one_drafter_is_drafted_by_another():
    short = VirtualServer("drafter", name="a-short", latency_seconds=0.005, context_length=9)
    long = VirtualServer("drafter", name="b-long", latency_seconds=0.005)
    async with virtual_system(short, long, *targets(1)) as system:
        await decoded(system, strategy=SI)
        assert drafts(system, "a-short") == []
        assert drafts(system, "b-long")


@virtually
async def test_auto_plans_without_a_drafter_whose_context_is_shorter_than_the_prompt():
    short = drafters(1, context_length=len(PROMPT))
    async with virtual_system(*short, *targets(1)) as system:
        stream = await decoded(system)
        assert system.records("OpenSession", server="drafter-0") == []
        assert stream.fallbacks == {}


@virtually
async def test_one_line_of_the_log_says_from_where_on_requests_go_on_without_a_drafter(caplog):
    models = [*drafters(1, context_length=30), *targets(1)]
    with caplog.at_level(logging.INFO, "paceline_orchestrator"):
        async with virtual_system(*models) as system:
            for _ in range(3):
                await decoded(system, strategy=SI)
    told = [it for it in caplog.messages if it.startswith("drafter-0 is used")]
    assert len(told) == 1
    assert "its context is 30 tokens" in told[0]
    assert "longer texts go on without it" in told[0]


@virtually
async def test_a_target_with_less_context_is_used_for_what_it_has_room_for():
    short = VirtualServer("target", name="a-short", context_length=len(PROMPT) + 10)
    long = VirtualServer("target", name="b-long", context_length=len(PROMPT) + COUNT)
    async with virtual_system(short, long) as system:
        stream = await decoded(system, strategy=PLAIN)
        assert stream.fallbacks == {}
        assert system.records("OpenSession", server="a-short") == []
        await decoded(system, 10, strategy=PLAIN)
        assert system.records("Decode", server="a-short")
        with pytest.raises(errors.ContextLengthExceededError, match=f"in .1, {COUNT}."):
            await system.generate(max_tokens=COUNT + 1)


@virtually
async def test_dsi_speculates_at_targets_that_have_room_for_the_whole_text():
    models = targets(3)
    models[1].context_length = len(PROMPT) + 5
    async with virtual_system(*drafters(1), *models) as system:
        stream = await decoded(system, strategy=DSI, target_count=3)
        assert stream.fallbacks == {}
        assert {it.server for it in system.records("Verify")} == {"target-0", "target-2"}


@virtually
async def test_under_auto_a_text_that_is_too_long_for_its_drafter_is_decoded_as_one_without():
    reach = len(PROMPT) + 60
    models = [*drafters(1, context_length=reach), *targets(1)]
    async with virtual_system(*models) as system:
        # Texts have said nothing of their rest.
        learnt = {"plan": SimpleNamespace(method=METHODS[Strategy.SPECULATIVE])}
        system.planning.experience.learn(
            DraftStatistics(), **learnt, verification_count=0, text_rejected_count=2000
        )
        stream = await decoded(system, 120)
        (decode,) = system.records("Decode")
        call = decode.request.call
        assert reach <= call.base_length + len(call.token_ids) < reach + 8
        assert stream.fallbacks == {"load_changed": 1}


@virtually
async def test_one_long_text_takes_no_drafter_from_shorter_ones():
    models = [*drafters(1, context_length=len(PROMPT) + 90), *targets(2)]
    async with virtual_system(*models) as system:
        long = asyncio.create_task(decoded(system, 300))
        await asyncio.sleep(2.5)
        short = [await system.generate(max_tokens=80) for _ in range(4)]
        assert (await long).fallbacks == {}, "the text itself drafts on"
        for stream in short:
            assert stream.fallbacks == {}
            assert stream.finished.statistics.accepted_token_count > 30


@pytest.mark.parametrize("strategy", [PLAIN, SI, DSI])
@virtually
async def test_what_each_target_with_room_for_it_refuses_ends_at_once(strategy):
    long, short = targets(2)
    short.context_length = len(PROMPT) + COUNT - 1
    async with virtual_system(*drafters(1), long, short) as system:
        long.open_error = errors.UnsupportedError("not this")
        began = now()
        with pytest.raises(errors.UnsupportedError, match="every target refuses"):
            await system.generate(max_tokens=COUNT, strategy=strategy)
        assert now() - began < 1


@virtually
async def test_auto_plans_with_those_targets_alone_that_have_room():
    plans = []
    for short_count in (0, 3):
        models = [*drafters(1), *targets(1 + short_count)]
        for short in models[2:]:
            short.context_length = len(PROMPT) + 150
        async with virtual_system(*models) as system:
            stream = await decoded(system, 200)
            assert stream.fallbacks == {}
            plans.append((stream.started.strategy, stream.started.lookahead))
            assert {it.server for it in system.records("Verify")} == {"target-0"}
            await decoded(system, 20)
            used = {it.server for it in system.records("Verify")}
            assert (used > {"target-0"}) is (short_count > 0), "a short text is DSI's at all"
    assert plans[0] == plans[1]


@virtually
async def test_a_slow_target_is_waited_for_where_the_quick_one_has_no_room():
    slow = VirtualServer("target", name="a-slow", latency_seconds=15)
    quick = VirtualServer("target", name="b-quick", context_length=len(PROMPT) + 2)
    async with virtual_system(slow, quick) as system:
        stream = await decoded(system, 3, strategy=PLAIN)
        assert stream.fallbacks == {}
        assert system.records("OpenSession", server="b-quick") == []


NO_RULE_JUDGES_IT = {
    "width": 2,
    "verification_rule": sampling_pb2.VERIFICATION_RULE_REJECTION,
    "sampling": sampling_pb2.SamplingParameters(temperature=1),
}
SHORT_CONTEXT, LONG_COUNT, READ_COUNT = 64, 100, 30


async def while_the_long_one_is_away(*, kept_seconds=0.0, **request):
    """Have the target with the long context killed in mid-stream; resume; resume when it is back.

    Returns:
        The text with the first resumption, or why it was refused; and that with the second one.
    """
    short, long = targets(2)
    short.context_length = SHORT_CONTEXT
    texts = []
    async with virtual_system(short, long) as system:
        first = Stream()
        asked = asyncio.create_task(system.generate(into=first, strategy=PLAIN, **request))
        await until(lambda: len(first.token_ids) >= READ_COUNT, what="some text is there")
        await long.kill()
        with pytest.raises(errors.NoTargetError):
            await asked
        for pause in (kept_seconds, 2.0):
            await asyncio.sleep(pause)
            request |= {"seed": first.started.seed, "resume_token_ids": first.token_ids}
            try:
                rest = await system.generate(strategy=PLAIN, **request)
                texts.append(first.token_ids + rest.token_ids)
            except errors.PacelineError as error:
                texts.append(type(error))
            await long.start()
    return texts


@pytest.mark.parametrize("limit", [LONG_COUNT, None])
@virtually
async def test_what_a_target_that_is_away_has_room_for_ends_neither_for_good_nor_early(limit):
    count = limit or 256
    refused, whole = await while_the_long_one_is_away(max_tokens=limit)
    assert refused is errors.NoTargetError
    assert whole == continuation(PROMPT, count)


@virtually
async def test_a_new_request_that_names_no_limit_gets_what_the_ready_targets_have_room_for():
    short, long = targets(2)
    short.context_length = SHORT_CONTEXT
    async with virtual_system(short, long) as system:
        await long.kill()
        await system.until(lambda: not system.server(long.name).ready)
        began = now()
        stream = await system.generate(max_tokens=None)
        assert stream.token_ids == continuation(PROMPT, SHORT_CONTEXT - len(PROMPT))
        assert now() - began < 5


@virtually
async def test_a_target_that_is_away_for_long_is_not_counted_on():
    refused, _ = await while_the_long_one_is_away(max_tokens=LONG_COUNT, kept_seconds=61)
    assert refused is errors.ContextLengthExceededError


@virtually
async def test_nothing_is_refused_for_good_while_a_target_has_not_said_what_it_can():
    short, able = targets(2)
    short.context_length, short.scores_prompts = SHORT_CONTEXT, False
    asked = ({"token_ids": pb.TokenIds(ids=[5] * LONG_COUNT)}, {"prompt_logprobs": 0})
    await able.kill()
    async with virtual_system(short, able, discovery=VirtualDiscovery(short, able)) as system:
        for request in asked:
            with pytest.raises(errors.NoTargetError, match="target-1 has not said yet"):
                await system.generate(**request)
        with pytest.raises(errors.ContextLengthExceededError):  # it may ask for less at once
            await system.generate(max_tokens=LONG_COUNT)
        with pytest.raises(errors.UnsupportedError):  # none will ever judge trees under this rule
            await system.generate(**NO_RULE_JUDGES_IT)
        await able.start()
        await asyncio.sleep(2)
        for request in asked:
            await system.generate(**request)


@virtually
async def test_a_fitting_drafter_that_restarts_is_no_mismatch_of_those_that_do_not_fit():
    fitting, other = drafters(2)
    other.tokenizer = b"other"
    async with virtual_system(*targets(1), fitting, other) as system:
        await fitting.kill()
        await asyncio.sleep(0.2)
        await decoded(system, strategy=SI)
        await asyncio.sleep(61)
        with pytest.raises(errors.TokenizerMismatchError):
            await system.generate(strategy=SI)
