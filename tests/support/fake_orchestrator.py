"""An OrchestratorService without models: token p is p and reads "p ", so gaps are seen."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.errors import InvalidFieldError, PacelineError, UnsupportedError
from paceline.status import DETAILS_KEY, encode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import orchestrator_service_pb2_grpc as pb_grpc
from paceline.v1.model_service_pb2 import MODEL_ROLE_TARGET, ChatTemplate, LoraAdapter
from support.ports import free_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from paceline.v1.sampling_pb2 import SamplingDefaults

PROMPT_LENGTH = 3
SEED = 7
_MOST_TOKENS = 10_000


class BareCancelError(PacelineError):
    """What gRPC's servers say to a call that arrives as they stop: a code without a reason."""

    code = "CANCELLED"


@dataclass
class Leg:
    """How one call of Generate goes: normally, or with what is set here."""

    error: PacelineError | None = None  # raised after `chunks` chunks
    chunks: int = 0
    chunk_tokens: int = 1  # in each chunk but the last, which has what is left
    hangs: bool = False  # after `chunks` chunks
    refuses: bool = False  # raises the error before anything else
    fingerprint: str = "model-a"
    word: str = "{} "  # how a token reads
    shift: int = 0  # added to positions: a broken server
    omits_finish: bool = False
    said: tuple[tuple[int, str], ...] = ()  # tokens and their texts, instead of numbers
    stop_string: str = ""  # what ended it, instead of an end of text
    own_tokens: set[int] = field(default_factory=set)  # the target's; the others were drafted
    prompt_length: int = PROMPT_LENGTH
    predicted: tuple[int, int] = (0, 0)  # tokens that were predicted, and accepted among them
    bytes_of: Callable[[int], bytes] | None = None  # what a token is; None: it has no tokenizer


