"""Model servers that say what they must not cost a request a fallback, and others nothing."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager
from itertools import count

import pytest
from grpc_health.v1.health_pb2 import HealthCheckResponse

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.model_service_pb2 import ChatTemplate
from paceline.v1.sampling_pb2 import VERIFICATION_RULE_REJECTION, SamplingParameters
from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import SAMPLING_PARAMETERS
from paceline_orchestrator.decoding.answers import AnswerChecks
from paceline_orchestrator.fleet import health_watch
from support.fake_text import continuation
from support.orchestrating import PROMPT
from support.virtual_servers import VirtualServer, drafters, targets
from support.virtual_system import VirtualDiscovery, now, virtual_system
from support.virtual_time import virtually

TOKENS = 24
RIGHT = continuation(PROMPT, TOKENS)
PLAIN = {"strategy": pb.STRATEGY_AUTOREGRESSIVE}
SI = {"strategy": pb.STRATEGY_SPECULATIVE, "lookahead": 3}
DSI = {"strategy": pb.STRATEGY_DISTRIBUTED, "lookahead": 3, "target_count": 2, "drafter_count": 1}
WAYS = [PLAIN, SI, DSI]
# For so long a server may keep a call that it says it has, beside one that answers.
ENDURED_SECONDS = 10.0
SHAPES = {"samples_by": SAMPLING_PARAMETERS}


class Liar(VirtualServer):
    """A server that says what a test wants, instead of what is so.

    Attributes:
        error: What it answers calls with; None: as it should.
        grant: What it does to what OpenSession answers.
        claimed: What it says which call of a session it has; None: the newest.
    """

    error: errors.PacelineError | None = None
    claimed: int | None = None

    def grant(self, grant):
        return grant

    async def open(self, spec):
        return self.grant(await super().open(spec))

    def call(self, request):
        if self.error is not None:
            self.calls.append(request)
            raise self.error
        return super().call(request)

    def renew(self, session_id):
        super().renew(session_id)
        return self.live.get(session_id, 0) if self.claimed is None else self.claimed

    @property
    def health(self):
        return 1  # SERVING, whatever hangs


def a_liar(role, **options):
    return Liar(role, name=f"{role}-0", **options)


def an_honest_target():
    return VirtualServer("target", name="target-1")


def beside_honest_servers(liar):
    """Run a system in which another target, and a drafter, can do the work."""
    others = [an_honest_target(), *drafters(1)] if liar.role == "target" else targets(1)
    return virtual_system(liar, *others)


def set_timing(**fields):
    def distort(message):
        for name, value in fields.items():
            setattr(message.timing, name, value)

    return distort


def add_stages(message):
    for _ in range(5000):
        message.timing.stages.add(forward_count=2**32 - 1, forward_ns=2**64 - 1)


def add_tokens(message):
    proposal = getattr(message, "proposal", None)
    listed = message.token_ids if proposal is None else proposal.token_ids
    listed.extend([1] * 500_000)


def name_no_token(message):
    if hasattr(message, "next_token_id"):
        message.next_token_id = 2**32 - 1
    elif hasattr(message, "proposal"):
        message.proposal.token_ids[0] = 2**32 - 1
    else:
        message.token_ids[0] = 2**32 - 1


def add_distributions(message):
    if hasattr(message, "proposal"):
        message.proposal.distributions.add(token_ids=[1], probabilities=[math.nan])
    else:
        message.timing.queue_ns = 2**64 - 1


def add_a_loop(message):
    """Propose tokens that follow themselves."""
    if hasattr(message, "proposal"):
        message.proposal.token_ids.append(1)
        message.proposal.parents.extend([2**31] * len(message.proposal.token_ids))
    else:
        message.start_length = 2**32 - 1


LIES = {
    "a wait of centuries": set_timing(queue_ns=2**64 - 1),
    "a forward of centuries": set_timing(forward_ns=2**64 - 1),
    "billions of forwards": set_timing(forward_count=2**32 - 1),
    "billions of rows": set_timing(row_count=2**32 - 1),
    "billions of others' rows": set_timing(shared_row_count=2**32 - 1),
    "billions of calls in a forward": set_timing(shared_call_count=2**32 - 1),
    "billions of tokens that were there": set_timing(reused_token_count=2**32 - 1),
    "thousands of stages": add_stages,
    "half a million tokens": add_tokens,
    "no token of the vocabulary": name_no_token,
    "distributions of nothing": add_distributions,
    "a loop of tokens": add_a_loop,
}


@pytest.mark.parametrize("way", WAYS, ids=["plain", "si", "dsi"])
@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("lie", LIES)
@virtually
async def test_an_answer_that_must_not_be_costs_the_server_that_gave_it(lie, role, way):
    liar = a_liar(role, distort=LIES[lie])
    async with beside_honest_servers(liar) as system:
        stream = await system.generate(max_tokens=TOKENS, **way)
        assert stream.token_ids == RIGHT
        if liar.calls:
            assert stream.fallbacks[f"{role}_lost"]
            assert system.server(liar.name).pause_count
        assert len(liar.calls) < 10, "it was asked again and again"


def log_probability(value):
    def distort(message):
        for index in range(len(message.logprobs)):
            message.logprobs[index] = value

    return distort


def likeliest(**fields):
    def distort(message):
        del message.top_logprobs[:]
        for _ in message.logprobs:
            message.top_logprobs.add(**fields)

    return distort


@pytest.mark.parametrize(
    "distort",
    [
        log_probability(math.nan),
        log_probability(math.inf),
        log_probability(-math.inf),
        log_probability(0.5),
        lambda message: message.ClearField("logprobs"),
        lambda message: message.ClearField("top_logprobs"),
        likeliest(token_ids=[1, 2], logprobs=[-2.0, -1.0]),
        likeliest(token_ids=[1, 2], logprobs=[-1.0]),
        likeliest(token_ids=[1, 1], logprobs=[-1.0, -2.0]),
        likeliest(token_ids=[1, 2], logprobs=[-1.0, math.nan]),
        likeliest(token_ids=[1], logprobs=[1.0]),
    ],
)
@pytest.mark.parametrize("way", WAYS, ids=["plain", "si", "dsi"])
@virtually
async def test_no_client_gets_log_probabilities_that_are_none(way, distort):
    liar = a_liar("target", distort=distort)
    async with beside_honest_servers(liar) as system:
        stream = await system.generate(max_tokens=TOKENS, logprobs=True, top_logprobs=2, **way)
        assert stream.token_ids == RIGHT
        told = [logprob for chunk in stream.chunks for logprob in chunk.logprobs]
        assert len(told) == TOKENS
        assert all(map(math.isfinite, told))
        assert max(told) <= 0


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("way", WAYS, ids=["plain", "si", "dsi"])
@pytest.mark.parametrize(
    "error",
    [
        errors.SupersededError("a newer call came"),
        errors.StaleCallError("a newer call came"),
        errors.SessionNotFoundError("no such session"),
        errors.PrefixMismatchError("other tokens"),
        errors.PrefixNotHeldError("fewer", metadata={"held_length": "-5"}),
        errors.OverloadedError("full", retry_after_seconds=1e-9),
        errors.OverloadedError("full", retry_after_seconds=-1e9),
        errors.InvalidFieldError("wrong"),
        errors.MalformedRequestError("no message"),
        errors.UnsupportedError("not here"),
        errors.InternalError("broken"),
        errors.DeadlineError("too late"),
        errors.LoadingError("a while", retry_after_seconds=10.0**18),
        errors.ClientCancelledError("gone"),
    ],
    ids=repr,
)
@virtually
async def test_whatever_a_server_refuses_calls_with_another_does_the_work(error, way, role):
    liar = a_liar(role)
    liar.error = error
    async with beside_honest_servers(liar) as system:
        stream = await system.generate(max_tokens=TOKENS, **way)
        assert stream.token_ids == RIGHT
        seconds = stream.ended - stream.began
        assert seconds < 5
        assert len(liar.calls) <= 6 + 10 * seconds, "it was asked as fast as it answers"


@pytest.mark.parametrize("way", WAYS, ids=["plain", "si", "dsi"])
@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidFieldError("wrong"),
        errors.MalformedRequestError("no"),
        errors.UnsupportedError("not here"),
    ],
    ids=repr,
)
@virtually
async def test_what_every_target_refuses_ends_at_once_and_says_so(error, way):
    models = targets(2)
    liars = [Liar("target", name=it.name) for it in models]
    for liar in liars:
        liar.error = error
    async with virtual_system(*liars, *drafters(1)) as system:
        began = now()
        with pytest.raises(errors.UnsupportedError, match="every target refuses"):
            await system.generate(**way)
        assert now() - began < 1


@virtually
async def test_what_every_target_of_its_model_refuses_is_no_business_of_another_models():
    models = targets(2)
    liars = [Liar("target", name=it.name) for it in models]
    for liar in liars:
        liar.error = errors.UnsupportedError("not here")
    other = VirtualServer("target", name="target-2", fingerprint="another model")
    async with virtual_system(*liars, other) as system:
        began = now()
        with pytest.raises(errors.UnsupportedError, match="every target refuses"):
            await system.generate(**PLAIN)
        assert now() - began < 1
        assert not other.calls


@pytest.mark.parametrize("error", [errors.SupersededError("newer"), errors.StaleCallError("newer")])
@virtually
async def test_a_lone_target_that_drops_each_call_is_not_asked_as_fast_as_it_answers(error):
    liar = a_liar("target")
    liar.error = error
    async with virtual_system(liar) as system:
        with pytest.raises(errors.PacelineError) as caught:
            await system.generate(seconds=20)
        assert not isinstance(caught.value, errors.InternalError)
        assert len(liar.calls) < 20


def with_field(name, value):
    def grant(granted):
        setattr(granted, name, value)
        return granted

    return grant


def lease_of(seconds):
    def grant(granted):
        granted.lease.seconds = seconds
        return granted

    return grant


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize(
    "grant",
    [
        with_field("session_id", ""),
        with_field("session_id", "x" * 1_000_000),
        lease_of(0),
        lease_of(-1),
        lease_of(10**11),
    ],
)
@virtually
async def test_a_session_that_must_not_be_is_not_used(grant, role):
    liar = a_liar(role)
    liar.grant = grant
    async with beside_honest_servers(liar) as system:
        assert (await system.generate(max_tokens=TOKENS, **DSI)).token_ids == RIGHT
        assert not liar.calls
        assert "BAD_ANSWER" in system.server(liar.name).status


@virtually
async def test_two_sessions_with_one_name_are_none():
    liar = a_liar("target")
    liar.grant = with_field("session_id", "the only one")
    async with virtual_system(liar, an_honest_target()) as system, asyncio.TaskGroup() as tasks:
        requests = [tasks.create_task(system.generate(max_tokens=TOKENS)) for _ in range(6)]
        for request in requests:
            assert (await request).token_ids == RIGHT
        assert "session_id" in system.server(liar.name).status


# --- "I still have your call" ---------------------------------------------------------------------


def a_keeper_of_calls(role, **options):
    liar = a_liar(role, **options)
    liar.is_stuck = True
    return liar


@pytest.mark.parametrize("way", WAYS, ids=["plain", "si", "dsi"])
@virtually
async def test_a_target_that_only_says_it_has_the_call_does_not_keep_the_request(way):
    liar = a_keeper_of_calls("target")
    async with beside_honest_servers(liar) as system:
        stream = await system.generate(max_tokens=TOKENS, **way)
        assert stream.token_ids == RIGHT
        assert stream.fallbacks["deadline"] == 1
        assert stream.ended - stream.began < ENDURED_SECONDS + 5
        await system.until(lambda: system.server(liar.name).status == "SILENT")
        after = await system.generate(max_tokens=TOKENS, **way)
        assert after.ended - after.began < 3, "it waited there, too"


@pytest.mark.parametrize("way", [SI, DSI], ids=["si", "dsi"])
@virtually
async def test_a_drafter_that_only_says_it_has_the_call_is_done_without(way):
    liar = a_keeper_of_calls("drafter")
    async with virtual_system(liar, *targets(2)) as system:
        stream = await system.generate(max_tokens=800, **way)
        assert stream.token_ids == continuation(PROMPT, 800)
        assert stream.fallbacks["deadline"] == 1
        await system.until(lambda: system.server(liar.name).status == "SILENT")


@pytest.mark.parametrize("live", [2, 2**64 - 1])
@virtually
async def test_a_call_that_was_never_sent_is_not_in_sight(live):
    liar = a_keeper_of_calls("target")
    liar.claimed = live
    async with virtual_system(liar, an_honest_target()) as system:
        stream = await system.generate(max_tokens=TOKENS, **PLAIN)
        assert stream.token_ids == RIGHT
        assert stream.ended - stream.began < 5


@virtually
async def test_a_target_that_says_its_forwards_take_an_hour_does_not_keep_the_request():
    class Sloth(Liar):
        def info(self):
            said = super().info()
            del said.forward_latencies[:]
            said.forward_latencies.add(rows=1, median_ns=3600 * 10**9)
            said.prefill_ns_per_token = 3600 * 10**9
            return said

    liar = Sloth("target", name="target-0")
    liar.is_stuck = True
    async with virtual_system(liar, an_honest_target()) as system:
        stream = await system.generate(max_tokens=TOKENS, **PLAIN)
        assert stream.token_ids == RIGHT
        assert stream.ended - stream.began < 2 * ENDURED_SECONDS


@virtually
async def test_a_target_that_works_on_a_long_prompt_is_waited_for_beside_one_that_idles():
    """Each would take 200 s. Who moved would begin anew."""
    rows = 1000
    both = targets(2, row_seconds=0.2, latency_seconds=0.01)
    async with virtual_system(*both) as system:
        prompt = pb.TokenIds(ids=[it % 50 for it in range(rows)])
        stream = await system.generate(token_ids=prompt, max_tokens=2, seconds=600, **PLAIN)
        assert not stream.fallbacks
        assert sum(len(it.calls) for it in both) == 1
        assert stream.ended - stream.began > 190


@virtually
async def test_a_target_late_with_few_rows_is_waited_for_while_another_would_need_the_whole_text():
    liar = a_liar("target", row_seconds=0.05)
    other = VirtualServer("target", name="target-1", row_seconds=0.05)
    async with virtual_system(liar, other, *drafters(1)) as system, asyncio.TaskGroup() as tasks:
        prompt = pb.TokenIds(ids=[it % 50 for it in range(1000)])
        request = tasks.create_task(
            system.generate(token_ids=prompt, max_tokens=400, seconds=600, **SI)
        )
        await asyncio.sleep(55)
        assert len(liar.calls) > 10, "the prompt is computed"
        liar.get_stuck(True)
        await asyncio.sleep(40)
        liar.get_stuck(False)
        assert not (await request).fallbacks
        assert not other.calls


@pytest.mark.parametrize(
    "others",
    [[], [{}], [{"law": "0"}], [{"verse": "a"}]],
    ids=["no other", "none", "another of the name", "its numbers under another name"],
)
@virtually
async def test_a_target_that_no_other_with_its_adapter_can_replace_is_waited_for(others):
    liar = a_keeper_of_calls("target", lora_fingerprints={"law": "a"})
    models = [VirtualServer("target", name="target-1", lora_fingerprints=it) for it in others]
    async with virtual_system(liar, *models) as system, asyncio.TaskGroup() as tasks:
        request = tasks.create_task(
            system.generate(max_tokens=TOKENS, seconds=300, lora="law", **PLAIN)
        )
        await asyncio.sleep(100)
        liar.get_stuck(False)
        stream = await request
        assert stream.token_ids == RIGHT
        assert not stream.fallbacks
        assert not any(it.calls for it in models)


@virtually
async def test_a_target_that_no_other_with_the_sampling_can_replace_is_waited_for():
    liar, older = a_keeper_of_calls("target", **SHAPES), VirtualServer("target", name="target-1")
    async with virtual_system(liar, older) as system, asyncio.TaskGroup() as tasks:
        asked = {"sampling": SamplingParameters(frequency_penalty=1), **PLAIN}
        request = tasks.create_task(system.generate(max_tokens=TOKENS, seconds=300, **asked))
        await asyncio.sleep(100)
        liar.get_stuck(False)
        stream = await request
        assert stream.token_ids == RIGHT
        assert stream.fallbacks == {}
        assert older.calls == []


@virtually
async def test_a_target_that_only_says_it_has_the_call_is_left_for_one_with_its_adapter():
    liar = a_keeper_of_calls("target", lora_fingerprints={"law": "a"})
    honest = VirtualServer("target", name="target-1", lora_fingerprints={"law": "a"})
    async with virtual_system(liar, honest) as system:
        stream = await system.generate(max_tokens=TOKENS, lora="law", **PLAIN)
        assert stream.token_ids == RIGHT
        assert stream.fallbacks["deadline"] == 1
        assert stream.ended - stream.began < ENDURED_SECONDS + 5


@virtually
async def test_busy_targets_are_not_left_for_each_other():
    """Both work on others' prompts for a minute; neither would answer sooner."""
    both = [a_keeper_of_calls("target"), Liar("target", name="target-1", is_stuck=True)]
    async with virtual_system(*both) as system, asyncio.TaskGroup() as tasks:
        requests = [
            tasks.create_task(system.generate(max_tokens=TOKENS, seconds=300, **PLAIN))
            for _ in range(2)
        ]
        await asyncio.sleep(60)
        for target in both:
            target.get_stuck(False)
        for request in requests:
            stream = await request
            assert stream.token_ids == RIGHT
            assert not stream.fallbacks
        assert all(it.ready for it in system.pool.servers)


