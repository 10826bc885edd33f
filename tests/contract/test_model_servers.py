"""The promises of the protos that drafters and targets serve.

Each test runs against a fake host and the real one with the simulated backend, both behind the real
servicers, interceptors and gRPC. With --target or --drafter it runs against a server at an address
instead, if it needs to know no more of it than what the wire says.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import tracemalloc
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from paceline.errors import (
    CacheExhaustedError,
    DrainingError,
    InvalidFieldError,
    LoadingError,
    MalformedRequestError,
    ModelMismatchError,
    OverloadedError,
    PacelineError,
    PrefixMismatchError,
    PrefixNotHeldError,
    SessionNotFoundError,
    StaleCallError,
    SupersededError,
    UnsupportedError,
)
from paceline.status import decode
from paceline.v1 import (
    drafter_service_pb2,
    model_service_pb2,
    sampling_pb2,
    session_service_pb2,
    target_service_pb2,
)
from paceline_engine.backends.base import TokenMemory
from paceline_engine.backends.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.calls import SessionSpec
from paceline_engine.host import HostLimits, ModelHost
from paceline_model_server import loading
from paceline_model_server.records import CallRecorder
from paceline_model_server.settings import ModelServerSettings
from support.fake_host import FakeHost
from support.model_servers import DRAFTER, TARGET, ModelClient, decoded, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paceline_model_server.host import Host

PROMPT = (5, 6, 7, 8)
NEVER_SECONDS = 600.0


ROLES = {"target": TARGET, "drafter": DRAFTER}
KINDS = ["fake", "simulated"]


def pytest_generate_tests(metafunc):
    """Let `target` and `drafter` be one of each kind, or the one that is at an address."""
    for role in ROLES.keys() & metafunc.fixturenames:
        address = metafunc.config.getoption(f"--{role}")
        metafunc.parametrize(role, [address] if address else KINDS, indirect=True)


@pytest.fixture(autouse=True)
def _only_what_can_be_tested_at_an_address(request):
    asked_for = {role for role in ROLES if request.config.getoption(f"--{role}")}
    used = ROLES.keys() & set(request.fixturenames)
    if asked_for and not used:
        pytest.skip("it needs the inside of a server")
    if asked_for and not used <= asked_for:
        pytest.skip(f"no address was given for a {', '.join(used - asked_for)}")


def host_maker(kind: str) -> Callable[..., Any]:
    """Make hosts of one kind; a stalling one answers each session's first forward only."""

    def fake(*, stalls: bool = False, **limits: Any) -> Host:
        return FakeHost(limits=HostLimits(**limits), stalls=stalls)

    def simulated(*, stalls: bool = False, **limits: Any) -> Host:
        model = SimulatedModel(
            ttft_seconds=0, tpot_seconds=NEVER_SECONDS if stalls else 0, vocabulary_size=300
        )
        return ModelHost(
            lambda: SimulatedBackend(model), limits=HostLimits(warm_up_rounds=0, **limits)
        )

    return fake if kind == "fake" else simulated


@pytest.fixture(params=KINDS)
def new_host(request) -> Callable[..., Any]:
    return host_maker(request.param)


@asynccontextmanager
async def connected(role: Any, host: Any, **settings: Any) -> AsyncIterator[ModelClient]:
    async with serving(role, host, **settings) as process:
        client = await ModelClient(role, process.addresses["address"]).learn()
        client.host = host
        try:
            yield client
        finally:
            await client.channel.close()


@asynccontextmanager
async def found(role: Any, kind_or_address: str) -> AsyncIterator[ModelClient]:
    """Connect to a new server of a kind, or to the one at an address, and leave nothing there."""
    if kind_or_address in KINDS:
        async with connected(role, host_maker(kind_or_address)()) as client:
            yield client
        return
    client = await ModelClient(role, kind_or_address).learn()
    if client.info.role != role.wire:
        pytest.fail(f"{kind_or_address} is no {role.name}", pytrace=False)
    try:
        yield client
    finally:
        for session in client.opened:
            await client.close(session)
        await client.channel.close()


@pytest.fixture
async def target(request) -> AsyncIterator[ModelClient]:
    async with found(TARGET, request.param) as client:
        yield client


@pytest.fixture
async def drafter(request) -> AsyncIterator[ModelClient]:
    async with found(DRAFTER, request.param) as client:
        yield client


async def continuation(target: ModelClient, prompt: tuple[int, ...], count: int) -> list[int]:
    """Decode plainly: the oracle."""
    session = await target.open()
    text = list(prompt)
    answer = await target.verify(target.call(session, 1, new=text))
    for sequence in range(2, count + 1):
        held = tuple(text)
        text.append(answer.next_token_id)
        call = target.call(session, sequence, held=held, new=text[-1:])
        answer = await target.verify(call)
    await target.close(session)
    return [*text[len(prompt) :], answer.next_token_id]


# --- what a server says of itself -----------------------------------------------------------------


@pytest.mark.parametrize("role", [TARGET, DRAFTER], ids=lambda role: role.name)
async def test_a_server_describes_its_model_and_role(new_host, role):
    async with connected(role, new_host(session_limit=7, token_budget=900)) as client:
        assert client.info.role == role.wire
        assert (client.info.session_limit, client.info.token_budget) == (7, 900)
        assert client.info.fingerprint
        assert client.info.incarnation
        assert client.info.verification_rules == [sampling_pb2.VERIFICATION_RULE_EXACT]