@dataclass
class FakeOrchestrator(pb_grpc.OrchestratorServiceServicer):
    """Serves Generate by its script, one leg for each call, and remembers what it was asked."""

    script: list[Leg] = field(default_factory=list)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    peers: list[str] = field(default_factory=list)  # the connection that each request came by
    seconds: list[float] = field(default_factory=list)  # that each request had left
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)  # of each call
    speaks: Callable[[pb.GenerateRequest], Leg] | None = None  # instead of a script
    info_hangs: bool = False
    info_errors: list[PacelineError] = field(default_factory=list)  # one for each question
    refusal: PacelineError | None = None  # of every call, while it is set
    chat_template: ChatTemplate | None = None
    sampling_defaults: SamplingDefaults | None = None
    lora_fingerprints: dict[str, str] = field(default_factory=dict)
    info_asked: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def Generate(self, request, context):  # noqa: N802
        self.requests.append(request)
        self.peers.append(context.peer())
        self.metadata.append(dict(context.invocation_metadata()))
        self.seconds.append(context.time_remaining())
        await self._refuse(context)
        leg = self.script.pop(0) if self.script else Leg()
        if self.speaks is not None:
            leg = self.speaks(request)
        try:
            async for response in self._answer(request, leg):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            # The latter if the cancel comes while a response is being sent.
            self.cancelled.set()
            raise
        if leg.error is not None:
            await _abort(context, leg.error)

    async def _answer(self, request, leg):
        if leg.refuses:
            return
        yield pb.GenerateResponse(started=_started(request, leg))
        for chunk in _prompt_chunks(request, leg):
            yield pb.GenerateResponse(prompt_chunk=chunk)
        received = len(request.resume_token_ids)
        total = min(request.max_tokens, _MOST_TOKENS) if request.HasField("max_tokens") else 5
        if leg.said:
            async for response in _said(leg, request):
                yield response
            return
        for count, index in enumerate(range(received, total, leg.chunk_tokens)):
            if count == leg.chunks and leg.hangs:
                await asyncio.Event().wait()
            if count == leg.chunks and leg.error is not None:
                return
            last = min(index + leg.chunk_tokens, total)
            first = leg.prompt_length
            chunk = _chunk(range(first + index, first + last), leg)
            _tell_logprobs(chunk, request)
            _tell_bytes(chunk, request, leg)
            yield pb.GenerateResponse(chunk=chunk)
            if request.stream_timeline:
                event = pb.TimelineEvent(kind=pb.TIMELINE_EVENT_KIND_DRAFTED, server="drafter-0")
                yield pb.GenerateResponse(timeline_event=event)
        if not leg.omits_finish:
            yield pb.GenerateResponse(finished=_finished(total, leg))

    async def GetSystemInfo(self, request, context):  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        self.info_asked.set()
        await self._refuse(context)
        if self.info_hangs:
            await asyncio.Event().wait()
        if self.info_errors:
            await _abort(context, self.info_errors.pop(0))
        servers = [pb.ServerInfo(name="target-0", role=MODEL_ROLE_TARGET, ready=True)]
        return pb.GetSystemInfoResponse(
            version="1",
            model_name="fake",
            servers=servers,
            context_length=100,
            sampling_defaults=self.sampling_defaults,
            lora_adapters=[
                LoraAdapter(name=name, fingerprint=each)
                for name, each in self.lora_fingerprints.items()
            ],
        )

    async def Tokenize(self, request, context):  # noqa: N802
        self.requests.append(request)
        await self._refuse(context)
        text = request.text or "".join(part.text for part in request.parts.parts)
        content = text.encode()
        told = [content[index : index + 1] for index in range(len(content))]
        return pb.TokenizeResponse(
            token_ids=content, token_bytes=told if request.include_token_bytes else ()
        )

    async def Detokenize(self, request, context):  # noqa: N802
        self.requests.append(request)
        await self._refuse(context)
        if max(request.token_ids, default=0) > 255:
            await _abort(context, InvalidFieldError.of("token_ids", "must be in [0, 256)"))
        text = bytes(request.token_ids).decode(errors="replace")
        return pb.DetokenizeResponse(text=text)

    async def GetSystemChatTemplate(self, request, context):  # noqa: N802
        await self._refuse(context)
        if self.chat_template is None:
            error = UnsupportedError("this model has no chat template: it continues text")
            await _abort(context, error)
        return pb.GetSystemChatTemplateResponse(
            model_fingerprint="model-a", chat_template=self.chat_template
        )

    async def _refuse(self, context):
        if self.refusal is not None:
            await _abort(context, self.refusal)


@asynccontextmanager
async def serving(
    fake: FakeOrchestrator, credentials: grpc.ServerCredentials | None = None
) -> AsyncIterator[FakeOrchestrator]:
    """Serve it on a free port of this machine; `fake.address` says which."""
    server = grpc.aio.server()
    pb_grpc.add_OrchestratorServiceServicer_to_server(fake, server)
    states = health.aio.HealthServicer()
    await states.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    fake.address = fake.address or free_address()
    if credentials is None:
        server.add_insecure_port(fake.address)
    else:
        server.add_secure_port(fake.address, credentials)
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(grace=None)


async def _abort(context: grpc.aio.ServicerContext, error: PacelineError) -> None:
    status = encode(error)
    details = ((DETAILS_KEY, status.SerializeToString()),)
    code = grpc.StatusCode[error.code]
    await context.abort(code, status.message, trailing_metadata=details)


def _started(request: pb.GenerateRequest, leg: Leg) -> pb.GenerationStarted:
    return pb.GenerationStarted(
        request_id=request.request_id or "r-1",
        seed=request.seed if request.HasField("seed") else SEED,
        model_fingerprint=leg.fingerprint,
        strategy=pb.STRATEGY_DISTRIBUTED,
        promise=1,
        prompt_token_count=leg.prompt_length,
        width=request.width,
        branches=request.branches,
    )