@virtually
async def test_what_no_check_foresees_costs_the_server_and_not_the_stream(monkeypatch, caplog):
    honest = AnswerChecks.decoded

    def break_down(self, decoded, *, options):
        if self._server.name == "target-0":
            raise ValueError("nobody thought of this")
        honest(self, decoded, options=options)

    monkeypatch.setattr(AnswerChecks, "decoded", break_down)
    async with virtual_system(a_liar("target"), an_honest_target()) as system:
        stream = await system.generate(max_tokens=TOKENS, **PLAIN)
        assert stream.token_ids == RIGHT
    assert "an answer of target-0 could not be read" in caplog.messages


# --- what a server says of itself -----------------------------------------------------------------


class Talker(Liar):
    """A target that says of its model, or of its health, what a test wants."""

    said: object = staticmethod(lambda info: None)
    watch: object = None

    def info(self):
        told = super().info()
        self.said(told)
        return told

    async def _watch(self, request, context):
        answers = self.watch() if self.watch is not None else super()._watch(request, context)
        async for state in answers:
            yield state


@asynccontextmanager
async def beside_an_honest_target(talker):
    """Run a system that need not wait for the talker."""
    honest = an_honest_target()
    discovery = VirtualDiscovery(honest, talker)
    async with virtual_system(honest, talker, discovery=discovery) as system:
        await asyncio.sleep(1)  # on a virtual clock
        yield system
        assert (await system.generate(max_tokens=TOKENS, **DSI)).token_ids == RIGHT


