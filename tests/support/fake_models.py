"""Drafters and targets without models: in-process gRPC servers with faults on demand.

The token after a text is a function of the text, and a drafter agrees with it where it is told to.
Limits, sessions, fencing and errors are as the protos say: tests/contract/model_servers holds these
servers to it, but for the `Capability`s that they leave out.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from paceline import errors
from paceline.v1 import (
    drafter_service_pb2,
    drafter_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    proposal_pb2,
    session_service_pb2,
    session_service_pb2_grpc,
    target_service_pb2,
    target_service_pb2_grpc,
)
from paceline_contract.calls import Hardware, VerificationRule
from paceline_contract.proposal import Proposal
from paceline_contract.sampling import FILTERS
from paceline_engine.terms import validation
from paceline_engine.terms.calls import ModelDescription, SessionGrant, SessionSpec
from paceline_engine.terms.latencies import ForwardLatency, ModelLatencies
from paceline_model_server import translation
from paceline_protocol.laboratory.drafted_tree import DraftedTree
from paceline_serving.interceptors import EdgeInterceptor
from paceline_serving.telemetry import RpcMetrics
from paceline_serving.transport import POD_SERVER_OPTIONS
from support.fake_text import (
    EOS,
    VOCABULARY_SIZE,
    byte_tokenizer,
    likeliest_after,
    logprob_of,
    next_token,
)
from support.ports import free_address
from support.prefix_digest import prefix_digest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

_CONTEXT_LENGTH = 4096
_LONGEST_WAIT_SECONDS = 90.0


@cache
def _tokenizer_bytes() -> bytes:
    return byte_tokenizer().to_str().encode()


class Capability(Enum):
    """What a drafter or target can do and these fakes leave out, each by design."""

    GUARDED_PARSING = "of a large message nothing is parsed before its session is known"
    """Their peers are the tests' own."""


@cache
def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class _Session:
    spec: SessionSpec
    tokens: list[int] = field(default_factory=list)
    sequence: int = 0
    superseded: asyncio.Event = field(default_factory=asyncio.Event)
    hangs: bool = False


