"""Makes orders of requests, with what only this process knows: model, tokens, seed and plan."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from paceline.errors import ContextLengthExceededError, NoTargetError, UnsupportedError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.front.detokenizer import work_size
from paceline_orchestrator.front.order import Order
from paceline_orchestrator.front.prompts import (
    encode_prompt,
    prompt_size,
    request_key,
    token_ids_of,
)
from paceline_orchestrator.front.request_validation import (
    allowed_tokens,
    check_abilities,
    check_lengths,
    check_tokens,
    seed_of,
)
from paceline_orchestrator.front.text import StreamedText
from paceline_orchestrator.front.translation import read_options
from paceline_serving import tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.v1 import orchestrator_service_pb2 as pb
    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.decoding.session_opener import SessionOpener
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.front.awaited_model import AwaitedModel
    from paceline_orchestrator.front.text_workers import TextWorkers
    from paceline_orchestrator.front.tokenizer import Codec
    from paceline_orchestrator.planning.request_planner import RequestPlanner

# A digest of so much takes a millisecond.
_LARGE_BYTES = 1 << 20


class OrderMaker:
    """Makes orders.

    Args:
        model: The model that requests are for.
        opener: Says whose turn it is with a long text.
        planning: Chooses how to decode.
        texts: Turns texts into tokens, on other threads.
    """

    def __init__(
        self,
        model: AwaitedModel,
        *,
        opener: SessionOpener,
        planning: RequestPlanner,
        texts: TextWorkers,
    ) -> None:
        self._model = model
        self._opener = opener
        self._planning = planning
        self._texts = texts

    async def complete(
        self,
        request: pb.GenerateRequest,
        *,
        share: str,
        arrived_ns: int,
        waited_ns: int,
        deadline: Deadline,
    ) -> Order:
        """Complete a request that runs now.

        Args:
            request: What the client wants.
            share: The tenant.
            arrived_ns: When it came, by `time.perf_counter_ns`.
            waited_ns: How long it has waited for its turn.
            deadline: When it ends.

        Raises:
            PacelineError: It cannot be decoded, now or ever.
        """
        call = tracing.current()
        request_id = request.request_id or (call.request_id if call else "")
        check_abilities(request)
        model = await self._model.wait(deadline, lora=request.lora)
        # A request that needs the room of a target that is away waits for it.
        able = self._model.with_those_away(model)
        with self._model.refusing_for_good():
            check_lengths(request, able)
        given_count = len(request.token_ids.ids) + len(request.resume_token_ids)
        await self._opener.long_texts.wait_turn(given_count, share=share)
        codec = self._model.codec_of(model)
        prompt = await self._tokenise(request, codec, model, share=share)
        with self._model.refusing_for_good():
            self._check_tokens(request, model, able, prompt=prompt)
            max_tokens = _limit_of(request, model, able, prompt_length=len(prompt))
        predicted = await self._tokenise_prediction(request, codec, share=share)
        text = StreamedText(codec, request.stop_strings, prompt=prompt)
        resumed = await token_ids_of(request.resume_token_ids)
        options = read_options(request)
        await self._texts.run(
            lambda: text.resume(resumed),
            size=work_size(codec, len(resumed)),
            share=share,
            field="resume_token_ids",
        )
        plan = self._planning.plan(
            options.wish,
            model,
            prompt_length=len(prompt) + len(resumed),
            limit_length=len(prompt) + max_tokens,
        )
        self._planning.begin(plan, options.wish, model=model)
        return Order(
            options=options,
            request_id=request_id,
            share=share,
            model=model,
            text=text,
            prompt=prompt,
            resumed=resumed,
            max_tokens=max_tokens,
            seed=seed_of(request),
            plan=plan,
            arrived_ns=arrived_ns,
            waited_ns=waited_ns,
            deadline=deadline,
            predicted=predicted,
            bytes_of=codec.bytes_alone if codec and request.include_token_bytes else None,
            request_key=await _key_of(request, share=share),
        )

    def _check_tokens(
        self,
        request: pb.GenerateRequest,
        model: ModelFacts,
        able: ModelFacts,
        *,
        prompt: tuple[int, ...],
    ) -> None:
        """Check a request against the model, as its ready targets know it.

        Args:
            request: The request.
            model: As the ready targets know it.
            able: As it is with the targets that are away.
            prompt: The prompt's tokens.

        Raises:
            NoTargetError: A target that could serve the request is away.
            PacelineError: See `check_tokens`.
        """
        try:
            check_tokens(request, model, prompt=prompt)
        except UnsupportedError as error:
            check_tokens(request, able, prompt=prompt)
            raise NoTargetError(
                f"the target that could do this is away ({error.message})",
                retry_after_seconds=shortage.RETRY_SECONDS,
            ) from None

    async def _tokenise(
        self, request: pb.GenerateRequest, codec: Codec | None, model: ModelFacts, *, share: str
    ) -> tuple[int, ...]:
        if codec is None and (not request.HasField("token_ids") or request.stop_strings):
            raise UnsupportedError(
                "the model has no tokenizer: send token ids, and no stop strings"
            )
        if codec is None or request.HasField("token_ids"):
            return await token_ids_of(request.token_ids.ids)
        return await self._texts.run(
            lambda: encode_prompt(request, codec, fim_token_ids=model.fim_token_ids),
            size=prompt_size(request),
            share=share,
        )

    async def _tokenise_prediction(
        self, request: pb.GenerateRequest, codec: Codec | None, *, share: str
    ) -> tuple[int, ...]:
        text = request.predicted_text
        if not text:
            return ()
        if codec is None:
            raise UnsupportedError("predicted_text: the model has no tokenizer")
        return await self._texts.run(
            lambda: codec.encode(text, add_special_tokens=False, parse_special_tokens=False),
            size=len(text),
            share=share,
            field="predicted_text",
        )


async def _key_of(request: pb.GenerateRequest, *, share: str) -> Callable[[], str]:
    """Return what returns a request's key: few need it, and of a large one it takes long."""
    if request.ByteSize() <= _LARGE_BYTES:
        return cache(lambda: request_key(request, share=share))
    key = await asyncio.to_thread(request_key, request, share=share)
    return lambda: key


def _limit_of(
    request: pb.GenerateRequest, model: ModelFacts, able: ModelFacts, *, prompt_length: int
) -> int:
    """Return how many tokens a request may generate, resumed ones included.

    A new request without `max_tokens` gets the room that the ready targets have, if they have any.
    A resumed request gets the room of the targets that are away, too: without it the text would
    end earlier than the unbroken one.

    Args:
        request: The request.
        model: As the ready targets know it.
        able: As it is with the targets that are away.
        prompt_length: In tokens.

    Raises:
        PacelineError: See `allowed_tokens`.
    """
    if not (request.HasField("max_tokens") or request.resume_token_ids):
        with suppress(ContextLengthExceededError):
            return allowed_tokens(request, model, prompt_length=prompt_length)
    return allowed_tokens(request, able, prompt_length=prompt_length)
