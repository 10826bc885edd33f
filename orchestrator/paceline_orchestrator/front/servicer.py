"""OrchestratorService: what clients call."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, closing, nullcontext
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    ContextLengthExceededError,
    DrainingError,
    InvalidFieldError,
)
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.orchestrator_service_pb2_grpc import OrchestratorServiceServicer
from paceline_contract.limits import LEAST_MESSAGE_BYTES, most_request_bytes
from paceline_orchestrator.decoding.deadline import Deadline
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.front.awaited_model import AwaitedModel
from paceline_orchestrator.front.detokenizer import whole_text, work_size
from paceline_orchestrator.front.generation import Generation
from paceline_orchestrator.front.identity import lane_of, share_of
from paceline_orchestrator.front.order_maker import OrderMaker
from paceline_orchestrator.front.pacing import Pacing
from paceline_orchestrator.front.prompts import (
    encode_prompt,
    generation_of,
    prompt_size,
    token_ids_of,
    tokens_message,
)
from paceline_orchestrator.front.request_queue import RequestQueue
from paceline_orchestrator.front.request_validation import (
    check,
    check_lengths,
)
from paceline_orchestrator.front.served_template import ServedTemplate
from paceline_orchestrator.front.text_workers import TextWorkers
from paceline_orchestrator.front.translation import server_message
from paceline_serving.admission import Admission
from paceline_serving.keys import current_caller
from paceline_serving.version import VERSION

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paceline_orchestrator.decoding.metrics import RequestMetrics
    from paceline_orchestrator.decoding.session_opener import SessionOpener
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.front.tokenizer import Codecs
    from paceline_orchestrator.planning.request_planner import RequestPlanner
    from paceline_orchestrator.scaling.demand import DemandMeter
    from paceline_orchestrator.settings import OrchestratorSettings
    from paceline_serving.keys import Caller

_log = logging.getLogger(__name__)

_DRAINING = "this orchestrator is shutting down"


class OrchestratorServicer(OrchestratorServiceServicer):
    """Generates for clients, and keeps nothing of a request but measurements.

    Args:
        pool: The model servers.
        opener: Opens and closes sessions.
        planning: Chooses how to decode.
        demand: Told which streams run.
        metrics: Where requests are counted.
        settings: Limits.
        tasks: Owns what runs for requests.
    """

    def __init__(
        self,
        *,
        pool: ServerPool,
        opener: SessionOpener,
        codecs: Codecs,
        planning: RequestPlanner,
        demand: DemandMeter,
        metrics: RequestMetrics,
        settings: OrchestratorSettings,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._pool = pool
        self._opener = opener
        self._codecs = codecs
        self._template = ServedTemplate(pool)
        self._planning = planning
        self._demand = demand
        self._metrics = metrics
        self._settings = settings
        self._text_rules = settings.text_rules()
        self._tasks = tasks
        self._admission = Admission(_DRAINING)
        self._pacing = Pacing(planning)
        self._queue = RequestQueue(settings, metrics=metrics)
        self._texts = TextWorkers()
        self._model = AwaitedModel(pool, codecs)
        self._orders = OrderMaker(self._model, opener=opener, planning=planning, texts=self._texts)
        self._generations: set[Generation] = set()

    @property
    def running_count(self) -> int:
        """Requests running."""
        return self._queue.running_count

    @property
    def waiting_count(self) -> int:
        """Requests that wait for their turn."""
        return self._queue.waiting_count

    @property
    def most_request_bytes(self) -> int:
        """The largest request that is taken: the longest context among the targets says."""
        ceiling = self._settings.message_limit_bytes
        contexts = [
            it.facts.context_length
            for it in self._pool.servers
            if it.role is Role.TARGET and it.facts is not None
        ]
        return min(ceiling, most_request_bytes(max(contexts))) if contexts else ceiling

    def check_size(self, byte_count: int) -> None:
        """Refuse a message, before it is parsed, that is larger than any request.

        Raises:
            ContextLengthExceededError: It is.
        """
        if byte_count > LEAST_MESSAGE_BYTES and byte_count > self.most_request_bytes:
            raise ContextLengthExceededError(
                f"the request has {byte_count} bytes, and at most {self.most_request_bytes} are"
                " taken with this model's context"
            )

    def begin(self) -> None:
        """Let requests run: there is a target, and its tokenizer."""
        self._model.begin()

    def drain(self) -> None:
        """Accept no more requests, and send those that wait for their turn elsewhere."""
        self._admission.close()
        self._queue.send_away(_DRAINING)
        self._planning.refinement.end()

    async def idle(self) -> None:
        """Return once no request runs or waits."""
        await self._admission.idle()

    def cut(self) -> None:
        """End all requests; each stream says why, and can be resumed elsewhere."""
        self._admission.cut()
        for generation in tuple(self._generations):
            generation.fail(DrainingError(_DRAINING))

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Continue a prompt.

        Cancellation:
            Leaving the stream withdraws every call; sessions are closed behind the client's back.
        """
        arrived_ns = time.perf_counter_ns()
        self._demand.arrived()
        self._metrics.arrived()
        caller = current_caller()
        share = share_of(context, caller)
        check(request)
        deadline = Deadline.after(self._allowed_seconds(context))
        async with self._admitted(
            request, share, caller=caller, lane=lane_of(context), deadline=deadline
        ) as waited_ns:
            with self._admission.cuttable():
                order = await self._orders.complete(
                    request,
                    share=share,
                    arrived_ns=arrived_ns,
                    waited_ns=waited_ns,
                    deadline=deadline,
                )
            generation = Generation(
                order,
                pool=self._pool,
                opener=self._opener,
                metrics=self._metrics,
                text_rules=self._text_rules,
                charge=caller.charge if caller else None,
            )
            with (
                closing(generation),
                self._pacing.following(generation),
                self._metrics.request(generation, arrived_ns=arrived_ns),
                self._demand.stream(
                    verifier_limit=lambda: generation.verifier_limit,
                    lookahead=order.options.wish.lookahead,
                ),
            ):
                run = self._tasks.create_task(generation.run(), name=f"run {order.request_id}")
                self._generations.add(generation)
                try:
                    async for message in generation.messages():
                        yield message
                finally:
                    self._generations.discard(generation)
                    run.cancel()
                    await asyncio.wait((run,))
                    took = generation.statistics()
                    self._planning.experience.learn(
                        generation.lesson,
                        plan=generation.teaches,
                        verification_count=took.target_forward_count + took.cancelled_count,
                        text_accepted_count=took.text.accepted,
                        text_rejected_count=took.text.rejected,
                        was_predicted=bool(order.predicted),
                    )

    async def GetSystemInfo(  # noqa: N802
        self, _request: pb.GetSystemInfoRequest, _context: Any
    ) -> pb.GetSystemInfoResponse:
        """Describe the models and servers."""
        info = pb.GetSystemInfoResponse(version=VERSION, running_request_count=self.running_count)
        model = self._pool.last_model()
        if model is not None:
            info.model_name = model.model_name
            info.model_fingerprint = model.fingerprint
            if self._codecs.has(model.tokenizer_fingerprint):
                info.tokenizer_fingerprint = model.tokenizer_fingerprint
            info.vocabulary_size = model.vocabulary_size
            info.context_length = model.context_length
            for name, value in model.sampling_defaults:
                setattr(info.sampling_defaults, name, value)
        for name, fingerprint in sorted(self._pool.lora_adapters().items()):
            info.lora_adapters.add(name=name, fingerprint=fingerprint)
        info.most_request_bytes = self.most_request_bytes
        for server, standing in self._pool.standings().items():
            info.servers.append(server_message(server, standing))
        return info

    async def GetSystemChatTemplate(  # noqa: N802
        self, _request: pb.GetSystemChatTemplateRequest, _context: Any
    ) -> pb.GetSystemChatTemplateResponse:
        """Ask a target for its model's chat template; a client that needs it often keeps it.

        Raises:
            UnsupportedError: Each target with the model has said that there is none.
            NoTargetError: No target tells it, and one that could is away, or has failed.
        """
        fingerprint, template = await self._template.fetch()
        return pb.GetSystemChatTemplateResponse(
            model_fingerprint=fingerprint, chat_template=template
        )

    async def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: Any
    ) -> pb.TokenizeResponse:
        """Return the tokens of a text."""
        if request.WhichOneof("prompt") is None:
            raise InvalidFieldError.of("prompt", "is required")
        model, codec = await self._model.wait_for_codec()
        asked = generation_of(request)
        check_lengths(asked, model)
        share = share_of(context, current_caller())
        token_ids = await self._texts.run(
            lambda: encode_prompt(asked, codec, fim_token_ids=()),
            size=prompt_size(asked),
            share=share,
        )
        if len(token_ids) > model.context_length:
            raise ContextLengthExceededError.of(
                request.WhichOneof("prompt") or "prompt",
                f"must be at most {model.context_length} tokens, and is {len(token_ids)}",
            )
        bytes_of = codec.bytes_alone if request.include_token_bytes else None
        return await self._texts.run(
            lambda: tokens_message(token_ids, bytes_of=bytes_of), size=len(token_ids), share=share
        )

    async def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        """Return the text of tokens."""
        model, codec = await self._model.wait_for_codec()
        if len(request.token_ids) > model.context_length:
            raise ContextLengthExceededError.of(
                "token_ids",
                f"must be at most {model.context_length} tokens, and is {len(request.token_ids)}",
            )
        token_ids = await token_ids_of(request.token_ids)
        if max(token_ids, default=0) >= model.vocabulary_size:
            raise InvalidFieldError.of("token_ids", f"must be in [0, {model.vocabulary_size})")
        text = await self._texts.run(
            lambda: whole_text(codec, token_ids),
            size=work_size(codec, len(token_ids)),
            share=share_of(context, current_caller()),
            field="token_ids",
        )
        return pb.DetokenizeResponse(text=text)

    @asynccontextmanager
    async def _admitted(
        self,
        request: pb.GenerateRequest,
        share: str,
        *,
        caller: Caller | None,
        lane: str,
        deadline: Deadline,
    ) -> AsyncIterator[int]:
        """Let a request run, in its turn, and yield how many nanoseconds it has waited.

        It is counted, also against its key's limits, whether it runs or waits. When the last one
        that ran has ended, however it did, there is time for the planner's simulations.
        """
        with self._admission.admitted(), caller.admitted() if caller else nullcontext():
            # At least one target; how many more follows from its plan, which it does not have yet.
            with self._demand.stream(verifier_limit=lambda: 1):
                waited_seconds = await self._take_place(
                    request, share, lane=lane, deadline=deadline
                )
            self._planning.refinement.note_request(self._tasks)
            try:
                yield int(waited_seconds * 1e9)
            finally:
                self._queue.leave(share)
                if not self.running_count:
                    self._planning.refinement.begin_at_rest(self._tasks)

    async def _take_place(
        self, request: pb.GenerateRequest, share: str, *, lane: str, deadline: Deadline
    ) -> float:
        """Let a request wait for its turn, once there is a target with its LoRA adapter.

        While the adapter is away it holds no place: others can be worked on.

        Returns:
            The seconds that it has waited for its turn.

        Raises:
            NoTargetError: The adapter was away for too long.
            ModelNotFoundError: No target has this adapter.
        """
        size, patience, waited_seconds = request.ByteSize(), shortage.WAIT_SECONDS, 0.0
        while True:
            if request.lora and not self._model.has(lora=request.lora):
                began = time.monotonic()
                with self._queue.counted(share, size), self._admission.cuttable():
                    await self._model.wait_for_adapter(
                        request.lora, seconds=min(patience, deadline.remaining_seconds)
                    )
                patience -= time.monotonic() - began
            waited_seconds += await self._queue.enter(
                share, lane=lane, size=size, deadline=deadline
            )
            is_here = False
            try:
                is_here = not request.lora or self._model.has(lora=request.lora)
            finally:
                if not is_here:
                    self._queue.leave(share)  # the adapter went away before its turn
            if is_here:
                return waited_seconds

    def _allowed_seconds(self, context: Any) -> float:
        asked: float | None = context.time_remaining()
        if asked is None:
            asked = self._settings.default_deadline_seconds
        return min(asked, self._settings.call_limit_seconds)