@dataclass
class FakeModelServer:
    """One drafter or target.

    Attributes:
        role: "drafter" or "target".
        latency_seconds: What a forward takes.
        agrees: Whether a drafter finds the right token at a position.
        token_after: The model.
        self_draft_depth: How many tokens ahead a target proposes with its verdicts: chains of what
            it agrees with, and a wrong token beside each of theirs.
        stalls: Whether it computes for ever about a prefix; of a drafter, about a text so far. It
            says that it has the call.
        eos_ids: Tokens that end a text.
        rules: The verification rules that it says it knows; it decides by equality all the same,
            and drafts what could be no other.
        takes_trees: Whether it judges, or drafts, trees.
        samples_by: The sampling parameters that it says it applies; it has one token at each place.
        scores_prompts: Whether it says that it has log probabilities of given tokens.
        cancels_forwards: Whether it says that withdrawn forwards stop before their end.
        grammar_engine: What it says that it enforces grammars with.
        model_name: The model's.
        fingerprint: The model's.
        lora_fingerprints: Of the model with each LoRA adapter, by the adapter's name.
        configuration: What it says of the model's config.json.
        dtype: What it says that it computes in.
        context_length: The most tokens of a text.
        is_invariant: Whether it says that it computes the same bits whatever is beside.
        hardware: What it says that it computes on.
        incarnation: The process that it says it is.
        version: Paceline's, as it says.
        forward_latencies: What it says that forwards cost: median ns by rows.
        tokenizer: What GetTokenizer streams; None for a model without one.
        fim_token_ids: Its tokens for a gap between two texts.
        chat_template: What GetChatTemplate answers; None for a model without one.
        question_error: What GetTokenizer and GetChatTemplate answer, while it is set.
        question_count: How often they were asked while it was set.
        faults: For the next calls, one each: "" for none, "fail", "hang", "lose_session",
            "lose_tokens", "tamper", "overload", "wrong_answer". A call that hangs is never
            answered, and its server does not say that it has it.
        distort: What it does to each answer to such a call before it goes out.
        open_error: What OpenSession answers, while it is set.
        is_loading: Whether it cannot say yet what it is.
        opens: Set while OpenSession answers.
        answers: Set while Verify and Draft answer. Only a cancel ends a call that waits for it,
            also where a newer one of its session comes.
        specs: What sessions were opened for.
        waiting: Sessions that wait to be opened.
        refused: Sessions refused with `open_error`.
        opened: Sessions opened.
        closed: Sessions closed.
        calls: Verify, Decode and Draft requests, in the order of their arrival.
        cancelled: Calls that ended by a cancel: somebody told the server to stop.
        superseded: Calls that a newer one of their session ended.
        running: Such calls running now.
        live: By session, the sequence of its call.
        begun: Forwards that have begun.
        renewed: Leases renewed.
    """

    role: str
    latency_seconds: float = 0.0
    agrees: Callable[[int], bool] = lambda _: True
    token_after: Callable[[Sequence[int]], int] = next_token
    self_draft_depth: int = 0
    stalls: Callable[[Sequence[int]], bool] = lambda _: False
    eos_ids: tuple[int, ...] = (EOS,)
    rules: tuple[VerificationRule, ...] = (VerificationRule.EXACT,)
    takes_trees: bool = True
    samples_by: frozenset[str] = FILTERS
    scores_prompts: bool = True
    cancels_forwards: bool = True
    grammar_engine: str = ""
    model_name: str = ""
    fingerprint: str = ""
    lora_fingerprints: Mapping[str, str] = field(default_factory=dict)
    configuration: str = ""
    dtype: str = ""
    context_length: int = _CONTEXT_LENGTH
    is_invariant: bool = False
    hardware: Hardware | None = None
    incarnation: str = ""
    version: str = field(default_factory=partial(metadata.version, "paceline"))
    forward_latencies: tuple[tuple[int, int], ...] = ()
    tokenizer: bytes | None = field(default_factory=_tokenizer_bytes)
    fim_token_ids: tuple[int, ...] = ()
    chat_template: model_service_pb2.ChatTemplate | None = None
    faults: deque[str] = field(default_factory=deque)
    distort: Callable[[Any], None] = lambda _: None
    open_error: errors.PacelineError | None = None
    question_error: errors.PacelineError | None = None
    question_count: int = 0
    is_loading: bool = False
    opens: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    specs: list[session_service_pb2.SessionSpec] = field(default_factory=list)
    waiting: int = 0
    refused: int = 0
    opened: int = 0
    closed: int = 0
    renewed: int = 0
    running: int = 0
    live: dict[str, int] = field(default_factory=dict)
    begun: int = 0
    calls: list[Any] = field(default_factory=list)
    cancelled: list[Any] = field(default_factory=list)
    superseded: list[Any] = field(default_factory=list)
    sessions: dict[str, _Session] = field(default_factory=dict)
    address: str = ""
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _server: Any = None
    _health: Any = None

    def __post_init__(self) -> None:
        self.fingerprint = self.fingerprint or f"{self.role}-model"
        self.opens.set()
        self.answers.set()

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._health = health.aio.HealthServicer()
        await self.set_serving(True)
        self._server = grpc.aio.server(
            interceptors=[EdgeInterceptor(RpcMetrics(CollectorRegistry()))],
            options=POD_SERVER_OPTIONS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.register(self._server)
        self.address = self.address or free_address()
        self._server.add_insecure_port(self.address)
        await self._server.start()

    def register(self, server: Any) -> None:
        """Add its services, but for health."""
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(_Model(self), server)
        session_service_pb2_grpc.add_SessionServiceServicer_to_server(_Sessions(self), server)
        if self.role == "drafter":
            drafter_service_pb2_grpc.add_DrafterServiceServicer_to_server(_Drafter(self), server)
        else:
            target_service_pb2_grpc.add_TargetServiceServicer_to_server(_Target(self), server)

    @property
    def cut_short(self) -> list[Any]:
        """Calls that ended without an answer, for whatever reason."""
        return self.cancelled + self.superseded

    @property
    def forward_ns(self) -> int:
        """What a forward is said to take."""
        return round(self.latency_seconds * 1e9)

    @property
    def description(self) -> ModelDescription:
        """What its model is."""
        return ModelDescription(
            name=self.model_name or f"fake-{self.role}",
            revision="",
            fingerprint=self.fingerprint,
            tokenizer_fingerprint=_digest(self.tokenizer or b""),
            vocabulary_size=VOCABULARY_SIZE,
            eos_token_ids=self.eos_ids,
            fim_token_ids=self.fim_token_ids,
            context_length=self.context_length,
            backend="fake",
            dtype=self.dtype,
            device="",
            layer_count=0,
            cancels_between_layers=self.cancels_forwards,
            shares_forwards=False,
            takes_trees=self.takes_trees,
            samples_by=self.samples_by,
            scores_prompts=self.scores_prompts,
            grammar_engine=self.grammar_engine,
            is_invariant=self.is_invariant,
            verification_rules=self.rules,
            self_draft_depth=self.self_draft_depth,
            self_draft_kind="fake" if self.self_draft_depth else "",
            hardware=self.hardware,
            lora_fingerprints=tuple(self.lora_fingerprints.items()),
            configuration=self.configuration,
        )

    def info(self) -> model_service_pb2.GetModelInfoResponse:
        """Return what it says of its model."""
        forwards = tuple(ForwardLatency(rows, ns) for rows, ns in self.forward_latencies)
        said = translation.model_info(self.description, latencies=ModelLatencies(forwards, 0, 0))
        said.incarnation = self.incarnation
        said.version = self.version
        said.role = model_service_pb2.ModelRole.Value(f"MODEL_ROLE_{self.role.upper()}")
        return said

    async def kill(self) -> None:
        """Vanish: connections break, sessions are lost."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        self.sessions.clear()  # not before: a call could meet a server that has only forgotten

    async def set_serving(self, serving: bool) -> None:
        """Say at once whether this server takes work."""
        states = health_pb2.HealthCheckResponse
        await self._health.set("", states.SERVING if serving else states.NOT_SERVING)

    async def until(self, condition: Callable[[FakeModelServer], bool]) -> None:
        """Return once a condition holds."""
        async with asyncio.timeout(_LONGEST_WAIT_SECONDS), self.changed:
            await self.changed.wait_for(lambda: condition(self))

    async def note(self) -> None:
        """Wake up who waits in `until`."""
        async with self.changed:
            self.changed.notify_all()

    async def open(self, spec: session_service_pb2.SessionSpec) -> session_service_pb2.SessionGrant:
        """Open a session."""
        self.waiting += 1
        await self.opens.wait()
        self.waiting -= 1
        if self.open_error is not None:
            self.refused += 1
            await self.note()
            raise self.open_error
        understood = translation.session_spec(spec, model=self.description, owner="")
        validation.check_spec(understood, self.description)
        self.opened += 1
        self.specs.append(spec)
        session_id = f"{self.address}/{self.opened}"
        self.sessions[session_id] = _Session(understood)
        grant = SessionGrant(session_id, understood.lease_seconds)
        return translation.session_grant(grant)

    def close(self, session_id: str) -> None:
        """Close a session; what runs in it is superseded."""
        self.closed += 1
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.superseded.set()

    def renew(self, session_id: str) -> int:
        """Count a renewal, and return the sequence of the session's call, or 0 where it hangs."""
        session = self._session(session_id)
        self.renewed += 1
        return 0 if session.hangs else self.live.get(session_id, 0)

    @contextmanager
    def call(self, request: Any) -> Iterator[tuple[_Session, str]]:
        """Fence a call and give it the prefix it asks for; put up with its cancel."""
        call = request.call
        self.calls.append(request)
        fault = self.next_fault(call.session_id)
        session = self._understand(request)
        self._fence(session, call)
        base = session.tokens[: call.base_length]
        session.tokens = base
        self.running += 1
        self.live[call.session_id] = call.sequence
        try:
            is_verify = isinstance(request, target_service_pb2.VerifyRequest)
            session.tokens = base if is_verify else [*base, *call.token_ids]
            yield session, fault
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(request)
            raise
        except errors.SupersededError:
            self.superseded.append(request)
            raise
        finally:
            self.running -= 1
            if self.live.get(call.session_id) == call.sequence:
                del self.live[call.session_id]

    def refuse_questions(self) -> None:
        """Raise the error that questions about the model shall be answered with, if one is set."""
        if self.question_error is not None:
            self.question_count += 1
            raise self.question_error

    def next_fault(self, session_id: str) -> str:
        """Do to a session what goes wrong next: at the start of a call, or in mid-stream."""
        fault = self.faults.popleft() if self.faults else ""
        if fault == "lose_session":
            del self.sessions[session_id]
        session = self._session(session_id)
        session.hangs = fault == "hang"
        if fault == "overload":
            raise errors.OverloadedError("full", retry_after_seconds=0.01)
        if fault == "fail":
            raise errors.DrainingError("the fault that was asked for")
        if fault == "lose_tokens":
            session.tokens = session.tokens[:1]
        if fault == "tamper" and session.tokens:
            session.tokens[0] += 1
        return fault

    async def forward(
        self, superseded: asyncio.Event, fault: str, *, rows: int, depth: int = 0
    ) -> session_service_pb2.CallTiming:
        """Take a forward's time; stop when a newer call replaces this one."""
        self.begun += 1
        await self.note()
        seconds = 3600 if fault == "hang" else self.latency_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds or None):
                if seconds:
                    await superseded.wait()
        if superseded.is_set():
            raise errors.SupersededError("a newer call came")
        return session_service_pb2.CallTiming(
            forward_count=1, forward_ns=self.forward_ns or 1000, row_count=rows
        )

    def _understand(self, request: Any) -> _Session:
        """Find a call's session, and check every field, as servers do before anything else."""
        model = self.description
        size = model.vocabulary_size
        if isinstance(request, target_service_pb2.DecodeRequest):
            call, window = translation.decode_request(request, model=model, caller="")
            session = self._session(call.session_id)
            limit_length = session.spec.longest_length
            validation.check_call(call, limit_length=limit_length, vocabulary_size=size)
            validation.check_decoding(call, window, limit_length=limit_length, vocabulary_size=size)
            return session
        if self.role == "drafter":
            call, drafting = translation.draft_request(request, model=model, caller="")
            session = self._session(call.session_id)
            limit_length = session.spec.longest_length
            validation.check_call(call, limit_length=limit_length, vocabulary_size=size)
            validation.check_drafting(call, drafting, spec=session.spec, model=model)
            return session
        call, proposal, options = translation.verify_request(request, model=model, caller="")
        session = self._session(call.session_id)
        spec = session.spec
        validation.check_call(call, limit_length=spec.longest_length, vocabulary_size=size)
        validation.check_proposal(call, proposal, options=options, spec=spec, model=model)
        if proposal.distributions:
            validation.check_distributions(proposal, vocabulary_size=size)
        return session

    def draft_after(self, text: Sequence[int]) -> int:
        """Return a drafter's token after a text, which is wrong where it does not agree."""
        token_id = self.token_after(text)
        return token_id if self.agrees(len(text)) else (token_id + 1) % EOS

    def grow(self, tree: DraftedTree, prefix: Sequence[int], *, width: int) -> Proposal:
        """Return what a drafter's forward finds; where its first token is wrong, its second is not.

        Args:
            tree: What it has found so far, which grows.
            prefix: What that follows.
            width: Tokens at a place.
        """
        found = []
        for parent in tree.due:
            token_id = self.draft_after([*prefix, *tree.path_to(parent)])
            found.append([((token_id - n) % EOS, 0.6 * 0.4**n) for n in range(width)])
        return tree.grow(found)

    def guess_after(self, text: Sequence[int]) -> proposal_pb2.Proposal:
        """Return what a target proposes after a text, root first, two tokens at a place."""
        guessed, said = proposal_pb2.Proposal(), list(text)
        for depth in range(self.self_draft_depth):
            said.append(self.draft_after(said))
            guessed.token_ids.extend((said[-1], (said[-1] + 2) % EOS))
            guessed.parents.extend([2 * depth - 1 if depth else 0] * 2)
        return guessed

    def _fence(self, session: _Session, call: session_service_pb2.SessionCall) -> None:
        if call.sequence <= session.sequence:
            raise errors.StaleCallError("a newer call came first")
        session.sequence = call.sequence
        session.superseded.set()
        session.superseded = asyncio.Event()
        if call.base_length > len(session.tokens):
            raise errors.PrefixNotHeldError(
                "too short", metadata={"held_length": str(len(session.tokens))}
            )
        session.tokens = session.tokens[: call.base_length]
        if call.base_length and prefix_digest(session.tokens) != call.base_digest:
            raise errors.PrefixMismatchError("other tokens are held")

    def _session(self, session_id: str) -> _Session:
        if session_id not in self.sessions:
            raise errors.SessionNotFoundError("no such session")
        return self.sessions[session_id]