def _chunk(positions: Sequence[int], leg: Leg) -> pb.GenerationChunk:
    return pb.GenerationChunk(
        position=positions[0] + leg.shift,
        token_ids=positions,
        text="".join(map(leg.word.format, positions)),
        text_lengths=[len(leg.word.format(it)) for it in positions],
        origins=[
            pb.TOKEN_ORIGIN_TARGET if it in leg.own_tokens else pb.TOKEN_ORIGIN_ACCEPTED_DRAFT
            for it in positions
        ],
    )


async def _said(leg: Leg, request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    """Say what the leg says, up to the request's limit."""
    most = request.max_tokens or len(leg.said)
    for index, (token_id, text) in enumerate(leg.said[:most]):
        if index == leg.chunks and leg.hangs:
            await asyncio.Event().wait()
        chunk = pb.GenerationChunk(
            position=PROMPT_LENGTH + index,
            token_ids=[token_id],
            text=text,
            text_lengths=[len(text)],
            origins=[pb.TOKEN_ORIGIN_TARGET],
        )
        _tell_logprobs(chunk, request)
        yield pb.GenerateResponse(chunk=chunk)
    finished = _finished(min(most, len(leg.said)), leg)
    if most >= len(leg.said):
        finished.finish_reason = pb.FINISH_REASON_EOS
    if leg.stop_string:
        finished.finish_reason = pb.FINISH_REASON_STOP_STRING
        finished.stop_string = leg.stop_string
    yield pb.GenerateResponse(finished=finished)


def _tell_logprobs(chunk: pb.GenerationChunk | pb.PromptChunk, request: pb.GenerateRequest) -> None:
    """Say what was asked: a token is likely by its number, and the next ones are ever less so."""
    ranks = range(1, request.top_logprobs + 1)
    for token_id in chunk.token_ids:
        if request.logprobs:
            chunk.logprobs.append(-token_id)
        if ranks:
            chunk.top_logprobs.add(
                token_ids=[token_id + rank for rank in ranks],
                logprobs=[-token_id - rank for rank in ranks],
            )


def _prompt_chunks(request: pb.GenerateRequest, leg: Leg) -> Iterator[pb.PromptChunk]:
    """Tell the prompt's tokens, which are their positions, as those of the answer are told."""
    is_scored = request.HasField("prompt_logprobs")
    if not (is_scored or request.include_prompt):
        return
    length = leg.prompt_length
    later = (range(first, min(first + 256, length)) for first in range(1, length, 256))
    for positions in ([0], *later):
        chunk = pb.PromptChunk(position=positions[0], token_ids=positions)
        if is_scored and positions[0]:
            alike = pb.GenerateRequest(logprobs=True, top_logprobs=request.prompt_logprobs)
            _tell_logprobs(chunk, alike)
        _tell_bytes(chunk, request, leg)
        yield chunk


def _tell_bytes(
    chunk: pb.GenerationChunk | pb.PromptChunk, request: pb.GenerateRequest, leg: Leg
) -> None:
    if request.include_token_bytes and leg.bytes_of is not None:
        for told in (chunk, *chunk.top_logprobs):
            told.token_bytes.extend(map(leg.bytes_of, told.token_ids))


def _finished(total: int, leg: Leg) -> pb.GenerationFinished:
    return pb.GenerationFinished(
        finish_reason=pb.FINISH_REASON_LENGTH,
        promise=1,
        prompt_token_count=leg.prompt_length,
        completion_token_count=total,
        cached_prompt_token_count=1,
        statistics=pb.GenerationStatistics(
            target_forward_count=total,
            predicted_token_count=leg.predicted[0],
            predicted_accepted_token_count=leg.predicted[1],
            fallbacks=[pb.Fallback(kind=pb.FALLBACK_KIND_TARGET_LOST, count=1)],
        ),
        timeline=[pb.TimelineEvent(kind=pb.TIMELINE_EVENT_KIND_VERIFYING, server="target-0")],
    )