def latencies(*table):
    def said(info):
        del info.forward_latencies[:]
        for rows, median_ns in table:
            info.forward_latencies.add(rows=rows, median_ns=median_ns)

    return said


FORBIDDEN = {
    "model_name": lambda it: setattr(it, "model_name", "x" * 1_000_000),
    "fingerprint": lambda it: setattr(it, "fingerprint", ""),
    "tokenizer_fingerprint": lambda it: setattr(it, "tokenizer_fingerprint", "x" * 65),
    "vocabulary_size": lambda it: setattr(it, "vocabulary_size", 0),
    "context_length": lambda it: setattr(it, "context_length", 0),
    "eos_token_ids": lambda it: it.eos_token_ids.append(2**32 - 1),
    "fim_token_ids": lambda it: it.fim_token_ids.extend([1, 2]),
    "verification_rules": lambda it: it.verification_rules.extend([1] * 1000),
    "forward_latencies": latencies(*((rows + 1, 1) for rows in range(1000))),
    "forward_latencies.rows": latencies((2, 1), (1, 1)),
    "forward_latencies.median_ns": latencies((1, 2**64 - 1)),
    "prefill_fixed_ns": lambda it: setattr(it, "prefill_fixed_ns", 2**64 - 1),
    "prefill_ns_per_token": lambda it: setattr(it, "prefill_ns_per_token", 2**64 - 1),
    "tree_token_limit": lambda it: setattr(it, "tree_token_limit", 2**32 - 1),
    "tree_depth_limit": lambda it: setattr(it, "tree_depth_limit", 2**32 - 1),
    "self_draft_depth": lambda it: setattr(it, "self_draft_depth", 2**32 - 1),
    "self_draft_kind": lambda it: setattr(it, "self_draft_kind", "x" * 65),
    "incarnation": lambda it: setattr(it, "incarnation", "x" * 65),
    "dtype": lambda it: setattr(it, "dtype", "x" * 65),
    "version": lambda it: setattr(it, "version", "x" * 65),
    "grammar_engine": lambda it: setattr(it, "grammar_engine", "x" * 65),
    "sampling_parameters has more": lambda it: it.sampling_parameters.extend(["x"] * 5000),
    "sampling_parameters has what": lambda it: it.sampling_parameters.append("x" * 65),
    "sampling_defaults.top_p": lambda it: setattr(it.sampling_defaults, "top_p", math.nan),
    "lora_adapters.name": lambda it: it.lora_adapters.add(name="a b", fingerprint="it"),
    "stages": lambda it: [it.stages.add() for _ in range(5000)],
    "stages.model_name": lambda it: it.stages.add(model_name="x" * 1_000_000),
    "hardware.identity": lambda it: setattr(it.hardware, "identity", "x" * 65),
    "hardware.share": lambda it: (
        setattr(it.hardware, "identity", "gpu"),
        setattr(it.hardware, "share", math.nan),
    ),
}