class _Model(model_service_pb2_grpc.ModelServiceServicer):
    def __init__(self, fake: FakeModelServer) -> None:
        self._fake = fake

    async def GetModelInfo(self, request, context):  # noqa: N802
        fake = self._fake
        if fake.is_loading:
            raise errors.LoadingError("the model is still loading")
        return fake.info()

    async def GetTokenizer(self, request, context):  # noqa: N802
        self._fake.refuse_questions()
        if self._fake.tokenizer is None:
            raise errors.UnsupportedError("no tokenizer")
        half = len(self._fake.tokenizer) // 2
        yield model_service_pb2.GetTokenizerResponse(
            tokenizer_fingerprint=_digest(self._fake.tokenizer),
            total_bytes=len(self._fake.tokenizer),
            data=self._fake.tokenizer[:half],
        )
        yield model_service_pb2.GetTokenizerResponse(data=self._fake.tokenizer[half:])

    async def GetChatTemplate(self, request, context):  # noqa: N802
        self._fake.refuse_questions()
        if self._fake.chat_template is None:
            raise errors.UnsupportedError("no chat template")
        return model_service_pb2.GetChatTemplateResponse(chat_template=self._fake.chat_template)


class _Sessions(session_service_pb2_grpc.SessionServiceServicer):
    def __init__(self, fake: FakeModelServer) -> None:
        self._fake = fake

    async def OpenSession(self, request, context):  # noqa: N802
        grant = await self._fake.open(request.spec)
        return session_service_pb2.OpenSessionResponse(grant=grant)

    async def RenewSession(self, request, context):  # noqa: N802
        live_sequence = self._fake.renew(request.session_id)
        lease_seconds = self._fake.sessions[request.session_id].spec.lease_seconds
        return session_service_pb2.RenewSessionResponse(
            lease=translation.duration(lease_seconds), live_sequence=live_sequence
        )

    async def CloseSession(self, request, context):  # noqa: N802
        self._fake.close(request.session_id)
        await self._fake.note()
        return session_service_pb2.CloseSessionResponse()


