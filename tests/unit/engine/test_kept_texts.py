"""What ended sessions leave for those that begin alike: no wrong token, and nothing of others'."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from array import array
from contextlib import aclosing
from dataclasses import replace

import pytest
import torch

from paceline.errors import OverloadedError, SupersededError
from paceline_contract.calls import DecodeOptions, VerifyOptions
from paceline_contract.max_gram import MaxGram
from paceline_contract.proposal import NOTHING, Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.sessions.host import HostLimits
from paceline_engine.sessions.kept_texts import KeptTexts
from paceline_engine.sessions.session_table import SessionTable
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.backend import ForwardInterrupted, TokenMemory
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.terms.model_cache import ModelCache, common_length
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.device import on_a_cpu
from support.families import ORIGINAL_LENGTH, VOCABULARY_SIZE, build_family
from support.lora_folders import write_lora
from support.tiny_adapters import write_adapter
from unit.engine.asking import drafted
from unit.engine.conftest import (
    StopAtLayer,
    call_on,
    chain,
    continuation,
    instant,
    running,
    scores_after,
)

KEEPS = HostLimits(warm_up_rounds=0, keep_seconds=10)
SPEC = SessionSpec(400, share="ann")
SAMPLED = SamplingParameters(temperature=0.8, top_p=0.9)
CHANCE = random.Random(3)
TEXT = [CHANCE.randrange(300) for _ in range(200)]


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [("", "", 0), ("a", "", 0), ("abc", "abc", 3), ("abc", "abd", 2), ("xbc", "abc", 0)],
)
def test_the_common_length_is_where_texts_part(left, right, expected):
    left, right = (array("I", map(ord, each)) for each in (left, right))
    assert common_length(left, right) == common_length(right, left) == expected


def test_the_common_length_of_long_texts_is_exact():
    text = array("I", range(1000))
    for place in (0, 1, 499, 500, 501, 998, 999):
        other = text[:]
        other[place] = 7777
        assert common_length(text, other) == place
    assert common_length(text, text[:600]) == 600


# --- what is kept, for whom, how long -----------------------------------------------------------


class Copied(ModelCache):
    """A text that can be copied, and is no model's."""

    can_be_copied = True
    is_empty = False

    def _crop(self, length: int) -> None:
        pass


def tokens(*parts: range) -> array[int]:
    return array("I", [token for part in parts for token in part])


@pytest.fixture
def kept(clock) -> KeptTexts:
    return KeptTexts(seconds=10, clock=clock)


class Stepped(Copied):
    """A text whose state can be cut to some lengths only, as a recurrent one."""

    def __init__(self, *lengths: int) -> None:
        super().__init__()
        self._lengths = lengths

    def reachable(self, length: int) -> int:
        return max((each for each in self._lengths if each <= length), default=0)


def keep(kept, text, *, share="ann", owner="", size=None) -> weakref.ref[ModelCache]:
    cache = Copied()
    size = len(text) if size is None else size
    kept.keep(cache, text, owner=owner, share=share, size=size)
    return weakref.ref(cache)


def found_length(kept, text, *, share="ann", owner="") -> int:
    try:
        return kept.find(text, owner=owner, share=share)[1]
    except LookupError:
        return 0


def test_a_shorter_text_is_found_before_a_longer_one_whose_state_cannot_be_cut(kept):
    shorter, longer = tokens(range(60), range(500, 540)), tokens(range(90), range(600, 640))
    has_state, has_none = Stepped(60), Stepped(len(longer))
    for cache, text in ((has_state, shorter), (has_none, longer)):
        kept.keep(cache, text, owner="", share="ann", size=100)
    assert kept.find(tokens(range(95)), owner="", share="ann") == (has_state, 60)


