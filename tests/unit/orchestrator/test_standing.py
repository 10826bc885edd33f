"""One word on each server: in GetSystemInfo, in the log and in a metric, from one place."""

from __future__ import annotations

import asyncio
import time
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_contract.calls import Hardware, VerificationRule
from paceline_orchestrator.fleet import health_watch, standing_log
from paceline_orchestrator.fleet.bad_answers import BadAnswerError
from paceline_orchestrator.fleet.discovery import Availability, Endpoint, Role
from paceline_orchestrator.fleet.server import ModelServer
from paceline_orchestrator.fleet.server_metrics import count_servers
from paceline_orchestrator.fleet.silence import SilenceError
from paceline_orchestrator.fleet.standing import Orders, standings
from paceline_orchestrator.fleet.standing_log import StandingLog
from paceline_orchestrator.fleet.words import Standing, Word
from paceline_orchestrator.front.translation import server_message
from support.fake_models import FakeModelServer
from support.ports import free_address
from support.waiting import until as soon
from unit.orchestrator.test_pool import a_pool

ODD = {
    Word.OTHER_MODEL: (
        {"fingerprint": "elsewhere", "model_name": "another"},
        "its model is another (elsewhere), that of most targets fake-target (target-model)",
    ),
    Word.OTHER_TOKENIZER: ({"fingerprint": "elsewhere", "tokenizer": b"x"}, "its tokenizer is "),
    Word.OTHER_DTYPE: (
        {"fingerprint": "elsewhere", "dtype": "float16"},
        "it computes in float16, most targets in float32",
    ),
    Word.OTHER_INVARIANCE: (
        {"is_invariant": True},
        "it runs with --invariant, most targets without",
    ),
}


def a_target(**options):
    return FakeModelServer("target", **{"dtype": "float32", **options})


def a_drafter(**options):
    return FakeModelServer("drafter", **options)


def word_on(pool, name):
    return standing_of(pool, name).word


def standing_of(pool, name):
    return next(standing for it, standing in pool.standings().items() if it.name == name)


async def stands(pool, name, word):
    """Return the sentence on a server once it has this word."""
    await soon(
        lambda: any(it.name == name for it in pool.servers) and word_on(pool, name) is word,
        what=f"{name} is {word}",
    )
    return standing_of(pool, name).detail


async def logged(caplog, *words):
    await soon(lambda: any(all(it in line for it in words) for line in caplog.messages), what=words)


# --- healthy, and not used ------------------------------------------------------------------------


@pytest.mark.parametrize("word", ODD)
async def test_a_target_that_does_not_go_with_most_is_told_of_everywhere(word, caplog):
    differs, sentence = ODD[word]
    registry = CollectorRegistry()
    async with a_pool(a_target(), a_target(), a_target(**differs)) as pool:
        count_servers(registry, pool)
        await stands(pool, "target-0", Word.USED)
        await stands(pool, "target-1", Word.USED)
        assert sentence in await stands(pool, "target-2", word)
        assert [it.name for it in pool.targets(pool.model())] == ["target-0", "target-1"]
        await logged(caplog, "target-2 is not used: ", sentence)
        (server,) = (it for it in pool.servers if it.name == "target-2")
        told = server_message(server, standing_of(pool, "target-2"))
    assert not told.ready
    assert told.standing == pb.ServerStanding.Value(f"SERVER_STANDING_{word.name}")
    assert sentence in told.standing_detail
    assert told.status.startswith(f"{word.name}: ")
    assert count(registry, "target", word) == 1
    assert count(registry, "target", Word.USED) == 2
    assert registry.get_sample_value("paceline_ready_servers", {"role": "target"}) == 2