def _tell_likeliest(response, text, count):
    told = likeliest_after(text, count)
    response.top_logprobs.add(
        token_ids=[token for token, _ in told], logprobs=[logprob for _, logprob in told]
    )


class _Target(target_service_pb2_grpc.TargetServiceServicer):
    def __init__(self, fake: FakeModelServer) -> None:
        self._fake = fake

    async def Verify(self, request, context):  # noqa: N802
        fake = self._fake
        try:
            with fake.call(request) as (session, fault):
                prefix = [*session.tokens, *request.call.token_ids]
                superseded = session.superseded
                await fake.note()
                proposal = Proposal(request.proposal.token_ids, request.proposal.parents)
                timing = await fake.forward(
                    superseded,
                    "hang" if fake.stalls(prefix) else fault,
                    rows=len(request.call.token_ids) + len(proposal),
                    depth=request.speculation_depth,
                )
                await fake.answers.wait()
                decided = list(prefix)

                def choose(row: int, _: int) -> int:
                    decided.extend(proposal.along([row - 1] if row else []))
                    return fake.token_after(decided)

                if request.score:
                    path, next_token = tuple(range(len(proposal))), 0
                    decided.extend(proposal.token_ids)
                else:
                    path, next_token = proposal.follow(choose)
                if not superseded.is_set():
                    session.tokens = list(decided)
        finally:
            await fake.note()
        response = target_service_pb2.VerifyResponse(
            sequence=request.call.sequence,
            prefix_length=len(prefix),
            accepted_path=path,
            next_token_id=next_token,
            held_length=len(decided),
            timing=timing,
        )
        if request.propose and session.spec.rule is VerificationRule.EXACT:
            response.proposal.CopyFrom(fake.guess_after([*decided, next_token]))
        if request.logprobs:
            said = decided if request.score else [*decided, response.next_token_id]
            ends = range(len(prefix) + 1, len(said) + 1)
            response.logprobs.extend(logprob_of(said[:end]) for end in ends)
        if request.top_logprobs:
            for end in range(len(prefix), len(decided) + (not request.score)):
                _tell_likeliest(response, decided[:end], request.top_logprobs)
        if fault == "wrong_answer":
            response.prefix_length += 1
            response.next_token_id = (response.next_token_id + 1) % EOS
        fake.distort(response)
        return response

    async def Decode(self, request, context):  # noqa: N802
        fake = self._fake
        try:
            with fake.call(request) as (session, fault):
                superseded, text = session.superseded, list(session.tokens)
                rows = max(1, len(request.call.token_ids))
                for _ in range(request.max_tokens):
                    how = "hang" if fake.stalls(text) else fault
                    timing = await fake.forward(superseded, how, rows=rows)
                    await fake.answers.wait()
                    text.append(fake.token_after(text))
                    rows = 1
                    response = target_service_pb2.DecodeResponse(
                        sequence=request.call.sequence,
                        start_length=len(text) - 1 + (fault == "wrong_answer"),
                        token_ids=text[-1:],
                        timing=timing,
                    )
                    if request.logprobs:
                        response.logprobs.append(logprob_of(text))
                    if request.top_logprobs:
                        _tell_likeliest(response, text[:-1], request.top_logprobs)
                    if not superseded.is_set():
                        session.tokens = list(text)
                    is_over = text[-1] in request.end_token_ids
                    fake.distort(response)
                    yield response
                    fault = fake.next_fault(request.call.session_id)
                    if is_over or fault in ("lose_tokens", "tamper"):
                        break
        finally:
            await fake.note()