def test_a_text_is_kept_beside_a_longer_one_that_cannot_be_cut_to_it(kept):
    whole, part = tokens(range(90)), tokens(range(60))
    of_whole, of_part = Stepped(90), Stepped(60)
    for order in ((of_whole, of_part), (of_part, of_whole)):
        for cache in order:
            text = whole if cache is of_whole else part
            kept.keep(cache, text, owner="", share="ann", size=100)
        assert len(kept) == 2
        assert kept.find(tokens(range(70)), owner="", share="ann") == (of_part, 60)
        assert kept.find(tokens(range(99)), owner="", share="ann") == (of_whole, 90)
        kept.shrink(0)


def test_the_text_with_most_in_common_is_found(kept):
    short = keep(kept, tokens(range(60), range(500, 540)))
    long = keep(kept, tokens(range(90), range(500, 540)))
    assert kept.find(tokens(range(95)), owner="", share="ann") == (long(), 90)
    assert kept.find(tokens(range(60), range(500, 520)), owner="", share="ann") == (short(), 80)


def test_nobody_finds_what_another_client_sent(kept):
    keep(kept, tokens(range(90)), share="ann", owner="front")
    assert found_length(kept, tokens(range(90)), share="ann", owner="front") == 90
    assert found_length(kept, tokens(range(90)), share="bob", owner="front") == 0
    assert found_length(kept, tokens(range(90)), share="ann", owner="back") == 0


def test_short_texts_and_what_cannot_be_copied_are_not_kept(kept, clock):
    keep(kept, tokens(range(31)))
    single = Copied()
    single.__class__ = type("Single", (Copied,), {"can_be_copied": False})
    kept.keep(single, tokens(range(99)), owner="", share="", size=99)
    assert len(kept) == 0
    keep(kept, tokens(range(32)))
    assert len(kept) == 1
    nothing = KeptTexts(seconds=0, clock=clock)
    keep(nothing, tokens(range(99)))
    assert len(nothing) == 0


def test_a_text_of_which_nothing_was_computed_is_not_kept(kept):
    empty = Copied()
    empty.__class__ = type("Empty", (Copied,), {"is_empty": True})
    kept.keep(empty, tokens(range(99)), owner="", share="ann", size=99)
    assert len(kept) == 0


def test_a_text_that_was_lost_after_its_end_is_not_found_and_gives_way_to_another(kept):
    lost = keep(kept, tokens(range(99)))
    lost().__class__ = type("Empty", (Copied,), {"is_empty": True})
    assert found_length(kept, tokens(range(99))) == 0
    other = keep(kept, tokens(range(60)))
    assert kept.find(tokens(range(99)), owner="", share="ann") == (other(), 60)


def test_a_text_is_found_by_a_beginning_of_some_length_alone(kept):
    keep(kept, tokens(range(31), range(800, 900)))
    assert found_length(kept, tokens(range(90))) == 0


def test_of_texts_that_go_on_from_each_other_the_longest_is_kept(kept):
    turn = keep(kept, tokens(range(60)))
    keep(kept, tokens(range(90)))
    assert turn() is None
    assert kept.token_count == 90
    keep(kept, tokens(range(60)))
    keep(kept, tokens(range(90)))
    assert (len(kept), kept.token_count) == (1, 90)
    keep(kept, tokens(range(90)), share="bob")
    assert len(kept) == 2


def test_what_was_not_used_for_long_is_given_up(kept, clock):
    keep(kept, tokens(range(90)))
    other = keep(kept, tokens(range(100, 190)))
    clock.now = 9
    assert found_length(kept, tokens(range(70))) == 70
    clock.now = 18
    kept.expire()
    assert (len(kept), other()) == (1, None)
    assert found_length(kept, tokens(range(70))) == 70
    clock.now = 28
    kept.expire()
    assert len(kept) == 0


def test_the_least_recently_used_text_of_who_keeps_most_goes_first(kept):
    modest = keep(kept, tokens(range(50)), share="bob")
    greedy = [keep(kept, tokens(range(n, n + 60))) for n in (100, 200, 300)]
    assert found_length(kept, tokens(range(100, 150))) == 50
    kept.shrink(200)
    assert [each() is None for each in (modest, *greedy)] == [False, False, True, False]
    kept.shrink(110)
    assert [each() is None for each in (modest, *greedy)] == [False, False, True, True]
    kept.shrink(0)
    assert len(kept) == 0