async def test_a_server_says_the_token_budget_that_its_memory_allows():
    def load() -> SimulatedBackend:
        backend = SimulatedBackend(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        memory = TokenMemory(free_bytes=1000, usable_share=0.5, bytes_per_token=5)
        backend.token_memory = lambda: memory
        return backend

    limits = HostLimits(warm_up_rounds=0, fits_memory=True)
    async with connected(TARGET, ModelHost(load, limits=limits)) as client:
        assert client.info.token_budget == 100


@pytest.mark.parametrize(
    ("settings", "token_budget", "fits_memory"),
    [
        ({"model": "somewhere"}, 1 << 20, True),
        ({"model": "somewhere", "token_budget": 1 << 22}, 1 << 22, False),
        ({"backend": "simulated"}, 1 << 17, False),
        ({"backend": "simulated", "token_budget": 5}, 5, False),
    ],
)
def test_memory_decides_the_token_budget_of_a_real_model_unless_it_is_said(
    settings, token_budget, fits_memory
):
    host = loading.new_host(ModelServerSettings(**settings), role="target", on_failure=print)
    assert (host.limits.token_budget, host.limits.fits_memory) == (token_budget, fits_memory)


async def test_the_tokenizer_comes_in_chunks_under_its_digest(target):
    request = model_service_pb2.GetTokenizerRequest()
    chunks = [chunk async for chunk in target.model.GetTokenizer(request, timeout=5)]
    content = b"".join(chunk.data for chunk in chunks)
    assert chunks[0].total_bytes == len(content)
    assert chunks[0].tokenizer_fingerprint == hashlib.sha256(content).hexdigest()
    assert chunks[0].tokenizer_fingerprint == target.info.tokenizer_fingerprint
    assert all(0 < len(chunk.data) <= 256 * 1024 for chunk in chunks)


async def test_a_large_tokenizer_is_cut_at_256_kibibytes():
    host = FakeHost()
    host.tokenizer = b"x" * (600 * 1024)
    async with connected(TARGET, host) as target:
        request = model_service_pb2.GetTokenizerRequest()
        chunks = [chunk async for chunk in target.model.GetTokenizer(request, timeout=5)]
    assert [len(chunk.data) // 1024 for chunk in chunks] == [256, 256, 88]


async def test_a_model_without_a_tokenizer_says_so():
    host = FakeHost()
    host.tokenizer = None
    async with connected(TARGET, host) as target:
        with pytest.raises(UnsupportedError), decoded():
            async for _ in target.model.GetTokenizer(
                model_service_pb2.GetTokenizerRequest(), timeout=5
            ):
                pass


# --- verification ---------------------------------------------------------------------------------


async def test_a_verdict_is_the_targets_own_continuation_whatever_was_drafted(target):
    oracle = await continuation(target, PROMPT, 6)
    session = await target.open()
    wrong = (oracle[2] + 1) % target.info.vocabulary_size
    answer = await target.verify(
        target.call(session, 1, new=PROMPT), [*oracle[:2], wrong, *oracle[3:5]]
    )
    assert (answer.sequence, answer.prefix_length) == (1, len(PROMPT))
    assert (answer.accepted_path, answer.next_token_id) == ([0, 1], oracle[2])
    assert answer.held_length == len(PROMPT) + 2
    assert answer.timing.forward_count == 1


async def test_a_whole_block_is_accepted_with_one_more_token(target):
    oracle = await continuation(target, PROMPT, 4)
    session = await target.open()
    answer = await target.verify(target.call(session, 1, new=PROMPT), oracle[:3], logprobs=True)
    assert (answer.accepted_path, answer.next_token_id) == ([0, 1, 2], oracle[3])
    assert len(answer.logprobs) == 4


async def test_keep_and_append_is_rollback_catching_up_and_repetition(target):
    oracle = await continuation(target, PROMPT, 5)
    session = await target.open()
    wrong = [(token + 1) % target.info.vocabulary_size for token in oracle[:3]]
    await target.verify(target.call(session, 1, new=PROMPT), wrong)
    rollback = await target.verify(target.call(session, 2, held=PROMPT, new=oracle[:2]))
    assert rollback.next_token_id == oracle[2]
    held = (*PROMPT, *oracle[:2])
    repeated = await target.verify(target.call(session, 3, held=held))
    assert repeated.next_token_id == oracle[2]
    restart = await target.verify(target.call(session, 4, new=(*held, *oracle[2:4])))
    assert restart.next_token_id == oracle[4]


async def test_a_session_holds_the_accepted_tokens_and_no_rejected_or_next_one(target):
    oracle = await continuation(target, PROMPT, 3)
    session = await target.open()
    wrong = (oracle[1] + 1) % target.info.vocabulary_size
    answer = await target.verify(target.call(session, 1, new=PROMPT), [oracle[0], wrong])
    assert answer.held_length == len(PROMPT) + 1
    held = (*PROMPT, oracle[0])
    for sequence, beyond in ((2, wrong), (3, oracle[1])):
        call = target.call(session, sequence, held=(*held, beyond))
        error = await target.error_of(target.verify(call))
        assert isinstance(error, PrefixNotHeldError)
        assert error.metadata["held_length"] == str(len(held))
    again = await target.verify(target.call(session, 4, held=held, new=oracle[1:2]))
    assert (again.prefix_length, again.next_token_id) == (len(held) + 1, oracle[2])


# --- drafting -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk_tokens", "sizes"), [(0, [1] * 7), (1, [1] * 7), (3, [3, 3, 1])])
async def test_a_window_is_streamed_in_chunks_and_held(drafter, chunk_tokens, sizes):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    chunks = await drafter.draft(call, 7, chunk_tokens=chunk_tokens)
    assert [len(chunk.proposal.token_ids) for chunk in chunks] == sizes
    assert all(chunk.sequence == 1 for chunk in chunks)
    starts = [len(PROMPT) + sum(sizes[:index]) for index in range(len(sizes))]
    assert [chunk.start_length for chunk in chunks] == starts
    drafted = tuple(token for chunk in chunks for token in chunk.proposal.token_ids)
    more = await drafter.draft(drafter.call(session, 2, held=(*PROMPT, *drafted)), 1)
    assert more[0].start_length == len(PROMPT) + 7


async def test_a_cancelled_draft_holds_what_it_streamed(new_host):
    host = new_host(stalls=True)
    async with connected(DRAFTER, host) as drafter:
        session = await drafter.open()
        request = drafter_service_pb2.DraftRequest(
            call=drafter.call(session, 1, new=PROMPT), max_tokens=9
        )
        stream = drafter.stub.Draft(request, timeout=20)
        first = await anext(aiter(stream))
        stream.cancel()
        held = (*PROMPT, *first.proposal.token_ids)
        call = drafter.call(session, 2, held=held)
        # It stalls, so it passed the fence: a prefix that is not held is refused at once.
        again = drafter.stub.Draft(
            drafter_service_pb2.DraftRequest(call=call, max_tokens=1), timeout=20
        )
        error = await drafter.error_of(drafter.draft(drafter.call(session, 3, held=(*held, 1)), 1))
        assert isinstance(error, PrefixNotHeldError)
        assert error.metadata["held_length"] == str(len(held))
        again.cancel()


# --- fencing --------------------------------------------------------------------------------------


async def test_a_sequence_that_is_not_higher_is_stale(target):
    session = await target.open()
    await target.verify(target.call(session, 5, new=PROMPT))
    for sequence in (4, 5):
        error = await target.error_of(target.verify(target.call(session, sequence, new=PROMPT)))
        assert isinstance(error, StaleCallError)


async def test_a_base_that_is_not_held_is_refused_with_what_is(target):
    session = await target.open()
    await target.verify(target.call(session, 1, new=PROMPT))
    error = await target.error_of(target.verify(target.call(session, 2, held=(*PROMPT, 1))))
    assert isinstance(error, PrefixNotHeldError)
    assert error.metadata["held_length"] == "4"


async def test_other_tokens_than_the_digest_says_are_refused(target):
    session = await target.open()
    await target.verify(target.call(session, 1, new=PROMPT))
    error = await target.error_of(
        target.verify(target.call(session, 2, held=(5, 6, 7, 9), new=(1,)))
    )
    assert isinstance(error, PrefixMismatchError)
    answer = await target.verify(target.call(session, 3, new=PROMPT))
    assert answer.prefix_length == 4


async def test_a_newer_call_supersedes_a_running_one(new_host):
    async with connected(TARGET, new_host(stalls=True)) as target:
        session = await target.open()
        await target.verify(target.call(session, 1, new=PROMPT))
        async with asyncio.TaskGroup() as group:
            older = group.create_task(
                target.error_of(target.verify(target.call(session, 2, held=PROMPT, new=(1,))))
            )
            newer = group.create_task(
                target.error_of(target.verify(target.call(session, 3, held=PROMPT, new=(2,))))
            )
            assert isinstance(await older, SupersededError | StaleCallError)
            await target.close(session)
            assert isinstance(await newer, SupersededError | SessionNotFoundError)


# --- sessions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [TARGET, DRAFTER], ids=lambda role: role.name)
async def test_closing_is_idempotent_and_frees_the_session(new_host, role):
    host = new_host()
    async with connected(role, host) as client:
        session = await client.open()
        assert host.statistics().sessions_open == 1
        await client.close(session)
        await client.close(session)
        await client.close("never opened")
        assert host.statistics().sessions_open == 0
        assert isinstance(await client.error_of(client.renew(session)), SessionNotFoundError)


async def test_the_lease_is_granted_and_renewed(target):
    spec = target.spec()
    spec.lease.FromMilliseconds(2500)
    grant = await target.open_with(spec)
    assert grant.lease.ToTimedelta().total_seconds() == 2.5
    assert await target.renew(grant.session_id) == 2.5
    assert (await target.open_with(target.spec())).lease.seconds == 15


@pytest.mark.parametrize("handle", ["", "unknown", "fake.999", "x" * 5000, "../..\x00"])
async def test_an_unknown_handle_is_not_found(target, handle):
    error = await target.error_of(target.verify(target.call(handle, 1, new=PROMPT)))
    assert isinstance(error, SessionNotFoundError)
    assert not handle or handle not in error.message


async def test_a_full_server_says_when_to_come_back(new_host):
    async with connected(TARGET, new_host(session_limit=2)) as target:
        await target.open()
        await target.open()
        error = await target.error_of(target.open())
        assert isinstance(error, CacheExhaustedError)
        assert error.retry_after_seconds > 0


async def test_a_session_grows_with_its_text_up_to_its_limit(target):
    session = await target.open(reserve_length=4, limit_length=40)
    await target.verify(target.call(session, 1, new=PROMPT), [1] * 36)
    call = target.call(session, 2, new=PROMPT)
    error = await target.error_of(target.verify(call, [1] * 37))
    assert isinstance(error, InvalidFieldError)
    assert "may have 40" in error.violations[0].description


async def test_a_window_grows_its_session(drafter):
    session = await drafter.open(reserve_length=4, limit_length=40)
    assert len(await drafter.draft(drafter.call(session, 1, new=PROMPT), 36)) == 36


async def test_without_a_limit_a_session_has_what_it_reserved(target):
    session = await target.open(reserve_length=40)
    error = await target.error_of(target.verify(target.call(session, 1, new=PROMPT), [1] * 37))
    assert isinstance(error, InvalidFieldError)


async def test_a_session_that_finds_no_room_is_as_it_was(new_host):
    async with connected(TARGET, new_host(token_budget=100)) as target:
        # The other's limit is what it has, so no room is kept for it.
        other = await target.open(reserve_length=50, share="another")
        session = await target.open(reserve_length=30, limit_length=90)
        first = await target.verify(target.call(session, 1, new=PROMPT))
        call = target.call(session, 2, held=PROMPT)
        error = await target.error_of(target.verify(call, [1] * 60))
        assert isinstance(error, CacheExhaustedError)
        assert error.retry_after_seconds > 0
        # Its sequence was not taken, and its tokens are held.
        assert (await target.verify(call)).next_token_id == first.next_token_id
        await target.close(other)
        await target.verify(target.call(session, 3, held=PROMPT), [1] * 60)


@pytest.mark.parametrize("limits", [{"session_limit": 20}, {"token_budget": 20 * 64}])
async def test_a_share_that_takes_all_it_can_leaves_a_session_to_another(new_host, limits):
    async with connected(TARGET, new_host(**limits)) as target:
        error = None
        while error is None:
            try:
                await target.open(share="greedy")
            except CacheExhaustedError as refusal:
                error = refusal
        assert len(target.opened) == 16
        assert error.retry_after_seconds > 0
        session = await target.open(share="modest")
        await target.verify(target.call(session, 1, new=PROMPT))


# --- limits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """A limit that the server tells, and so much more or less."""

    name: str
    more: int = 0

    def __repr__(self) -> str:
        return f"{self.name}{self.more:+}" if self.more else self.name

    @staticmethod
    def put_in(value: Any, info: model_service_pb2.GetModelInfoResponse) -> Any:
        """Return a value with the limits in it known."""
        match value:
            case Told(name, more):
                return getattr(info, name) + more
            case list():
                return [Told.put_in(each, info) for each in value]
            case _:
                return value


VOCABULARY = Told("vocabulary_size")
LAST_TOKEN = Told("vocabulary_size", -1)
CONTEXT = Told("context_length")

SPEC_FIELDS = [
    # field, values at its limits, values past them
    ("sampling.temperature", [0.0, 100.0], [-0.1, 100.1, math.nan, math.inf, -math.inf]),
    ("sampling.top_k", [0, VOCABULARY], [Told("vocabulary_size", 1), 2**32 - 1]),
    ("sampling.top_p", [1e-300, 1.0], [0.0, 1.0000001, -1.0, math.nan, math.inf]),
    ("sampling.min_p", [0.0, 1.0], [-0.1, 1.1, math.nan]),
    ("seed", [0, 2**53 - 1], [2**53, 2**64 - 1]),
    ("verification_rule", [0, 1], [3, 99]),
    ("reserve_length", [1, CONTEXT], [0, Told("context_length", 1), 2**32 - 1]),
    ("limit_length", [64, CONTEXT], [0, 63, Told("context_length", 1), 2**32 - 1]),
    ("lease.seconds", [1, 300], [0, 301, -1, 2**63 - 1, -(2**63)]),
    ("lease.nanos", [], [999_999_999, -1]),
    ("request_id", ["", "a.b_c-9", "x" * 64], ["x" * 65, "a b", "ü", "a/b"]),
    ("share", ["", "a.b_c-9", "x" * 64], ["x" * 65, "a b", "ü", "a/b"]),
    ("expected_model_fingerprint", [], [""]),
]

CALL_FIELDS = [
    ("sequence", [1, 2**64 - 1], [0]),
    ("base_length", [0], [65, 2**32 - 1]),
    ("base_digest", [b""], [b"x", b"x" * 15, b"x" * 17]),
    (
        "token_ids",
        [[0], [LAST_TOKEN], [1] * 64],
        [[], [VOCABULARY], [2**31], [2**32 - 1], [1] * 65],
    ),
    ("expected_model_fingerprint", [], [""]),
]

VERIFY_FIELDS = [
    (
        "proposal.token_ids",
        [[0], [LAST_TOKEN], [1] * 60],
        [[VOCABULARY], [2**32 - 1], [1] * 61, [1] * 1025],
    ),
    ("proposal.parents", [[]], [[0], [0, 1]]),
    ("speculation_depth", [0, 65535], [65536, 2**32 - 1]),
]

DRAFT_FIELDS = [
    ("max_tokens", [1, 60], [0, 61, 1025, 2**32 - 1]),
    ("chunk_tokens", [0, 1, 64], [65, 2**32 - 1]),
]


def cases(prefix: str, table: list[tuple[str, list[Any], list[Any]]], *, good: bool) -> list[Any]:
    return [
        pytest.param(f"{prefix}{path}", value, id=f"{prefix}{path}={str(value)[:24]}")
        for path, at_limit, past_limit in table
        for value in (at_limit if good else past_limit)
    ]


def put(message: Any, path: str, value: Any, *, to: ModelClient) -> None:
    value = Told.put_in(value, to.info)
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    if isinstance(value, list):
        del getattr(message, name)[:]
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def assert_names(error: PacelineError, path: str) -> None:
    assert isinstance(error, InvalidFieldError)
    (violation,) = error.violations
    # A limit on a length that several fields make up is named after the last of them.
    assert violation.field.startswith(path.removesuffix(".seconds").removesuffix(".nanos"))
    assert violation.description


def assert_no_forward(client: ModelClient) -> None:
    if client.host is not None:  # else it cannot be seen
        assert client.host.statistics().forwards == 0


@pytest.mark.parametrize(("path", "value"), cases("spec.", SPEC_FIELDS, good=False))
async def test_a_session_with_a_field_past_its_limits_is_refused(target, path, value):
    request = session_service_pb2.OpenSessionRequest(spec=target.spec())
    put(request, path, value, to=target)
    if path == "spec.lease.nanos":
        request.spec.lease.seconds = 0
    assert_names(await target.error_of(target.open_with(request.spec)), path)


@pytest.mark.parametrize(("path", "value"), cases("spec.", SPEC_FIELDS, good=True))
async def test_a_session_with_a_field_at_its_limits_is_opened(target, path, value):
    request = session_service_pb2.OpenSessionRequest(spec=target.spec())
    put(request, path, value, to=target)
    assert (await target.open_with(request.spec)).session_id


@pytest.mark.parametrize(
    ("path", "value"),
    cases("call.", CALL_FIELDS, good=False) + cases("", VERIFY_FIELDS, good=False),
)
async def test_a_verification_with_a_field_past_its_limits_runs_no_forward(target, path, value):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    request = target_service_pb2.VerifyRequest(call=call)
    put(request, path, value, to=target)
    assert_names(await target.error_of(target.verify_with(request)), path)
    assert_no_forward(target)
    assert (await target.verify(target.call(session, 2, new=PROMPT))).held_length == 4


@pytest.mark.parametrize(
    ("path", "value"), cases("call.", CALL_FIELDS, good=True) + cases("", VERIFY_FIELDS, good=True)
)
async def test_a_verification_with_a_field_at_its_limits_is_answered(target, path, value):
    session = await target.open()
    request = target_service_pb2.VerifyRequest(call=target.call(session, 1, new=PROMPT))
    put(request, path, value, to=target)
    assert (await target.verify_with(request)).next_token_id < target.info.vocabulary_size


@pytest.mark.parametrize(
    ("path", "value"), cases("call.", CALL_FIELDS, good=False) + cases("", DRAFT_FIELDS, good=False)
)
async def test_a_draft_with_a_field_past_its_limits_runs_no_forward(drafter, path, value):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    request = drafter_service_pb2.DraftRequest(call=call, max_tokens=1)
    put(request, path, value, to=drafter)
    error = await drafter.error_of(drafter.draft_with(request))
    assert_names(error, path)
    assert_no_forward(drafter)


@pytest.mark.parametrize(("path", "value"), cases("", DRAFT_FIELDS, good=True))
async def test_a_draft_with_a_field_at_its_limits_is_answered(drafter, path, value):
    session = await drafter.open()
    call = drafter.call(session, 1, new=PROMPT)
    request = drafter_service_pb2.DraftRequest(call=call, max_tokens=1)
    put(request, path, value, to=drafter)
    assert await drafter.draft_with(request)


DISTRIBUTION = {"token_ids": [1, 2], "probabilities": [0.25, 0.75]}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [1, 1]},
        {"token_ids": [1, VOCABULARY]},
        {"token_ids": [2, 3]},
        {"token_ids": [1]},
        {"token_ids": []},
        {"probabilities": [0.25, 0.7499]},
        {"probabilities": [0.0, 1.0]},
        {"probabilities": [-0.5, 1.5]},
        {"probabilities": [math.nan, 1.0]},
        {"probabilities": [math.inf, 0.5]},
        {"probabilities": [1.0]},
        {"probabilities": []},
    ],
    ids=str,
)
async def test_what_is_no_distribution_is_refused(target, change):
    # At temperature 0 every server takes this rule.
    session = await target.open(verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION)
    change = {name: Told.put_in(value, target.info) for name, value in change.items()}
    given = sampling_pb2.SparseDistribution(**{**DISTRIBUTION, **change})
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1], distributions=[given]))
    assert_names(error, "proposal.distributions[0]")
    good = sampling_pb2.SparseDistribution(**DISTRIBUTION)
    call = target.call(session, 2, new=PROMPT)
    answer = await target.verify(call, [1], distributions=[good])
    assert answer.held_length == 4 + len(answer.accepted_path)