@pytest.mark.parametrize("field", FORBIDDEN)
@virtually
async def test_a_server_that_says_of_its_model_what_it_must_not_is_not_used(field, caplog):
    talker = Talker("target", name="target-0")
    talker.said = FORBIDDEN[field]
    async with beside_an_honest_target(talker) as system:
        status = system.server("target-0").status
        assert status.startswith("BAD_ANSWER")
        assert field in status
        assert len(status) < 200
        await asyncio.sleep(60)
    assert not talker.specs
    told = [it for it in caplog.messages if it.startswith("target-0 is not used") and field in it]
    assert len(told) == 1


@virtually
async def test_a_target_that_has_no_chat_template_does_not_speak_for_the_others():
    """Its version may be too old to know the question."""
    first, second = models = targets(2)
    asked = pb.GetSystemChatTemplateRequest()
    async with virtual_system(*models) as system:
        for target in (second, first):
            first.chat_template = second.chat_template = None
            target.chat_template = ChatTemplate(fingerprint="it", source="{{ messages }}")
            told = await system.servicer.GetSystemChatTemplate(asked, None)
            assert told.chat_template.source == "{{ messages }}"
        first.chat_template = None
        with pytest.raises(errors.UnsupportedError, match="no chat template"):
            await system.servicer.GetSystemChatTemplate(asked, None)