def test_who_keeps_most_tokens_gives_way_however_few_texts_they_are(kept):
    many = [keep(kept, tokens(range(n, n + 40)), share="bob") for n in (0, 100, 200)]
    long = keep(kept, tokens(range(1000, 1400)))
    kept.shrink(400)
    assert [each() is None for each in (*many, long)] == [False, False, False, True]


def test_only_so_many_texts_are_kept(kept):
    first = keep(kept, tokens(range(5000, 5040)))
    for n in range(256):
        keep(kept, tokens(range(n, n + 40)))
    assert len(kept) == 256
    assert first() is None


# --- the budget ---------------------------------------------------------------------------------


def a_table(clock, *, budget=300) -> SessionTable:
    return SessionTable(
        incarnation="here",
        session_limit=9,
        token_budget=budget,
        clock=clock,
        keep_seconds=10,
    )


def ended(table, text, *, reserve=None) -> None:
    spec = SessionSpec(reserve or len(text))
    session = table.find(table.open(spec, lambda _: Copied()).session_id)
    session.hold(text)
    table.close(session.session_id)


def test_what_is_kept_takes_no_room_from_sessions(clock):
    table = a_table(clock)
    ended(table, range(100))
    ended(table, range(500, 600))
    assert (table.reserved_tokens, table.kept_tokens) == (0, 200)
    first = table.open(SessionSpec(150, share="bob"), lambda _: Copied())
    assert (table.reserved_tokens, table.kept_tokens) == (150, 100)
    table.open(SessionSpec(150), lambda _: Copied())
    assert (table.reserved_tokens, table.kept_tokens) == (300, 0)
    table.close(first.session_id)
    assert table.kept_tokens == 0, "it held nothing"


def test_a_session_that_grows_takes_the_room_of_what_is_kept(clock):
    table = a_table(clock)
    ended(table, range(100))
    spec = SessionSpec(50, limit_length=290)
    session = table.find(table.open(spec, lambda _: Copied()).session_id)
    assert session.reserved_length == 290
    assert table.kept_tokens == 0


def test_what_is_kept_has_a_budget_of_its_own_where_memory_is_everybodys(clock):
    table = a_table(clock)
    table.kept_budget = 150
    for start in (0, 500):
        ended(table, range(start, start + 100))
        assert table.kept_tokens == 100
    ended(table, range(900, 1100))
    assert table.kept_tokens == 0, "it alone would be too much"


@pytest.mark.parametrize(("kept_share", "expected"), [(0.25, 250), (1.0, 1000)])
async def test_a_machines_memory_is_filled_with_texts_in_part(kept_share, expected, monkeypatch):
    backend = instant()
    memory = TokenMemory(
        free_bytes=10_000, usable_share=0.5, bytes_per_token=5, kept_share=kept_share
    )
    monkeypatch.setattr(backend, "token_memory", lambda: memory)
    async with running(backend, limits=replace(KEEPS, fits_memory=True)) as host:
        assert host._sessions.token_budget == 1000
        assert host._sessions.kept_budget == expected


def test_a_text_counts_with_all_that_its_session_had_reserved(clock):
    table = a_table(clock)
    ended(table, range(50), reserve=120)
    assert table.kept_tokens == 120


def test_sessions_whose_lease_ends_leave_their_text_too(clock):
    table = a_table(clock)
    session = table.find(table.open(SessionSpec(90), lambda _: Copied()).session_id)
    session.hold(range(90))
    clock.now = 100
    assert table.expire() == 1
    assert table.kept_tokens == 90
    clock.now = 111
    table.expire()
    assert table.kept_tokens == 0


# --- what is computed ---------------------------------------------------------------------------