@pytest.mark.parametrize(("rule", "count"), [(1, 1), (2, 0), (2, 2)])
async def test_distributions_are_as_many_as_the_rule_wants(target, rule, count):
    session = await target.open(verification_rule=rule)
    given = [sampling_pb2.SparseDistribution(**DISTRIBUTION)] * count
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1], distributions=given))
    assert_names(error, "proposal.distributions")


@pytest.mark.parametrize("parents", [[0], [0, 1, 2], [1, 0], [0, 2], [0, 2**32 - 1]], ids=str)
async def test_parents_that_make_no_tree_are_refused(target, parents):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1, 2], parents=parents))
    assert_names(error, "proposal.parents")
    assert_no_forward(target)


async def test_a_tree_is_unsupported(target):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT)
    error = await target.error_of(target.verify(call, [1, 2], parents=[0, 0]))
    assert isinstance(error, UnsupportedError)
    assert "proposal.parents" in error.message
    assert_no_forward(target)
    spelled_out = await target.verify(call, [1, 2], parents=[0, 1])
    assert spelled_out.prefix_length == len(PROMPT)


async def test_a_rule_that_the_model_does_not_know_is_unsupported(target):
    rule = sampling_pb2.VERIFICATION_RULE_REJECTION
    if rule in target.info.verification_rules:
        pytest.skip("this model knows every rule")
    sampling = sampling_pb2.SamplingParameters(temperature=1.0)
    error = await target.error_of(target.open(verification_rule=rule, sampling=sampling))
    assert isinstance(error, UnsupportedError)


