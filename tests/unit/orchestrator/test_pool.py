"""Which servers are used: health, pauses after failures, discovery, load."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from paceline import errors
from paceline.v1.model_service_pb2 import GetTokenizerResponse, LoraAdapter
from paceline.v1.model_service_pb2_grpc import ModelServiceStub
from paceline_contract.calls import CallTiming, VerificationRule
from paceline_contract.sampling import SAMPLING_PARAMETERS
from paceline_orchestrator.decoding import probe
from paceline_orchestrator.fleet import pauses, shortage
from paceline_orchestrator.fleet.bad_answers import BadAnswerError, check_model_info
from paceline_orchestrator.fleet.discovery import Availability, Endpoint, Role, StaticDiscovery
from paceline_orchestrator.fleet.fitting import unapplied
from paceline_orchestrator.fleet.pool import ServerPool
from paceline_orchestrator.fleet.silence import SilenceError
from paceline_orchestrator.fleet.wire import fetch_tokenizer
from paceline_orchestrator.fleet.words import Word
from paceline_serving.transport import pod_channel
from support.fake_models import FakeModelServer, serving
from support.ports import free_address
from support.waiting import until as soon

LONGEST_WAIT_SECONDS = 90.0


class ChangingDiscovery:
    """Endpoint sets that a test hands out."""

    def __init__(self):
        self.sets = asyncio.Queue()

    async def endpoints(self):
        while True:
            yield await self.sets.get()


def endpoint(server, name):
    return Endpoint(name, server.address, Role(server.role))


@asynccontextmanager
async def a_pool(*servers, discovery=None, listed=None):
    """Run fake servers and a pool of them; `listed` makes their endpoints, if not one for each."""
    async with serving(*servers):
        named = [endpoint(it, f"{it.role}-{i}") for i, it in enumerate(servers)]
        pool = ServerPool(
            discovery or StaticDiscovery(listed(servers) if listed else named),
            open_channel=lambda it: pod_channel(it.address, credentials=None),
            probe=probe.answers,
        )
        async with pool:
            yield pool


async def until(pool, condition):
    changed = asyncio.Event()
    async with asyncio.timeout(LONGEST_WAIT_SECONDS):
        with pool.listening(changed.set):
            while not condition():
                await changed.wait()
                changed.clear()


def fail(pool, server, error):
    """Report that a call failed that was made just now."""
    pool.report_failure(server, error, asked_at=time.monotonic())


def target_names(pool):
    return [it.name for it in pool.servers if it.role is Role.TARGET and it.ready]


async def test_a_server_is_used_while_it_says_that_it_serves():
    target = FakeModelServer("target")
    async with a_pool(target) as pool:
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        await target.set_serving(False)
        await until(pool, lambda: not target_names(pool))
        with pytest.raises(errors.NoTargetError):
            pool.model()
        assert pool.servers[0].status == "NOT_SERVING"
        await target.set_serving(True)
        assert (await pool.wait_for_model(LONGEST_WAIT_SECONDS)).fingerprint == "target-model"


async def test_a_server_that_was_killed_is_used_again_when_it_is_back():
    target = FakeModelServer("target", address=free_address())
    async with a_pool(target) as pool:
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        await target.kill()
        await until(pool, lambda: not target_names(pool))
        target.fingerprint = "a newer model"
        await target.start()
        assert (await pool.wait_for_model(LONGEST_WAIT_SECONDS)).fingerprint == "a newer model"


async def test_a_server_in_the_wrong_role_gets_no_work_and_says_why(caplog):
    def listed(servers):
        return [Endpoint("target-0", servers[0].address, Role.TARGET)]

    async with a_pool(FakeModelServer("drafter"), listed=listed) as pool:
        await soon(lambda: pool.servers and pool.servers[0].facts, what="it was reached")
        (server,) = pool.servers
        await soon(lambda: not server.health_status, what="it says that it is well")
        assert (server.ready, server.status) == (False, "is a drafter, not a target")
        with pytest.raises(errors.NoTargetError, match="target-0: is a drafter, not a target"):
            pool.model()
        assert pool.last_model() is None
        assert pool.standings()[server].word is Word.OTHER_ROLE
    assert caplog.messages.count("target-0 is not used: it is a drafter, not a target") == 1


@pytest.mark.parametrize("cancels", [True, False])
async def test_whether_withdrawn_forwards_stop_is_asked_of_the_server(cancels):
    async with a_pool(FakeModelServer("target", cancels_forwards=cancels)) as pool:
        model = await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        assert model.cancels_forwards is cancels


async def test_the_model_is_still_known_when_its_last_target_has_died():
    target = FakeModelServer("target")
    async with a_pool(target) as pool:
        assert pool.last_model() is None
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        await target.kill()
        await until(pool, lambda: not target_names(pool))
        with pytest.raises(errors.NoTargetError, match=r"no target is ready \(target-0: "):
            pool.model()
        assert pool.last_model().fingerprint == "target-model"


@pytest.mark.parametrize("role", ["target", "drafter"])
async def test_a_server_that_was_silent_gets_no_work_before_it_has_computed_a_token(
    role, monkeypatch
):
    monkeypatch.setattr("paceline_orchestrator.decoding.probe._PROBE_SECONDS", 0.3)
    monkeypatch.setattr("paceline_orchestrator.fleet.pauses._PROBE_PAUSES_SECONDS", (0.01, 0.01))
    fake = FakeModelServer(role)
    async with a_pool(fake, *([FakeModelServer("target")] if role == "drafter" else [])) as pool:
        await until(pool, lambda: pool.servers and all(it.ready for it in pool.servers))
        server = next(it for it in pool.servers if it.role == role)
        fake.faults.extend(["hang", "fail"])
        fail(pool, server, SilenceError("it is silent"))
        await until(pool, lambda: not server.ready)
        assert server.status == "SILENT"
        # Nothing else lets it in meanwhile: not what fails in another way, nor its health.
        fail(pool, server, errors.ConnectionLostError("it broke"))
        await fake.set_serving(False)
        await until(pool, lambda: server.status == "NOT_SERVING")
        await fake.set_serving(True)
        await until(pool, lambda: server.ready)
        assert len(fake.calls) >= 3, "one probe hung, one failed; more may have been late"
        await fake.until(lambda it: not it.sessions and not it.running)


async def test_the_pool_ends_while_it_probes_a_silent_server():
    fake = FakeModelServer("target")
    async with a_pool(fake) as pool:
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        fake.faults.extend(["hang"] * 9)
        fail(pool, pool.servers[0], SilenceError("it is silent"))
        await fake.until(lambda it: it.running == 1)


async def test_a_server_that_is_gone_is_not_probed():
    fake, discovery = FakeModelServer("target"), ChangingDiscovery()
    async with a_pool(fake, discovery=discovery) as pool:
        await discovery.sets.put(frozenset({endpoint(fake, "it")}))
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        (server,) = pool.servers
        fake.faults.extend(["hang"] * 9)
        pool.suspect(server)
        await fake.until(lambda it: it.running == 1)
        await fake.set_serving(False)
        await until(pool, lambda: server.status == "NOT_SERVING")
        await discovery.sets.put(frozenset())
        await until(pool, lambda: not pool.servers)
        await soon(lambda: not probes(), what="its probe is cancelled")
        fail(pool, server, SilenceError("it is silent"))
        assert not probes()


def probes():
    return [it for it in asyncio.all_tasks() if it.get_name().startswith("pool: probe")]


async def test_a_suspect_that_answers_is_left_at_work():
    fake = FakeModelServer("target")
    async with a_pool(fake) as pool:
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        (server,) = pool.servers
        pool.suspect(server)
        await fake.until(lambda it: it.closed == 1)
        assert server.ready


async def test_new_requests_get_the_model_of_most_targets():
    fingerprints = ("b", "a", "b")
    servers = [FakeModelServer("target", fingerprint=it) for it in fingerprints]
    async with a_pool(*servers) as pool:
        await until(pool, lambda: len(target_names(pool)) == 3)
        assert pool.model().fingerprint == "b"
        assert len(pool.targets(pool.model())) == 2


async def test_a_target_that_says_other_things_of_the_same_model_speaks_for_itself_alone():
    odd, *others = [FakeModelServer("target") for _ in range(3)]
    odd.eos_ids = (1,)
    odd.tokenizer = b"{}"
    async with a_pool(odd, *others) as pool:
        await until(pool, lambda: len([it for it in pool.servers if it.ready]) == 3)
        model = pool.model()
        assert model.eos_token_ids == frozenset(others[0].eos_ids)
        assert sorted(it.name for it in pool.targets(model)) == ["target-1", "target-2"]
        odd_standing = pool.standings()[pool.servers[0]]
        assert "its end tokens are others than most targets'" in odd_standing.detail


async def test_discovery_adds_and_removes_servers():
    first, second = FakeModelServer("target"), FakeModelServer("target")
    discovery = ChangingDiscovery()
    async with a_pool(first, second, discovery=discovery) as pool:
        await discovery.sets.put(frozenset({endpoint(first, "a")}))
        await until(pool, lambda: target_names(pool) == ["a"])
        await discovery.sets.put(frozenset({endpoint(second, "b")}))
        await until(pool, lambda: target_names(pool) == ["b"])
        await second.kill()
        await until(pool, lambda: not target_names(pool))
        await discovery.sets.put(frozenset())
        await soon(lambda: not pool.servers, what="the dead one is forgotten")


@pytest.mark.parametrize("how", ["vanished", "not ready"])
async def test_servers_that_discovery_loses_all_at_once_stay_in_use_while_they_say_they_serve(
    how, caplog
):
    targets = [FakeModelServer("target") for _ in range(2)]
    discovery = ChangingDiscovery()
    async with a_pool(*targets, discovery=discovery) as pool:
        known = [endpoint(it, name) for it, name in zip(targets, "ab", strict=True)]
        await discovery.sets.put(frozenset(known))
        await until(pool, lambda: target_names(pool) == ["a", "b"])
        lost = [replace(it, availability=Availability.NOT_READY) for it in known]
        await discovery.sets.put(frozenset(lost if how == "not ready" else ()))
        await soon(lambda: "does not say that they are ready: a, b" in caplog.text, what="it says")
        assert target_names(pool) == ["a", "b"]
        await targets[0].set_serving(False)
        await until(pool, lambda: target_names(pool) == ["b"])
        await targets[0].set_serving(True)
        await until(pool, lambda: target_names(pool) == ["a", "b"])
        await discovery.sets.put(frozenset({known[1]}))
        await until(pool, lambda: target_names(pool) == ["b"])


async def test_a_server_that_vanished_with_all_others_is_forgotten_when_it_dies():
    targets = [FakeModelServer("target") for _ in range(2)]
    discovery = ChangingDiscovery()
    async with a_pool(*targets, discovery=discovery) as pool:
        await discovery.sets.put(frozenset({endpoint(it, it.address) for it in targets}))
        await until(pool, lambda: len(target_names(pool)) == 2)
        await discovery.sets.put(frozenset())
        await targets[0].kill()
        await soon(lambda: len(pool.servers) == 1, what="the dead one is forgotten")
        assert target_names(pool) == [targets[1].address]


async def test_a_target_that_was_terminating_when_it_vanished_is_not_kept():
    target, drafter = FakeModelServer("target"), FakeModelServer("drafter")
    discovery = ChangingDiscovery()
    async with a_pool(target, drafter, discovery=discovery) as pool:
        terminating = replace(endpoint(target, "a"), availability=Availability.TERMINATING)
        await discovery.sets.put(frozenset({endpoint(target, "a"), endpoint(drafter, "d")}))
        await until(pool, lambda: all(it.ready for it in pool.servers) and len(pool.servers) == 2)
        await discovery.sets.put(frozenset({terminating}))
        await until(pool, lambda: not target_names(pool))
        await discovery.sets.put(frozenset())
        await soon(lambda: len(pool.servers) == 1, what="the target that terminated is forgotten")
        assert [it.role for it in pool.servers] == [Role.DRAFTER]


async def test_hundreds_of_servers_come_and_go_without_holding_up_the_loop():
    turn, busy_turns = 0, []

    class Channel:
        def __init__(self, address):
            self._channel = pod_channel(address, credentials=None)
            busy_turns.append(turn)

        def __getattr__(self, name):
            return getattr(self._channel, name)

        async def close(self, grace):
            busy_turns.append(turn)
            await self._channel.close(grace)

    async def count_turns():
        nonlocal turn
        while True:
            await asyncio.sleep(0)
            turn += 1

    discovery = ChangingDiscovery()
    nobody = [Endpoint(f"t{i}", f"127.0.0.{i + 1}:1", Role.TARGET) for i in range(100)]
    counting = asyncio.create_task(count_turns())
    async with ServerPool(
        discovery, open_channel=lambda it: Channel(it.address), probe=probe.answers
    ) as pool:
        await discovery.sets.put(frozenset(nobody))
        await soon(lambda: len(pool.servers) == 100, what="they are known")
        await discovery.sets.put(frozenset())
        await soon(lambda: len(busy_turns) == 200, what="the last channel is closed")
    counting.cancel()
    assert len(set(busy_turns)) == 200, "one channel a turn"


async def test_a_pool_that_finds_nobody_says_so():
    async with a_pool() as pool:
        with pytest.raises(errors.NoTargetError):
            await pool.wait_for_model(0.01)


def pod(server, availability, *, uid="the pod"):
    return Endpoint("a", server.address, Role.TARGET, uid, availability=availability)


async def test_a_pod_is_one_server_with_one_channel_through_all_its_states():
    target = FakeModelServer("target")
    discovery = ChangingDiscovery()
    async with a_pool(target, discovery=discovery) as pool:
        await discovery.sets.put(frozenset({pod(target, Availability.NOT_READY)}))
        await soon(lambda: pool.servers and pool.servers[0].facts, what="it was reached")
        (server,) = pool.servers
        assert (server.ready, server.leaving, server.status) == (False, False, "NOT_READY")
        await discovery.sets.put(frozenset({pod(target, Availability.READY)}))
        await until(pool, lambda: server.ready)
        assert server.ready_since > 0
        await discovery.sets.put(frozenset({pod(target, Availability.TERMINATING)}))
        await until(pool, lambda: server.leaving)
        assert (server.ready, server.status) == (False, "TERMINATING")
        with pytest.raises(errors.NoTargetError):
            pool.model()
        assert pool.servers == [server]
        await discovery.sets.put(frozenset())
        await soon(lambda: not pool.servers, what="it is gone")


async def test_a_pod_of_the_same_name_at_another_address_is_another_server():
    first, second = FakeModelServer("target"), FakeModelServer("target")
    discovery = ChangingDiscovery()
    async with a_pool(first, second, discovery=discovery) as pool:
        await discovery.sets.put(frozenset({pod(first, Availability.READY)}))
        await until(pool, lambda: target_names(pool) == ["a"])
        (old,) = pool.servers
        await discovery.sets.put(frozenset({pod(second, Availability.READY)}))
        await until(pool, lambda: pool.servers and pool.servers[0] is not old)
        assert [it.endpoint.address for it in pool.servers] == [second.address]


async def test_a_server_that_failed_for_hours_still_pauses_for_seconds():
    async with a_pool(FakeModelServer("target")) as pool:
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        server = pool.servers[0]
        server.failure_count = 2000
        fail(pool, server, errors.InternalError("it broke"))
        assert server.status == "INTERNAL"


class Garbled(FakeModelServer):
    """A server whose answer about its model is of another world."""

    answer = b"\x0a\x02\xff\xfe"  # a name that is no UTF-8

    def register(self, server):
        async def say(_request, _context):
            return self.answer

        async def stream(_request, _context):
            yield GetTokenizerResponse(data=b"a piece").SerializeToString()
            yield self.answer

        methods = {
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(say),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(stream),
        }
        service = "paceline.v1.ModelService"
        handler = grpc.method_handlers_generic_handler(service, methods)
        server.add_generic_rpc_handlers((handler,))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Garbled.answer, "cannot be decoded"),
        (b"\x00", "cannot be decoded"),
        (b"\x0a\xff\xff\xff\x02" + b"x" * 6_291_455, "larger than any may be"),
    ],
    ids=["no UTF-8", "no message", "six megabytes"],
)
async def test_a_server_whose_answer_cannot_be_decoded_is_not_used_and_ends_nothing(answer, words):
    garbled, well = Garbled("target"), FakeModelServer("target")
    garbled.answer = answer
    async with a_pool(garbled, well) as pool:
        await until(pool, lambda: target_names(pool) == ["target-1"])
        said = "why the server is not used"
        await soon(lambda: pool.servers[0].status.startswith("BAD_ANSWER"), what=said)
        assert words in pool.servers[0].status
        assert pool.model().fingerprint == "target-model"


async def test_a_stream_never_looks_complete_where_a_message_of_it_cannot_be_decoded():
    garbled = Garbled("target")
    async with serving(garbled):
        channel = pod_channel(garbled.address, credentials=None)
        with pytest.raises(BadAnswerError, match="cannot be decoded"):
            await fetch_tokenizer(ModelServiceStub(channel), name="it")
        await channel.close(None)


# --- what is remembered of a process, when another one is at its address --------------------------

TEXT = list(range(64))


@asynccontextmanager
async def a_process_that_was_learnt_of(incarnation="first"):
    """Yield a pool, its only target, and what the pool knows of it after a call to it."""
    target = FakeModelServer(
        "target",
        address=free_address(),
        incarnation=incarnation,
        forward_latencies=((1, 9_000_000),),
    )
    async with a_pool(target) as pool:
        await pool.wait_for_model(LONGEST_WAIT_SECONDS)
        (server,) = pool.servers
        timing = CallTiming(
            queue_ns=80_000_000, forward_ns=20_000_000, forward_count=1, row_count=1
        )
        server.latency.observe(timing, elapsed_ns=200_000_000)
        pool.familiarity.text(TEXT, share="a").note(server.process_name)
        fail(pool, server, errors.OverloadedError("full"))
        assert (server.latency.step_ns, server.pause_status) == (20_000_000, "OVERLOADED")
        yield pool, target, server


async def comes_back(target, server, **otherwise):
    await target.kill()
    await soon(lambda: server.health_status, what="it is seen to be gone")
    for name, value in otherwise.items():
        setattr(target, name, value)
    await target.start()
    await soon(lambda: not server.health_status, what="it is back")


def length_at(pool, server):
    return pool.familiarity.text(TEXT, share="a").length_at(server.process_name)


async def test_of_the_process_before_at_an_address_nothing_is_believed_of_the_next_one():
    async with a_process_that_was_learnt_of() as (pool, target, server):
        assert length_at(pool, server) == 64
        await comes_back(
            target,
            server,
            incarnation="second",
            fingerprint="another",
            forward_latencies=((1, 5_000_000),),
        )
        assert server.facts.fingerprint == "another"
        assert server.latency.step_ns == 5_000_000
        assert (server.latency.call_ns, server.latency.queue_ns) == (None, 0)
        assert server.latency.other_calls == 0
        assert length_at(pool, server) == 0
        assert server.ready, "the one before had no room, this one has"


@pytest.mark.parametrize("incarnation", ["first", ""])
async def test_a_process_whose_connection_broke_is_known_as_before(incarnation, monkeypatch):
    monkeypatch.setattr(pauses, "_FIRST_PAUSE_SECONDS", 60.0)
    monkeypatch.setattr(pauses, "_LAST_PAUSE_SECONDS", 60.0)
    async with a_process_that_was_learnt_of(incarnation) as (pool, target, server):
        await comes_back(target, server)
        assert server.latency.step_ns == 20_000_000
        assert length_at(pool, server) == 64
        assert server.status == "OVERLOADED"


async def test_a_silent_server_that_was_restarted_has_to_compute_a_token_all_the_same(monkeypatch):
    answered = asyncio.Event()

    async def answers(_server):
        await answered.wait()
        return pauses.Probed.TOKEN

    monkeypatch.setattr(probe, "answers", answers)
    async with a_process_that_was_learnt_of() as (pool, target, server):
        fail(pool, server, SilenceError("nothing"))
        await comes_back(target, server, incarnation="second")
        assert server.status == "SILENT"
        answered.set()
        await until(pool, lambda: server.ready)


async def test_a_lora_adapter_is_what_most_targets_have_under_its_name():
    loras = [{"law": "a", "verse": "v"}, {"law": "b"}, {"law": "b"}, {}]
    fakes = [FakeModelServer("target", lora_fingerprints=each) for each in loras]
    other = FakeModelServer("target", fingerprint="other", lora_fingerprints={"prose": "p"})
    async with a_pool(*fakes, other) as pool:
        await until(pool, lambda: len(target_names(pool)) == 5)
        assert pool.lora_adapters() == {"law": "b", "verse": "v"}
        law = pool.model(lora="law")
        assert (law.fingerprint, law.lora) == ("b", "law")
        assert {it.name for it in pool.targets(law)} == {"target-1", "target-2"}
        assert [it.name for it in pool.targets(pool.model(lora="verse"))] == ["target-0"]
        assert len(pool.targets(pool.model())) == 4


async def test_a_model_with_an_adapter_can_do_what_the_targets_with_the_adapter_can():
    large = FakeModelServer(
        "target",
        context_length=4000,
        samples_by=SAMPLING_PARAMETERS,
        grammar_engine="an engine",
        rules=tuple(VerificationRule),
    )
    small = FakeModelServer(
        "target", context_length=100, scores_prompts=False, lora_fingerprints={"law": "a"}
    )
    async with a_pool(large, small) as pool:
        await until(pool, lambda: len(target_names(pool)) == 2)

        def abilities(it):
            shapes = not unapplied(frozenset({"min_tokens"}), it, it)
            does = shapes, it.scores_prompts, it.rejection_sampling
            return it.context_length, *does, bool(it.grammar_engine)

        assert abilities(pool.model()) == (4000, True, True, True, True)
        assert abilities(pool.model(lora="law")) == (100, False, False, False, False)
        told = pool.standings()[pool.servers[1]].detail
        shaping = "frequency_penalty, logit_bias, min_tokens, presence_penalty"
        for words in (f"with {shaping}", "with prompt_logprobs", "with a grammar: it has none"):
            assert f"it works for no request {words}" in told


async def test_an_adapter_that_no_target_has_is_not_found_and_one_that_is_away_is_waited_for():
    able, plain = (
        FakeModelServer("target", lora_fingerprints={"law": "a"}),
        FakeModelServer("target"),
    )
    async with a_pool(able, plain) as pool:
        await until(pool, lambda: len(target_names(pool)) == 2)
        with pytest.raises(errors.ModelNotFoundError, match="no target has a LoRA adapter 'x'"):
            await pool.wait_for_model(LONGEST_WAIT_SECONDS, lora="x")
        await able.set_serving(False)
        await until(pool, lambda: target_names(pool) == ["target-1"])
        with pytest.raises(errors.NoTargetError, match="no target with the LoRA adapter 'law'"):
            pool.model(lora="law")
        waiting = asyncio.create_task(pool.wait_for_model(LONGEST_WAIT_SECONDS, lora="law"))
        await able.set_serving(True)
        assert (await waiting).fingerprint == "a"


async def test_adapters_are_listed_while_their_targets_pause_and_the_ready_ones_count_first():
    fakes = [FakeModelServer("target", lora_fingerprints={"law": it}) for it in ("a", "a", "b")]
    async with a_pool(*fakes) as pool:
        await until(pool, lambda: len(target_names(pool)) == 3)
        assert pool.lora_adapters() == {"law": "a"}
        for server in pool.servers[:2]:
            server.pause_status = "INTERNAL"
        assert pool.lora_adapters() == {"law": "b"} == {"law": pool.model(lora="law").fingerprint}
        pool.servers[2].pause_status = "INTERNAL"
        assert pool.lora_adapters() == {"law": "a"}


async def test_an_adapter_may_be_at_a_target_that_has_not_said_yet_what_it_has():
    able = FakeModelServer("target", lora_fingerprints={"law": "a"}, is_loading=True)
    async with a_pool(able, FakeModelServer("target")) as pool:
        await until(pool, lambda: target_names(pool) == ["target-1"])
        with pytest.raises(errors.NoTargetError, match="'law', and target-0 has not said yet"):
            pool.model(lora="law")
        waiting = asyncio.create_task(pool.wait_for_model(LONGEST_WAIT_SECONDS, lora="law"))
        unknown = asyncio.create_task(pool.wait_for_model(LONGEST_WAIT_SECONDS, lora="x"))
        able.is_loading = False
        assert (await waiting).fingerprint == "a"
        with pytest.raises(errors.ModelNotFoundError):
            await unknown


async def test_a_target_that_says_for_a_minute_nothing_hides_no_unknown_adapter(monkeypatch):
    mute = FakeModelServer("target", is_loading=True)
    async with a_pool(mute, FakeModelServer("target")) as pool:
        await until(pool, lambda: target_names(pool) == ["target-1"])
        with pytest.raises(errors.NoTargetError, match="target-0 has not said yet"):
            pool.model(lora="law")
        monkeypatch.setattr(shortage, "AWAY_SECONDS", 0.0)
        with pytest.raises(errors.ModelNotFoundError, match="no target has a LoRA adapter 'law'"):
            pool.model(lora="law")


async def test_an_adapter_is_away_while_its_pod_is_replaced_and_unknown_after_a_minute(monkeypatch):
    able, again, plain = (
        *(FakeModelServer("target", lora_fingerprints={"law": "a"}) for _ in range(2)),
        FakeModelServer("target"),
    )
    discovery = ChangingDiscovery()
    async with a_pool(able, again, plain, discovery=discovery) as pool:
        others = {endpoint(plain, "b")}
        await discovery.sets.put(frozenset({endpoint(able, "a"), *others}))
        await until(pool, lambda: target_names(pool) == ["a", "b"])
        await able.kill()
        await discovery.sets.put(frozenset(others))
        await soon(lambda: [it.name for it in pool.servers] == ["b"], what="it is gone")
        with pytest.raises(errors.NoTargetError, match="no target with the LoRA adapter 'law'"):
            pool.model(lora="law")
        assert pool.lora_adapters() == {"law": "a"}
        with pytest.raises(errors.ModelNotFoundError):
            pool.model(lora="x")
        waiting = asyncio.create_task(pool.wait_for_model(LONGEST_WAIT_SECONDS, lora="law"))
        await discovery.sets.put(frozenset({endpoint(again, "a"), *others}))
        assert (await waiting).fingerprint == "a"
        await again.kill()
        await discovery.sets.put(frozenset(others))
        await soon(lambda: [it.name for it in pool.servers] == ["b"], what="it is gone")
        monkeypatch.setattr(shortage, "ADAPTER_SECONDS", 0.0)
        assert not pool.lora_adapters()
        with pytest.raises(errors.ModelNotFoundError):
            pool.model(lora="law")


async def test_an_adapter_of_another_model_is_not_waited_for():
    other = FakeModelServer(
        "target", fingerprint="other", model_name="small", lora_fingerprints={"prose": "p"}
    )
    both = [FakeModelServer("target", model_name="large") for _ in range(2)]
    async with a_pool(other, *both) as pool:
        await until(pool, lambda: len(target_names(pool)) == 3)
        words = "no target has a LoRA adapter 'prose' of 'large'; target-0 has one of 'small'"
        with pytest.raises(errors.ModelNotFoundError, match=words):
            await pool.wait_for_model(LONGEST_WAIT_SECONDS, lora="prose")


@pytest.mark.parametrize(
    "adapters",
    [
        [("", "f")],
        [("a b", "f")],
        [("n" * 65, "f")],
        [("a", "")],
        [("a", "f" * 257)],
        [("a", "f"), ("a", "g")],
        [(f"a{index}", "f") for index in range(65)],
    ],
    ids=["no name", "odd", "long", "no fingerprint", "long fingerprint", "twice", "many"],
)
def test_what_a_server_must_not_say_of_its_adapters_is_not_believed(adapters):
    info = FakeModelServer("target").info()
    check_model_info(info)
    info.lora_adapters.extend(
        LoraAdapter(name=name, fingerprint=fingerprint) for name, fingerprint in adapters
    )
    with pytest.raises(BadAnswerError, match="lora_adapters"):
        check_model_info(info)