async def decoded(host, text, *, spec=SPEC, count=6) -> tuple[list[int], int]:
    """Decode some tokens in a session of its own; return them, and the rows of the first call."""
    session = host.open_session(spec).session_id
    found: list[int] = []
    rows = 0
    for sequence in range(1, count + 1):
        base, new = ([*text, *found[:-1]], found[-1:]) if found else ([], text)
        call = replace(call_on(session, sequence, base=base, append=new), caller=spec.owner)
        verdict = await host.verify(call, chain([]))
        timing = verdict.timing
        assert timing.reused_token_count == (0 if rows else len(text) - timing.row_count)
        rows = rows or timing.row_count
        found.append(verdict.next_token)
    host.close_session(session, caller=spec.owner)
    return found, rows


def plain(backend, text, *, count=6, spec=SPEC) -> list[int]:
    return continuation(ModelText(backend, spec), list(text), count)


@pytest.mark.parametrize("sampling", [SamplingParameters(), SAMPLED], ids=["greedy", "sampled"])
async def test_a_conversations_next_turn_computes_what_is_new(target, sampling):
    spec = replace(SPEC, sampling=sampling, seed=5)
    async with running(target, limits=KEEPS) as host:
        text, reused = TEXT[:60], 0
        for turn in range(4):
            answer, rows = await decoded(host, text, spec=spec)
            assert answer == plain(target, text, spec=spec)
            # The answer's last token was told, and not computed.
            assert rows == (60 if turn == 0 else 1 + 20)
            reused += len(text) - rows
            assert host.statistics().tokens_reused == reused
            text = [*text, *answer, *TEXT[60 + 20 * turn :][:20]]


async def test_what_a_recurrent_state_cannot_go_back_to_is_not_counted_as_reused(tmp_path):
    model = TransformersBackend(str(build_family("mamba 2", tmp_path)))
    async with running(model, limits=KEEPS) as host:
        await decoded(host, TEXT)
        _, rows = await decoded(host, [*TEXT[:70], *TEXT[:9]])
        assert (rows, host.statistics().tokens_reused) == (70 + 9, 0)


async def test_a_text_that_parts_from_the_kept_one_keeps_what_is_alike(target):
    other = [*TEXT[:120], 7, *TEXT[121:]]
    async with running(target, limits=KEEPS) as host:
        await decoded(host, TEXT)
        assert await decoded(host, other) == (plain(target, other), len(TEXT) - 120)
        # What was copied from is as it was.
        assert await decoded(host, TEXT) == (plain(target, TEXT), 1)


@pytest.mark.parametrize("whose", [{"share": "bob"}, {"owner": "back"}, {}], ids=str)
async def test_another_client_computes_it_all(target, whose):
    mine = replace(SPEC, owner="front")
    async with running(target, limits=KEEPS) as host:
        await decoded(host, TEXT, spec=mine)
        _, rows = await decoded(host, TEXT, spec=replace(mine, **whose))
        assert rows == (len(TEXT) if whose else 1)


async def told(host, session, sequence, text) -> int:
    call = call_on(session, sequence, base=[], append=text)
    return (await host.verify(call, chain([]))).timing.reused_token_count


async def test_a_first_call_that_is_superseded_leaves_it_to_the_next_to_tell_what_was_kept(target):
    async with running(target, limits=KEEPS) as host, asyncio.TaskGroup() as group:
        await decoded(host, TEXT)
        session = host.open_session(SPEC).session_id
        first = group.create_task(_superseded(told(host, session, 1, [*TEXT, 1])))
        await asyncio.sleep(0)
        assert await told(host, session, 2, [*TEXT, 1, 2]) == len(TEXT)
        assert await first
        assert await told(host, session, 3, [*TEXT, 1, 2, 3]) == 0, "it was told"


async def _superseded(call) -> bool:
    try:
        await call
    except SupersededError:
        return True
    return False