@pytest.mark.parametrize(
    ("own", "most", "words"),
    [
        ('{"a": 1}', '{"a": 2}', "its config.json has a 1, most targets' 2; if it is the same"),
        ('{"a": 1, "b": 1}', '{"c": 1}', "has a 1, most targets' missing and 2 more of its keys"),
        ('{"c": null}', "{}", "has c null, most targets' missing; if"),
        ('{"b": {"c": 1, "d": 5}}', '{"b": {"c": 1}}', "has b.d 5, most targets' missing; if"),
        ('{"b": 1}', '{"b": {"c": 1}}', 'has b 1, most targets\' {"c": 1}; if'),
        ('{"a": true}', '{"a": 1}', "its config.json is not that of most targets; if it is"),
        (f'{{"{"k" * 99}": "{"v" * 99}"}}', "{}", f'has {"k" * 37}... "{"v" * 36}..., most'),
        ("[1]", "[2]", "its config.json is not that of most targets; if it is the same"),
        ("[" * 9999, "{}", "its config.json is not that of most targets; if it is the same"),
        ('{"a": 1}', '{"a": 1}', "; its config.json says the same, so its weights are others"),
        ("", '{"a": 1}', "that of most targets fake-target (target-model)"),
    ],
)
async def test_a_target_of_another_model_is_told_of_with_the_first_key_that_differs(
    own, most, words
):
    others = [a_target(configuration=most) for _ in range(2)]
    async with a_pool(*others, a_target(fingerprint="elsewhere", configuration=own)) as pool:
        sentence = await stands(pool, "target-2", Word.OTHER_MODEL)
    assert words in sentence
    assert ("config.json" in sentence) is bool(own and most)


async def test_weights_are_not_blamed_for_what_else_differs():
    model = {"fingerprint": "elsewhere", "configuration": "{}"}
    odd = [{"dtype": "float16"}, {"tokenizer": b"x"}, {"eos_ids": (1,)}]
    targets = [a_target(configuration="{}") for _ in range(4)]
    async with a_pool(*targets, *(a_target(**model, **it) for it in odd)) as pool:
        await soon(lambda: len(pool.standings()) == 7, what="all are known")
        for index in (4, 5, 6):
            await soon(lambda it=index: standing_of(pool, f"target-{it}").detail, what="it is told")
            assert "weights" not in standing_of(pool, f"target-{index}").detail


def count(registry, role, word):
    return registry.get_sample_value("paceline_servers", {"role": role, "standing": word})


async def test_a_promise_of_the_same_bits_is_never_mixed_with_none():
    """Of one with it and one without, the one with it serves: who asked for it keeps it."""
    async with a_pool(a_target(), a_target(is_invariant=True)) as pool:
        await stands(pool, "target-1", Word.USED)
        await stands(pool, "target-0", Word.OTHER_INVARIANCE)
        assert pool.model().is_invariant
        assert [it.name for it in pool.targets(pool.model())] == ["target-1"]


async def test_a_drafter_with_another_tokenizer_is_told_of_without_any_request(caplog):
    async with a_pool(a_target(), a_drafter(tokenizer=b"x")) as pool:
        sentence = await stands(pool, "drafter-1", Word.OTHER_TOKENIZER)
        assert sentence.startswith("its tokenizer is ")
        await logged(caplog, "drafter-1 is not used: its tokenizer is ")
        with pytest.raises(errors.TokenizerMismatchError):
            pool.drafters(pool.model())


async def test_a_server_that_is_listed_under_two_names_counts_once(caplog):
    def listed(servers):
        port = servers[0].address.rpartition(":")[2]
        return [
            Endpoint("a", servers[0].address, Role.TARGET),
            Endpoint("b", f"localhost:{port}", Role.TARGET),
        ]

    async with a_pool(a_target(incarnation="one"), listed=listed) as pool:
        assert "it is a, at another address" in await stands(pool, "b", Word.LISTED_TWICE)
        assert [it.name for it in pool.targets(pool.model())] == ["a"]
        await logged(caplog, "b is not used: it is a, at another address")


class Ancient(FakeModelServer):
    """A server that is well, and has none of our services."""

    def register(self, server):
        pass


async def test_a_server_that_does_not_know_the_question_is_too_old(caplog):
    async with a_pool(a_target(), Ancient("target")) as pool:
        await stands(pool, "target-1", Word.TOO_OLD)
        await logged(caplog, "target-1 is not used: it does not know what it is asked")


# --- not well -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "cause"),
    [("there.is.no.such.name.invalid:1", "there.is.no.such.name"), ("127.0.0.1:1", "refused")],
)
async def test_why_a_server_cannot_be_reached_is_told(address, cause, monkeypatch, caplog):
    monkeypatch.setattr(health_watch, "_APPROACH_SECONDS", 0.2)

    def listed(servers):
        return [
            Endpoint("t", servers[0].address, Role.TARGET),
            Endpoint("nowhere", address, Role.TARGET),
        ]

    async with a_pool(a_target(), listed=listed) as pool:
        await soon(
            lambda: len(pool.servers) == 2 and cause in standing_of(pool, "nowhere").detail,
            what="the cause is known",
        )
        assert word_on(pool, "nowhere") is Word.UNREACHABLE
        await logged(caplog, "nowhere is not used: it cannot be reached: ", cause)