class _Drafter(drafter_service_pb2_grpc.DrafterServiceServicer):
    def __init__(self, fake: FakeModelServer) -> None:
        self._fake = fake

    async def Draft(self, request, context):  # noqa: N802
        fake = self._fake
        try:
            with fake.call(request) as (session, fault):
                superseded, text = session.superseded, list(session.tokens)
                prefix = tuple(text)
                left, rows = request.max_tokens, max(1, len(request.call.token_ids))
                tree = DraftedTree(request.branch_count) if request.width > 1 else None
                await fake.note()
                while left:
                    start_length, timing = len(text), session_service_pb2.CallTiming()
                    found = proposal_pb2.Proposal()
                    for _ in range(min(left, request.chunk_tokens or 1)):
                        how = "hang" if fake.stalls(text) else fault
                        _add(await fake.forward(superseded, how, rows=rows), to=timing)
                        if tree is None:
                            found.token_ids.append(fake.draft_after(text))
                        else:
                            piece = fake.grow(tree, prefix, width=request.width)
                            found.token_ids.extend(piece.token_ids)
                            found.parents.extend(piece.parents)
                        text.append(fake.draft_after(text))
                        if session.spec.rule is VerificationRule.REJECTION:
                            found.distributions.add(token_ids=text[-1:], probabilities=[1.0])
                        left, rows = left - 1, len(tree.due) if tree else 1
                    await fake.answers.wait()
                    response = drafter_service_pb2.DraftResponse(
                        sequence=request.call.sequence,
                        start_length=start_length + (fault == "wrong_answer"),
                        proposal=found,
                        timing=timing,
                    )
                    if not superseded.is_set():
                        session.tokens = list(text)
                    fake.distort(response)
                    yield response
        finally:
            await fake.note()


def _add(took: session_service_pb2.CallTiming, *, to: session_service_pb2.CallTiming) -> None:
    for part in ("queue_ns", "forward_ns", "forward_count", "row_count"):
        setattr(to, part, getattr(to, part) + getattr(took, part))


@asynccontextmanager
async def serving(*servers: FakeModelServer) -> AsyncIterator[None]:
    """Run servers; those that were killed stay so."""
    for server in servers:
        await server.start()
    try:
        yield
    finally:
        for server in servers:
            await server.kill()