async def test_a_first_call_that_finds_the_queue_full_leaves_it_to_the_next_to_tell(
    target, monkeypatch
):
    def full(*_args, **_options):
        raise OverloadedError("the queue is full")

    async with running(target, limits=KEEPS) as host:
        await decoded(host, TEXT)
        session = host.open_session(SPEC).session_id
        with monkeypatch.context() as patch:
            patch.setattr(host._worker, "submit", full)
            with pytest.raises(OverloadedError):
                await told(host, session, 1, TEXT)
        assert await told(host, session, 2, TEXT) == len(TEXT) - 1


async def test_a_stream_tells_once_what_was_kept(target):
    async with running(target, limits=KEEPS) as host:
        await decoded(host, TEXT)
        session = host.open_session(SPEC).session_id
        call = call_on(session, 1, base=[], append=TEXT)
        async with aclosing(
            host.decode(call, DecodeOptions(max_tokens=3, interval_seconds=0))
        ) as stream:
            counts = [part.timing.reused_token_count async for part in stream]
        assert counts[0] == sum(counts) == len(TEXT) - 1


async def test_drafts_begin_with_what_is_kept_too(drafter):
    async with running(drafter, limits=KEEPS) as host:
        for rows in (len(TEXT), 1):
            before = host.statistics().rows
            session = host.open_session(SPEC).session_id
            found = await drafted(host, call_on(session, 1, base=[], append=TEXT), max_tokens=4)
            assert found == plain(drafter, TEXT, count=4)
            assert host.statistics().rows - before == rows + 3
            host.close_session(session)


async def test_many_sessions_begin_with_one_text_at_once(target):
    texts = [[*TEXT, n] for n in range(5)]
    async with running(target, limits=KEEPS) as host:
        await decoded(host, TEXT)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(decoded(host, text)) for text in texts]
        for text, task in zip(texts, tasks, strict=True):
            assert task.result() == (plain(target, text), 1)


async def test_a_text_that_went_before_it_was_copied_is_computed(target):
    small = replace(KEEPS, token_budget=800)
    async with running(target, limits=small) as host:
        await decoded(host, TEXT)
        held_up = asyncio.create_task(host._worker.run(lambda _: time.sleep(0.05)), name="busy")
        await asyncio.sleep(0)
        session = host.open_session(SPEC).session_id
        call = call_on(session, 1, base=[], append=TEXT)
        verify = asyncio.create_task(host.verify(call, chain([])), name="verify")
        await asyncio.sleep(0)
        assert host.statistics().tokens_kept == 400
        host.open_session(replace(SPEC, reserve_length=300, share="bob"))
        assert host.statistics().tokens_kept == 0
        await held_up
        verdict = await verify
        assert verdict.next_token == plain(target, TEXT, count=1)[0]
        assert verdict.timing.row_count == len(TEXT)


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_a_copy_survives_a_forward_that_was_given_up(target, layer):
    source = target.new_cache(SPEC)
    prefix = array("I", TEXT)
    expected = scores_after(target, source, prefix)
    text = target.new_cache(SPEC)
    text.begin_like(source)
    item = Item(text, SPEC, prefix=array("I", [*TEXT, 9]), task=Judge(NOTHING))
    with pytest.raises(ForwardInterrupted):
        target.run([item], StopAtLayer(layer))
    assert text.token_ids == prefix
    assert torch.equal(scores_after(target, source, prefix), scores_after(target, text, prefix))
    torch.testing.assert_close(scores_after(target, text, prefix), expected)


def test_only_a_text_that_has_yet_to_begin_takes_another_ones_state(target):
    source, text = target.new_cache(SPEC), target.new_cache(SPEC)
    scores_after(target, source, array("I", TEXT))
    own = array("I", TEXT[50:90])
    scores_after(target, text, own)
    text.begin_like(source)
    assert text.missing_length(array("I", TEXT)) == len(TEXT)
    assert text.missing_length(own) == 1
    assert text.keep(own) == len(own) - 1


def test_a_text_that_begins_like_one_of_which_nothing_is_there_is_computed(target):
    prefix = array("I", TEXT)
    text = target.new_cache(SPEC)
    source = target.new_cache(SPEC)
    text.begin_like(source)
    expected = scores_after(target, target.new_cache(SPEC), prefix)
    assert torch.equal(scores_after(target, text, prefix), expected)