async def test_a_server_that_loads_is_told_from_one_that_drains():
    target = a_target(is_loading=True)
    async with a_pool(a_target(), target) as pool:
        await target.set_serving(False)
        await stands(pool, "target-1", Word.LOADING)
        target.is_loading = False
        await target.set_serving(True)
        await stands(pool, "target-1", Word.USED)
        await target.set_serving(False)
        await stands(pool, "target-1", Word.DRAINING)


async def test_a_server_that_loads_for_long_is_never_said_to_shut_down(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(health_watch, "_APPROACH_SECONDS", 0.1)
    asked, health_changes = [], health_watch.health_changes

    def counted(channel, *, seconds):
        asked.append(channel)
        return health_changes(channel, seconds=seconds)

    monkeypatch.setattr(health_watch, "health_changes", counted)
    target = a_target(is_loading=True)
    async with a_pool(a_target(), target) as pool:
        await target.set_serving(False)
        await logged(caplog, "target-1 is not used: its model is not loaded yet")
        (loading,) = (it.channel for it in pool.servers if it.name == "target-1")
        await soon(lambda: asked.count(loading) >= 5, what="its health was asked for again")
    assert not [it for it in caplog.messages if "it shuts down" in it]


@pytest.mark.parametrize(
    ("error", "word", "words"),
    [
        (errors.LoadingError("not yet"), Word.LOADING, "its model is not loaded yet"),
        (errors.DrainingError("bye"), Word.DRAINING, "it is shutting down"),
        (errors.UnsupportedError("what?"), Word.TOO_OLD, "it does not know what it is asked"),
        (errors.UnauthenticatedError("who?"), Word.REFUSES, "takes no calls from this orchestr"),
        (errors.PermissionDeniedError("no"), Word.REFUSES, "takes no calls from this orchestr"),
        (BadAnswerError("dtype is wrong"), Word.BAD_ANSWER, "what it must not: dtype is wrong"),
        (errors.InternalError("oh"), Word.FAILING, "it cannot say how it is: INTERNAL (oh)"),
        (errors.DeadlineError("late"), Word.SILENT, "does not say what it is"),
        (errors.ConnectionLostError("gone"), Word.UNREACHABLE, "it cannot be reached: gone"),
        (ValueError("unforeseen"), Word.UNWATCHED, "it cannot be watched (ValueError)"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Exception) else "",
)
async def test_what_a_server_says_instead_of_what_it_is_has_its_word(
    error, word, words, monkeypatch
):
    async def fetch_facts(_models):
        raise error

    monkeypatch.setattr(health_watch, "fetch_facts", fetch_facts)
    async with a_pool(a_target()) as pool:
        await soon(
            lambda: pool.servers and words in standing_of(pool, "target-0").detail, what=words
        )
        assert word_on(pool, "target-0") is word


@pytest.mark.parametrize(
    ("error", "word", "words"),
    [
        (errors.InternalError("oh"), Word.FAILING, "calls to it failed (INTERNAL)"),
        (errors.OverloadedError("full"), Word.FAILING, "calls to it failed (OVERLOADED)"),
        (BadAnswerError("proposal is long"), Word.BAD_ANSWER, "must not: proposal is long"),
        (SilenceError("nothing"), Word.SILENT, "it has to compute a token for a probe first"),
    ],
    ids=lambda it: type(it).__name__ if isinstance(it, Exception) else "",
)
async def test_what_calls_failed_of_is_the_word_for_as_long_as_a_server_pauses(error, word, words):
    async with a_pool(a_target()) as pool:
        await stands(pool, "target-0", Word.USED)
        (server,) = pool.servers
        pool.report_failure(server, error, asked_at=time.monotonic())
        standing = standing_of(pool, "target-0")
        assert standing.word is word
        assert words in standing.detail


async def test_what_discovery_says_of_a_server_is_its_word():
    def listed(servers):
        return [
            Endpoint("a", servers[0].address, Role.TARGET),
            Endpoint("b", servers[1].address, Role.TARGET, availability=Availability.NOT_READY),
            Endpoint("c", servers[2].address, Role.TARGET, availability=Availability.TERMINATING),
        ]

    async with a_pool(a_target(), a_target(), a_target(), listed=listed) as pool:
        await stands(pool, "a", Word.USED)
        await stands(pool, "b", Word.LOADING)
        await stands(pool, "c", Word.DRAINING)


# --- resting, and what else there is to say -------------------------------------------------------


async def test_a_server_that_no_request_takes_rests_and_says_why():
    async with a_pool(a_target(), a_target(), a_drafter()) as pool:
        await soon(
            lambda: len(pool.servers) == 3 and all(it.ready for it in pool.servers),
            what="they are there",
        )
        drafter, taken, spare = pool.servers
        for turn in range(20):
            pool.orders.begin("non-SI: 30.0 ms per token (SI: 40.0 ms per token)")
            pool.note_order_at(taken)
            assert (word_on(pool, "drafter-2") is Word.RESTING) == (turn >= 9)
            assert (word_on(pool, spare.name) is Word.RESTING) == (turn >= 19)
        assert "did with other targets: it is a spare" in standing_of(pool, spare.name).detail
        detail = standing_of(pool, "drafter-2").detail
        assert detail == (
            "the last 20 requests did without a drafter;"
            " AUTO last took non-SI: 30.0 ms per token (SI: 40.0 ms per token)"
        )
        assert word_on(pool, taken.name) is Word.USED
        assert {it.name for it in pool.targets(pool.model())} == {taken.name, spare.name}
        drafter.session_count = 1
        assert word_on(pool, "drafter-2") is Word.USED
        drafter.session_count = 0
        pool.note_order_at(drafter)
        assert word_on(pool, "drafter-2") is Word.USED


async def test_what_keeps_a_server_from_a_part_of_the_work_is_said():
    rules = (VerificationRule.EXACT, VerificationRule.REJECTION)
    slow = a_target(forward_latencies=((1, 900_000_000),), takes_trees=False, rules=rules)
    like = [a_target(forward_latencies=((1, 30_000_000),), rules=rules) for _ in range(2)]
    async with a_pool(slow, *like, a_drafter(context_length=512)) as pool:
        await soon(
            lambda: len(pool.servers) == 4 and all(it.ready for it in pool.servers),
            what="they are there",
        )
        assert standing_of(pool, "target-0") == Standing(
            Word.USED, "it takes 900.0 ms for a token, most targets 30.0 ms; it takes chains alone"
        )
        assert standing_of(pool, "target-1") == Standing(Word.USED)
        assert standing_of(pool, "drafter-3") == Standing(
            Word.USED,
            "its context is 512 tokens, the longest 4096: longer texts go on without it;"
            " it works for no request under REJECTION",
        )


async def test_a_target_with_a_shorter_context_than_its_like_is_used_and_told_of():
    async with a_pool(a_target(), a_target(context_length=512)) as pool:
        await soon(
            lambda: len(pool.servers) == 2 and all(it.ready for it in pool.servers),
            what="they are there",
        )
        assert standing_of(pool, "target-1") == Standing(
            Word.USED, "its context is 512 tokens, the longest 4096: longer texts go on without it"
        )
        assert len(pool.targets(pool.model())) == 2


async def test_a_target_that_drafts_for_itself_with_something_else_is_told_of():
    async with a_pool(a_target(self_draft_depth=3), a_target()) as pool:
        await stands(pool, "target-1", Word.USED)
        await soon(lambda: all(it.ready for it in pool.servers), what="both are there")
        assert standing_of(pool, "target-0").detail == (
            "it drafts for itself with fake, others with nothing"
        )
        assert standing_of(pool, "target-1").detail == (
            "it drafts for itself with nothing, others with fake"
        )


async def test_servers_that_share_hardware_say_with_whom():
    whole, half = Hardware("gpu 1", 1.0), Hardware("cpu 1", 0.5)
    servers = [a_target(hardware=it) for it in (whole, half, None)]
    async with a_pool(*servers, a_drafter(hardware=half), a_drafter(hardware=whole)) as pool:
        await soon(
            lambda: len(pool.servers) == 5 and all(it.ready for it in pool.servers),
            what="they are there",
        )
        assert standing_of(pool, "target-0").detail == (
            "it shares its hardware with drafter-4: for DSI they count as fewer"
        )
        assert "with target-0" in standing_of(pool, "drafter-4").detail
        for name in ("target-1", "target-2", "drafter-3"):
            assert standing_of(pool, name) == Standing(Word.USED), "there is room for both"


async def test_a_drafter_without_any_target_rests():
    async with a_pool(a_drafter()) as pool:
        words = await stands(pool, "drafter-0", Word.RESTING)
        assert words == "no target has said yet what there is to draft for"


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.0.7", "it is of version 0.0.7, "), ("", "it is too old to say its version, ")],
)
async def test_a_server_of_another_minor_version_is_used_and_told_of(version, words):
    async with a_pool(a_target(version=version), a_target()) as pool:
        await stands(pool, "target-1", Word.USED)
        assert (await stands(pool, "target-0", Word.USED)).startswith(words)


class Counted(ModelServer):
    """A server that counts how often it is looked at."""

    looks = 0

    @property
    def hardware(self):
        Counted.looks += 1
        return super().hardware


async def test_hundreds_of_servers_are_not_each_compared_with_all_others(monkeypatch):
    monkeypatch.setattr(Counted, "looks", 0)
    async with a_pool(a_target(hardware=Hardware("gpu 1", 1.0))) as pool:
        await stands(pool, "target-0", Word.USED)
        facts = pool.servers[0].facts
    servers = []
    for index in range(300):
        server = Counted(Endpoint(f"t{index}", f"h:{index}", Role.TARGET), MagicMock())
        server.adopt(facts)
        server.health_status = None
        servers.append(server)
    told = standings(servers, model=facts, orders=Orders())
    assert {it.word for it in told.values()} == {Word.USED}
    assert all(len(it.detail) < 100 for it in told.values()), "a few names are enough"
    assert Counted.looks <= 10 * len(servers)


# --- the log --------------------------------------------------------------------------------------


async def test_a_server_that_comes_back_is_told_of_again(caplog):
    drafter = a_drafter(address=free_address(), tokenizer=b"x")
    async with a_pool(a_target(), drafter) as pool:
        for time in (1, 2):
            await stands(pool, "drafter-1", Word.OTHER_TOKENIZER)
            await soon(lambda n=time: caplog.text.count("is not used: its tok") == n, what="told")
            await drafter.kill()
            await stands(pool, "drafter-1", Word.UNREACHABLE)
            await drafter.start()


def test_a_server_that_comes_and_goes_all_the_time_has_ten_lines_and_then_one_in_ten_seconds(
    caplog,
):
    caplog.set_level("INFO")
    now, word = 0.0, Word.USED
    server = ServerOfAName("t")
    log = StandingLog(lambda: {server: Standing(word)}, clock=lambda: now)
    for _ in range(1000):
        now += 0.1
        word = Word.FAILING if word is Word.USED else Word.USED
        log.look()
    assert len(caplog.messages) <= 10 + 100 / standing_log._LINE_SECONDS
    assert len(caplog.messages) >= 10


def test_what_has_not_changed_is_not_told_and_who_is_gone_is_forgotten(caplog):
    caplog.set_level("INFO")
    standings = {ServerOfAName("t"): Standing(Word.RESTING, "it is a spare")}
    log = StandingLog(lambda: standings)
    for _ in range(3):
        log.look()
    assert caplog.messages == ["t is resting: it is a spare"]
    standings.clear()
    log.look()
    log.look()
    assert caplog.messages[1:] == ["t is not listed any more"]


async def test_a_bug_in_what_is_told_ends_nothing_and_is_logged_once(caplog):
    caplog.set_level("INFO")
    answers = [ValueError("a bug"), ValueError("a bug"), {ServerOfAName("t"): Standing(Word.USED)}]

    def standings():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    log = StandingLog(standings)
    running = asyncio.ensure_future(log.run())
    while answers and not running.done():
        log.look_soon()
        await asyncio.sleep(0)
    assert not running.done()
    running.cancel()
    assert caplog.messages == ["how servers stand could not be told", "t is used"]


class ServerOfAName:
    health_status = None
    trouble = None

    def __init__(self, name):
        self.name = name


def test_every_word_is_on_the_wire():
    names = {f"SERVER_STANDING_{it.name}" for it in Word}
    assert set(pb.ServerStanding.keys()) == names | {"SERVER_STANDING_UNSPECIFIED"}