@virtually
async def test_a_chat_template_is_not_denied_while_a_target_is_away_that_could_have_it():
    models = targets(2)
    second = models[1]
    second.chat_template = ChatTemplate(fingerprint="it", source="{{ messages }}")
    asked = pb.GetSystemChatTemplateRequest()
    async with virtual_system(*models) as system:
        await second.kill()
        for _ in range(2):  # first the call fails, then it is known that the target is away
            with pytest.raises(errors.NoTargetError):
                await system.servicer.GetSystemChatTemplate(asked, None)
            await system.until(lambda: not system.server(second.name).ready)
        await second.start()
        await system.until(lambda: system.server(second.name).ready)
        told = await system.servicer.GetSystemChatTemplate(asked, None)
        assert told.chat_template.source == "{{ messages }}"


@pytest.mark.parametrize(
    ("ability", "asked"),
    [
        (
            {"rules": (VerificationRule.EXACT, VerificationRule.REJECTION)},
            {"verification_rule": VERIFICATION_RULE_REJECTION},
        ),
        (SHAPES, {"sampling": SamplingParameters(frequency_penalty=1)}),
        (
            {**SHAPES, "grammar_engine": "it"},
            {"sampling": SamplingParameters(grammar={"regex": "a"})},
        ),
        ({"scores_prompts": True}, {"prompt_logprobs": 0}),
        ({"self_draft_depth": 3}, {"strategy": pb.STRATEGY_SELF_SPECULATIVE}),
    ],
    ids=["a rule", "penalties", "grammars", "prompts' scores", "own guesses"],
)
@virtually
async def test_what_only_a_target_can_do_that_is_away_is_not_called_unsupported(ability, asked):
    plain = VirtualServer("target", name="target-0", scores_prompts=False)
    able = VirtualServer("target", name="target-1", **{"scores_prompts": False, **ability})
    async with virtual_system(plain, able) as system:
        await able.kill()
        await system.until(lambda: not system.server(able.name).ready)
        with pytest.raises(errors.NoTargetError, match="away"):
            await system.generate(**{**PLAIN, **asked})
    async with virtual_system(plain) as system:
        with pytest.raises(errors.UnsupportedError):
            await system.generate(**{**PLAIN, **asked})