async def test_a_text_whose_forward_failed_harms_no_session_that_begins_like_it(
    target, monkeypatch
):
    async with running(target, limits=KEEPS) as host:
        session = host.open_session(SPEC).session_id
        verdict = await host.verify(call_on(session, 1, base=[], append=TEXT), chain([]))
        with monkeypatch.context() as patch:
            patch.setattr(target, "_forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await host.verify(call_on(session, 2, base=TEXT, append=[verdict.next_token]))
        host.close_session(session)
        assert host.statistics().tokens_kept == 0
        assert await decoded(host, TEXT) == (plain(target, TEXT), len(TEXT))


def test_of_a_stacks_text_each_model_copies_what_it_computed(target, drafter):
    stack = StackBackend([target, drafter], matrix=[[3, 4], [0, 2]])
    source, text, prefix = stack.new_cache(SPEC), stack.new_cache(SPEC), array("I", TEXT)
    assert source.is_empty
    scores_after(drafter, source.texts[1], prefix)
    assert not source.is_empty
    text.begin_like(source)
    assert [each.keep(prefix) for each in text.texts] == [0, len(TEXT) - 1]


@on_a_cpu
def test_beyond_a_copy_there_are_zeros_where_kernels_read(target):
    source, text = target.new_cache(SPEC), target.new_cache(SPEC)
    scores_after(target, source, array("I", TEXT))
    text.begin_like(source)
    text.keep(array("I", TEXT[:70]))
    assert text.keep(array("I", TEXT[:30])) == 29
    place = text.place
    for each in (place.slab.keys, place.slab.values):
        assert each[place.index, :, :, :29].any()
        assert not each[place.index, :, :, 29:].any()


async def test_a_texts_tree_is_not_kept_and_harms_nothing(target):
    guess = plain(target, TEXT, count=3)
    async with running(target, limits=KEEPS) as host:
        session = host.open_session(SPEC).session_id
        tree = Proposal((guess[0], 7, guess[1], 8), parents=(0, 0, 1, 1))
        verdict = await host.verify(call_on(session, 1, base=[], append=TEXT), tree)
        assert verdict.next_token == guess[2]
        host.close_session(session)
        text = [*TEXT, *guess]
        # The path through the tree was held, but its rows lie behind the text's, in another order.
        assert await decoded(host, text) == (plain(target, text), 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_invariant_forwards_give_the_same_bits_on_a_copy(tiny_pair, dtype):
    backend = TransformersBackend(str(tiny_pair.target), dtype=dtype, invariant=True)
    source, alone, text = (backend.new_cache(SPEC) for _ in range(3))
    for end in range(40, 200, 7):
        scores_after(backend, source, array("I", TEXT[:end]))
    text.begin_like(source)
    prefix = array("I", [*TEXT[:150], 5, 6, 7])
    assert text.missing_length(prefix) == 3
    assert torch.equal(scores_after(backend, text, prefix), scores_after(backend, alone, prefix))


@pytest.mark.parametrize("max_gram", [MaxGram, None])
async def test_all_texts_of_a_stack_begin_alike(target, drafter, max_gram):
    matrix = [[3, 4, 4], [0, 2, 3], [0, 0, 3]] if max_gram else [[3, 4], [0, 2]]
    stack = StackBackend([target, drafter], matrix=matrix, new_max_gram=max_gram)
    async with running(stack, limits=KEEPS) as host:
        rows = []
        for _ in range(2):
            before = host.statistics().rows
            session = host.open_session(SPEC).session_id
            found = await drafted(host, call_on(session, 1, base=[], append=TEXT), max_tokens=6)
            assert found == plain(target, TEXT)
            rows.append(host.statistics().rows - before)
            host.close_session(session)
        # Of both models, all but the last token.
        assert rows[0] - rows[1] == 2 * (len(TEXT) - 1)


@pytest.mark.parametrize(
    ("family", "is_kept"),
    [
        *((name, True) for name in ("llama", "gpt2", "mistral", "gemma2", "deepseek-v3")),
        *((name, False) for name in ("bloom", "dynamic", "longrope")),
    ],
)
async def test_models_of_other_families_give_what_they_give_without_it(family, is_kept, tmp_path):
    backend = TransformersBackend(str(build_family(family, tmp_path / "model")))
    spec = replace(SPEC, reserve_length=ORIGINAL_LENGTH)
    chance = random.Random(9)
    text = [chance.randrange(VOCABULARY_SIZE) for _ in range(40)]
    async with running(backend, limits=KEEPS) as host:
        first = await decoded(host, text, spec=spec, count=4)
        again = await decoded(host, text, spec=spec, count=4)
    assert first == (plain(backend, text, spec=spec, count=4), 40)
    assert again == (first[0], 1 if is_kept else 40)


@pytest.mark.parametrize("kind", ["medusa", "streams", "eagle"])
async def test_a_model_that_drafts_for_itself_guesses_the_same_on_a_copy(kind, tiny_pair, tmp_path):
    adapter = write_adapter(
        tmp_path / "adapter", tiny_pair.target, kind=kind, tree=((0,), (1,), (0, 0))
    )
    backend = TransformersBackend(str(tiny_pair.target), adapter=str(adapter))
    async with running(backend, limits=KEEPS) as host:
        answers = []
        for _ in range(2):
            session = host.open_session(SPEC).session_id
            verdict = await host.verify(
                call_on(session, 1, base=[], append=TEXT),
                chain([]),
                options=VerifyOptions(propose=True),
            )
            answers.append((verdict.next_token, verdict.proposal.token_ids))
            host.close_session(session)
    assert answers[0] == answers[1]
    assert answers[0][1]


async def test_texts_that_are_given_up_leave_no_buffer(target, clock, monkeypatch):
    made: weakref.WeakSet[ModelCache] = weakref.WeakSet()
    make = target.new_cache

    def made_cache(spec):
        cache = make(spec)
        made.add(cache)
        return cache

    monkeypatch.setattr(target, "new_cache", made_cache)
    async with running(target, limits=KEEPS, clock=clock) as host:
        for n in range(3):
            await decoded(host, [*TEXT, n])
        assert len(made) == 3
        clock.now = 11
        host.close_session(host.open_session(SPEC).session_id)
        # The thread's last forward holds on to its texts until the next one.
        await host._worker.run(lambda _: None)
        gc.collect()
        assert len(made) == 0


async def test_a_kept_text_is_for_sessions_with_the_same_adapter_only(tiny_pair, tmp_path):
    loras = {
        name: write_lora(tmp_path / name, tiny_pair.target, seed=seed)
        for seed, name in enumerate("ab")
    }
    backend = TransformersBackend(
        str(tiny_pair.target), lora=[f"{name}={folder}" for name, folder in loras.items()]
    )
    prompt = TEXT[:80]
    oracle = {
        name: continuation(ModelText(backend, replace(SPEC, lora=name)), prompt, 12)
        for name in ("", "a", "b")
    }
    assert len({*map(tuple, oracle.values())}) == 3
    async with running(backend, limits=KEEPS) as host:
        reused = []
        for name in ("", "a", "b", "a", ""):
            session_id = host.open_session(replace(SPEC, lora=name)).session_id
            call = replace(call_on(session_id, 1, base=[], append=prompt), lora=name)
            async with aclosing(host.decode(call, DecodeOptions(max_tokens=12))) as parcels:
                found = [parcel async for parcel in parcels]
            assert [it for parcel in found for it in parcel.token_ids] == oracle[name]
            reused.append(sum(parcel.timing.reused_token_count for parcel in found))
            host.close_session(session_id)
    assert reused[:3] == [0, 0, 0]
    assert min(reused[3:]) > 60