async def test_another_model_is_refused_by_every_call(new_host):
    async with connected(TARGET, new_host()) as target:
        session = await target.open()
        call = target.call(session, 1, new=PROMPT)
        call.expected_model_fingerprint = "another"
        assert isinstance(await target.error_of(target.verify(call)), ModelMismatchError)
        opening = target.open(expected_model_fingerprint="another")
        assert isinstance(await target.error_of(opening), ModelMismatchError)
    async with connected(DRAFTER, new_host()) as drafter:
        session = await drafter.open()
        call = drafter.call(session, 1, new=PROMPT)
        call.expected_model_fingerprint = "another"
        assert isinstance(await drafter.error_of(drafter.draft(call, 1)), ModelMismatchError)


def varint(value: int) -> bytes:
    low = b""
    while value > 0x7F:
        low, value = low + bytes([value & 0x7F | 0x80]), value >> 7
    return low + bytes([value])


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(content)) + content


LARGE = 2 << 20
NO_SESSION = field(1, field(1, b"nobody's"))
EMPTY_DISTRIBUTIONS = field(2, field(3, b"") * (LARGE // 2))
LARGE_REQUESTS = {
    "two million token ids": field(1, field(1, b"nobody's") + field(5, b"\x01" * LARGE)),
    "a million empty distributions": NO_SESSION + EMPTY_DISTRIBUTIONS,
    "a call that is not the first field": EMPTY_DISTRIBUTIONS + NO_SESSION,
    "a length that has no end": b"\x0a" + b"\xff" * LARGE,
    "a call that is cut off": b"\x0a" + varint(70_000) + b"\x0a" * 69_000,
    "bytes that are no call": field(1, b"\xff" * 70_000),
}


@pytest.mark.parametrize("raw", LARGE_REQUESTS.values(), ids=LARGE_REQUESTS)
async def test_a_large_message_without_a_session_is_refused(target, raw):
    verify = target.channel.unary_unary("/paceline.v1.TargetService/Verify")
    with pytest.raises(grpc.RpcError) as caught:
        await verify(raw, timeout=60)
    error = decode(caught.value)
    assert isinstance(error, InvalidFieldError | MalformedRequestError | SessionNotFoundError)


async def test_a_message_that_is_too_large_for_its_session_is_refused(target):
    session = await target.open()
    call = target.call(session, 1, new=PROMPT).SerializeToString()
    verify = target.channel.unary_unary("/paceline.v1.TargetService/Verify")
    with pytest.raises(grpc.RpcError) as caught:
        await verify(field(1, call) + EMPTY_DISTRIBUTIONS, timeout=60)
    error = decode(caught.value)
    assert isinstance(error, InvalidFieldError)
    assert "at most" in error.message


async def test_the_longest_prompt_there_can_be_is_taken(target):
    length = target.info.context_length
    session = await target.open(reserve_length=length)
    prompt = [target.info.vocabulary_size - 1] * length
    answer = await target.verify(target.call(session, 1, new=prompt))
    assert answer.prefix_length == length


async def test_the_longest_block_there_can_be_is_taken(target):
    count, size = 1024, min(4096, target.info.vocabulary_size)
    session = await target.open(
        reserve_length=len(PROMPT) + count,
        verification_rule=sampling_pb2.VERIFICATION_RULE_REJECTION,
    )
    drawn_from = sampling_pb2.SparseDistribution(
        token_ids=range(size), probabilities=[1 / size] * size
    )
    call = target.call(session, 1, new=PROMPT)
    answer = await target.verify(call, [1] * count, distributions=[drawn_from] * count)
    assert answer.held_length == len(PROMPT) + len(answer.accepted_path)


@pytest.mark.parametrize("session", ["nobody's", ""])
async def test_nothing_is_made_of_a_message_before_its_session_is_found(session):
    """Unless its lists lie in the message as they came, they take 30 times as much."""
    host = FakeHost()
    await host.start()
    servicer = TARGET.servicer(host, CallRecorder(CollectorRegistry(), role="target"))
    session = session or host.open_session(SessionSpec(9)).session_id
    request = target_service_pb2.VerifyRequest(
        proposal={"token_ids": range(300_000), "parents": range(300_000)}
    )
    request.call.expected_model_fingerprint = host.description.fingerprint
    request.call.session_id, request.call.sequence = session, 1
    request.call.token_ids.extend(range(300_000))
    for _ in range(1024):
        request.proposal.distributions.add(token_ids=range(1000), probabilities=[0.001] * 1000)
    context = SimpleNamespace(auth_context=dict)
    tracemalloc.start()
    try:
        with pytest.raises((SessionNotFoundError, InvalidFieldError)):
            await servicer.Verify(request, context)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 200_000


@pytest.mark.parametrize(
    "method",
    ["TargetService/Verify"]
    + [f"SessionService/{verb}Session" for verb in ("Open", "Renew", "Close")],
)
@pytest.mark.parametrize("raw", [b"\xff\xff\xff", b"\x0a\x7f", b"\x00", b"secret prompt"], ids=repr)
async def test_malformed_bytes_are_the_clients_fault(target, method, raw):
    call = target.channel.unary_unary(f"/paceline.v1.{method}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(raw, timeout=5)
    error = decode(caught.value)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")
    assert "secret" not in str(caught.value)


async def test_malformed_bytes_of_a_stream_are_the_clients_fault(drafter):
    call = drafter.channel.unary_stream("/paceline.v1.DrafterService/Draft")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call(b"\xff\xff\xff", timeout=5):
            pass
    assert decode(caught.value).reason == "MALFORMED_REQUEST"


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["call.cancel", "task.cancel", "deadline"])
async def test_a_cancelled_verification_reaches_the_host(new_host, how):
    host = new_host(stalls=True)
    async with connected(TARGET, host) as target:
        session = await target.open()
        await target.verify(target.call(session, 1, new=PROMPT))
        request = target_service_pb2.VerifyRequest(
            call=target.call(session, 2, held=PROMPT, new=(1,))
        )
        timeout = 0.05 if how == "deadline" else 20
        call = target.stub.Verify(request, timeout=timeout)

        async def wait() -> None:
            await call

        task = asyncio.create_task(wait())
        await until(lambda: is_running(host))
        if how == "call.cancel":
            call.cancel()
        elif how == "task.cancel":
            task.cancel()
        await asyncio.wait([task])
        await until(lambda: host.statistics().calls_cancelled == 1)
        # The session still holds its base, and answers.
        error = await target.error_of(
            target.verify(target.call(session, 3, held=(*PROMPT, 1), new=(2,)))
        )
        assert isinstance(error, PrefixNotHeldError)


async def test_a_cancelled_draft_reaches_the_host(new_host):
    host = new_host(stalls=True)
    async with connected(DRAFTER, host) as drafter:
        session = await drafter.open()
        request = drafter_service_pb2.DraftRequest(
            call=drafter.call(session, 1, new=PROMPT), max_tokens=9
        )
        stream = drafter.stub.Draft(request, timeout=20)
        await anext(aiter(stream))
        await until(lambda: is_running(host))
        stream.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1)


def is_running(host: Any) -> bool:
    """Whether a call waits at a stalling host."""
    if isinstance(host, FakeHost):
        return host.is_stalled
    return host.statistics().forwards_running == 1


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something holds; the test's own timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - what another thread does sets no event
        await asyncio.sleep(0.001)


# --- life -----------------------------------------------------------------------------------------


async def health_of(client: ModelClient, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(client.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return answer.status


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_server_that_loads_says_so_and_is_not_serving():
    host = FakeHost(loads=False)
    async with serving(TARGET, host, begin=False) as process:
        beginning = asyncio.create_task(process.begin())
        await until(lambda: "address" in process.addresses)
        client = ModelClient(TARGET, process.addresses["address"])
        watch = health_pb2_grpc.HealthStub(client.channel).Watch(
            health_pb2.HealthCheckRequest(service="paceline.v1.TargetService"),
            timeout=20,
            wait_for_ready=True,
        )
        seen = aiter(watch)
        assert (await anext(seen)).status == NOT_SERVING
        for attempt in (client.learn(), client.open(), client.renew("x")):
            error = await client.error_of(attempt)
            assert isinstance(error, LoadingError | SessionNotFoundError)
        assert isinstance(await client.error_of(client.learn()), LoadingError)
        assert await health_of(client, "liveness") == SERVING
        host.finish_loading.set()
        await beginning
        assert (await anext(seen)).status == SERVING
        for name in ("Model", "Session", "Target"):
            assert await health_of(client, f"paceline.v1.{name}Service") == SERVING
        assert await health_of(client) == SERVING
        await process.finish(drain=False)
        await client.channel.close()


async def test_a_draining_server_refuses_new_sessions_and_ends_open_ones(new_host):
    async with serving(TARGET, new_host(), drain_seconds=20) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        session = await target.open()
        draining = asyncio.create_task(process.finish())
        await asyncio.sleep(0)
        watch = health_pb2_grpc.HealthStub(target.channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=20
        )
        assert (await anext(aiter(watch))).status == NOT_SERVING
        assert isinstance(await target.error_of(target.open()), DrainingError)
        assert (await target.verify(target.call(session, 1, new=PROMPT))).held_length == 4
        await target.close(session)
        await draining
        await target.channel.close()


@pytest.mark.parametrize("role", [TARGET, DRAFTER], ids=lambda role: role.name)
async def test_what_runs_and_what_waits_at_the_end_of_a_drain_hears_draining(new_host, role):
    host = new_host(stalls=True)
    async with serving(role, host, drain_seconds=0.01) as process:
        client = await ModelClient(role, process.addresses["address"]).learn()
        work = client.verify if role is TARGET else partial(client.draft, max_tokens=1)
        sessions = [await client.open() for _ in range(3)]
        for session in sessions:
            await work(client.call(session, 1, new=PROMPT))
        async with asyncio.TaskGroup() as group:
            cut = [
                group.create_task(client.error_of(work(client.call(it, 2, held=PROMPT, new=(1,)))))
                for it in sessions
            ]
            for session in sessions:
                await until(lambda it=session: host.live_sequence(it, caller="") == 2)
            await process.finish()
        assert [type(it.result()) for it in cut] == [DrainingError] * 3
        await client.channel.close()


async def test_during_the_drain_delay_a_server_that_says_not_serving_still_serves(new_host):
    async with serving(TARGET, new_host(), drain_delay_seconds=600) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        draining = asyncio.create_task(process.finish())
        watch = health_pb2_grpc.HealthStub(target.channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=20
        )
        async for answer in watch:
            if answer.status == NOT_SERVING:
                break
        session = await target.open()
        assert (await target.verify(target.call(session, 1, new=PROMPT))).held_length == 4
        draining.cancel()
        await asyncio.wait([draining])
        await target.channel.close()


async def test_health_answers_while_a_forward_runs(new_host):
    host = new_host(stalls=True)
    async with serving(TARGET, host) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        probe = ModelClient(TARGET, process.addresses["health_address"])
        session = await target.open()
        await target.verify(target.call(session, 1, new=PROMPT))
        stalled = target.stub.Verify(
            target_service_pb2.VerifyRequest(call=target.call(session, 2, held=PROMPT, new=(1,))),
            timeout=20,
        )
        await until(lambda: is_running(host))
        assert await health_of(target) == SERVING
        assert await health_of(probe) == SERVING
        stalled.cancel()
        await target.channel.close()
        await probe.channel.close()


# --- what can be seen from outside ----------------------------------------------------------------


@asynccontextmanager
async def observed(role: Any, host: Any) -> AsyncIterator[tuple[ModelClient, Callable[..., Any]]]:
    async with serving(role, host, metrics_listen="127.0.0.1:0") as process:
        client = await ModelClient(role, process.addresses["address"]).learn()

        def page(path: str) -> str:
            url = f"http://{process.addresses['metrics_address']}{path}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                text: str = answer.read().decode()
                return text

        try:
            yield client, lambda path: asyncio.to_thread(page, path)
        finally:
            await client.channel.close()


async def test_health_says_no_while_the_model_hangs(caplog):
    host = FakeHost()
    async with (
        serving(TARGET, host) as process,
        grpc.aio.insecure_channel(process.addresses["address"]) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="paceline.v1.TargetService")
        watch = health.Watch(request, timeout=60)
        states = [(await watch.read()).status]
        host.overdue = 12.0
        states.append((await watch.read()).status)
        alive = await health.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60)
        host.overdue = 0.0
        states.append((await watch.read()).status)
        watch.cancel()
    yes, no = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert states == [yes, no, yes]
    assert alive.status == yes
    assert "a forward has taken 12 s" in caplog.text
    assert "answers again" in caplog.text


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


async def test_connections_that_never_call_leave_descriptors_to_probes_and_scrapers(monkeypatch):
    monkeypatch.setattr("paceline_serving.lifecycle._MOST_CONNECTIONS", 6)
    async with serving(TARGET, FakeHost(), metrics_listen="127.0.0.1:0") as process:
        host, port = process.addresses["address"].split(":")
        idle = []
        for _ in range(4):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(PREFACE)
            idle.append((reader, writer))
            try:
                greeting = await reader.read(9)
            except ConnectionError:
                greeting = b""
            assert bool(greeting) == (len(idle) <= 3)  # half of six
        async with grpc.aio.insecure_channel(process.addresses["health_address"]) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
        page = f"http://{process.addresses['metrics_address']}/metrics"
        metrics = await asyncio.to_thread(lambda: urllib.request.urlopen(page, timeout=60).read())
        assert b"process_open_fds" in metrics
        for _, writer in idle:
            writer.close()


async def test_what_a_target_did_with_its_calls_can_be_seen(new_host):
    host = new_host(stalls=True)
    async with observed(TARGET, host) as (target, page):
        session = await target.open()
        first = await target.verify(target.call(session, 1, new=PROMPT), [1, 2])
        superseded = asyncio.create_task(
            target.error_of(target.verify(target.call(session, 2, held=PROMPT, new=(1,))))
        )
        await until(lambda: is_running(host))
        cancelled = target.stub.Verify(
            target_service_pb2.VerifyRequest(
                call=target.call(session, 3, held=PROMPT, new=(2,)), speculation_depth=4
            ),
            timeout=20,
        )
        assert isinstance(await superseded, SupersededError)
        await until(lambda: is_running(host))
        cancelled.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1)
        with pytest.raises(PacelineError):
            await target.verify(target.call(session, 3, new=PROMPT))

        calls = json.loads(await page("/debug/calls"))
        assert [call["outcome"] for call in calls] == ["ok", "superseded", "cancelled", "failed"]
        assert [call["sequence"] for call in calls] == [1, 2, 3, 3]
        assert calls[0]["accepted"] == len(first.accepted_path)
        assert calls[0]["rows"] == 6
        assert calls[2]["depth"] == 4
        assert len({call["session"] for call in calls}) == 1
        rejected = 2 - len(first.accepted_path)
        metrics = await page("/metrics")
        for line in (
            'paceline_sessions_active{role="target"} 1.0',
            'paceline_cancelled_rpcs_total{reason="client_cancel"} 1.0',
            'paceline_cancelled_rpcs_total{reason="superseded"} 1.0',
            'paceline_forward_seconds_count{phase="prefill",role="target"} 1.0',
            'paceline_wasted_tokens_total{reason="superseded",role="target"} 1.0',
            f'paceline_wasted_tokens_total{{reason="rejected",role="target"}} {rejected:.1f}',
        ):
            assert line in metrics


async def test_accepted_tokens_are_counted_by_position_and_abandoned_sessions_by_reason(new_host):
    async with observed(TARGET, new_host()) as (target, page):
        session = await target.open()
        first = await target.verify(target.call(session, 1, new=PROMPT))
        block = [first.next_token_id, 0, 0]
        second = await target.verify(target.call(session, 2, held=PROMPT), block)
        assert second.accepted_path == [0]
        metrics = await page("/metrics")
        name = "paceline_spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{position="0",role="target"}} 1.0' in metrics
        assert f'{name}{{position="1",role="target"}}' not in metrics
        assert 'paceline_wasted_tokens_total{reason="rejected",role="target"} 2.0' in metrics
        assert 'paceline_sessions_evicted_total{reason="lease",role="target"} 0.0' in metrics


async def test_a_call_whose_work_the_same_call_took_over_wasted_nothing():
    model = SimulatedModel(ttft_seconds=NEVER_SECONDS, tpot_seconds=0)
    host = ModelHost(lambda: SimulatedBackend(model), limits=HostLimits(warm_up_rounds=0))
    async with observed(TARGET, host) as (target, page):
        session = await target.open()

        def verify(sequence: int) -> Any:
            call = target.call(session, sequence, new=PROMPT)
            return target.stub.Verify(target_service_pb2.VerifyRequest(call=call), timeout=20)

        older = verify(1)
        await until(lambda: is_running(host))
        newer = verify(2)
        await until(lambda: host.statistics().calls_adopted == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await older
        assert caught.value.code() is grpc.StatusCode.ABORTED
        wasted = 'paceline_wasted_tokens_total{reason="%s",role="target"} 4.0'
        assert wasted % "superseded" not in await page("/metrics")
        newer.cancel()
        await until(lambda: host.statistics().calls_cancelled == 1)
        assert wasted % "cancelled" in await page("/metrics")


async def test_what_a_drafter_did_with_its_calls_can_be_seen(new_host):
    async with observed(DRAFTER, new_host()) as (drafter, page):
        session = await drafter.open()
        await drafter.draft(drafter.call(session, 1, new=PROMPT), 5)
        (call,) = json.loads(await page("/debug/calls"))
        assert (call["method"], call["outcome"], call["rows"]) == ("Draft", "ok", 5)
        metrics = await page("/metrics")
        assert 'paceline_forward_seconds_count{phase="prefill",role="drafter"} 1.0' in metrics
        assert 'paceline_forward_seconds_count{phase="draft",role="drafter"} 4.0' in metrics


async def test_a_full_queue_says_when_to_come_back():
    model = SimulatedModel(ttft_seconds=NEVER_SECONDS, tpot_seconds=0)
    limits = HostLimits(warm_up_rounds=0, queue_limit=1)
    host = ModelHost(lambda: SimulatedBackend(model), limits=limits)
    async with connected(TARGET, host) as target:
        stalled = []
        for waiting in (0, 1):
            call = target.call(await target.open(), 1, new=PROMPT)
            request = target_service_pb2.VerifyRequest(call=call)
            stalled.append(target.stub.Verify(request, timeout=20))
            await until(lambda: host.statistics().calls_live == waiting + 1)  # noqa: B023
            await until(lambda: host.statistics().queue_length == waiting)  # noqa: B023
        error = await target.error_of(
            target.verify(target.call(await target.open(), 1, new=PROMPT))
        )
        assert isinstance(error, OverloadedError)
        assert error.retry_after_seconds
        for each in stalled:
            each.cancel()


async def test_a_server_whose_device_broke_ends_without_waiting_for_its_sessions():
    async with serving(TARGET, FakeHost(), drain_seconds=600) as process:
        target = await ModelClient(TARGET, process.addresses["address"]).learn()
        await target.open()
        process.stop_soon("the device is lost")
        process.stop_soon()
        assert await process.stopping() == "the device is lost"
        await process.finish(drain=False)
        await target.channel.close()