@virtually
async def test_a_server_that_comes_to_its_senses_is_used():
    talker = Talker("target", name="target-0")
    talker.said = FORBIDDEN["hardware.share"]
    async with beside_an_honest_target(talker) as system:
        talker.said = lambda _: None
        await system.until(lambda: system.server("target-0").ready)


@virtually
async def test_what_nobody_foresaw_of_one_server_ends_its_watch_alone(monkeypatch, caplog):
    honest = health_watch.fetch_facts

    async def fetch_facts(models):
        facts = await honest(models)
        if facts.model_name == "the unforeseen":
            raise ValueError("nobody thought of this")
        return facts

    monkeypatch.setattr(health_watch, "fetch_facts", fetch_facts)
    talker = Talker("target", name="target-0")
    talker.said = lambda it: setattr(it, "model_name", "the unforeseen")
    async with beside_an_honest_target(talker) as system:
        await asyncio.sleep(60)
        assert system.server("target-0").status == "FAILED: ValueError"
        monkeypatch.undo()
        await system.until(lambda: system.server("target-0").ready)
    assert caplog.messages.count("target-0 could not be watched") == 1


async def all_the_time():
    for turn in count():
        await asyncio.sleep(0.001)
        yield HealthCheckResponse(status=1 + turn % 2)


async def and_ends():
    yield HealthCheckResponse(status=1)


async def at_once():
    raise errors.DeadlineError("the time is over")
    yield


@pytest.mark.parametrize("watch", [all_the_time, and_ends, at_once])
@virtually
async def test_no_health_stream_keeps_the_orchestrator_busy(watch):
    talker = Talker("target", name="target-0")
    talker.watch = watch
    async with beside_an_honest_target(talker) as system:
        await asyncio.sleep(60)
        assert len(system.records("GetModelInfo", server="target-0")) < 25 * 60
        assert talker.link.watch_count < 30


@virtually
async def test_a_dead_server_is_connected_to_now_and_then():
    dead = Talker("target", name="target-0")
    async with beside_an_honest_target(dead):
        await dead.kill()
        await asyncio.sleep(60)
        assert 10 < dead.link.watch_count < 30
