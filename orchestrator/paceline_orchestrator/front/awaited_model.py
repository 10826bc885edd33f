"""The model that requests are for, and its tokenizer: there may be none yet."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import (
    ContextLengthExceededError,
    LoadingError,
    NoTargetError,
    UnsupportedError,
)
from paceline_orchestrator.fleet import shortage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.front.tokenizer import Codec, Codecs


class AwaitedModel:
    """Waits for a target's model and its tokenizer: the first request may come before them.

    Args:
        pool: The model servers.
        codecs: The tokenizers that were fetched.
    """

    def __init__(self, pool: ServerPool, codecs: Codecs) -> None:
        self._pool = pool
        self._codecs = codecs
        self._begun = asyncio.Event()

    def begin(self) -> None:
        """Let requests run: there is a target, and its tokenizer."""
        self._begun.set()

    async def wait(self, deadline: Deadline | None = None, *, lora: str = "") -> ModelFacts:
        """Wait for a target, and return its model.

        Args:
            deadline: The request's.
            lora: The adapter that the target must have; empty: none.

        Raises:
            LoadingError: There was no target and no tokenizer yet.
            NoTargetError: There is no target.
            ModelNotFoundError: No target has this adapter.
        """
        await self._wait_for_begin(_patience_seconds(deadline))
        return await self._pool.wait_for_model(_patience_seconds(deadline), lora=lora)

    def has(self, *, lora: str) -> bool:
        """Whether a ready target has a LoRA adapter.

        Raises:
            ModelNotFoundError: No target has this adapter, ready or away.
        """
        try:
            self._pool.model(lora=lora)
        except NoTargetError:
            return False
        return True

    async def wait_for_adapter(self, lora: str, *, seconds: float) -> None:
        """Wait until a ready target has a LoRA adapter.

        Raises:
            NoTargetError: It was away for too long.
            ModelNotFoundError: No target has this adapter.
        """
        await self._pool.wait_for_model(seconds, lora=lora)

    def with_those_away(self, model: ModelFacts) -> ModelFacts:
        """Return what a model can do once its targets that are away are back."""
        return self._pool.with_those_away(model)

    @contextmanager
    def refusing_for_good(self) -> Iterator[None]:
        """Let a request be refused for good only if every target has said what it can do.

        Raises:
            NoTargetError: The request was refused within, and a target has not said it yet.
        """
        try:
            yield
        except (ContextLengthExceededError, UnsupportedError) as error:
            # A client whose `max_tokens` is refused asks for less at once, and is served.
            is_about_limit = any(it.field == "max_tokens" for it in error.violations)
            name = None if is_about_limit else self._pool.silent_target()
            if name is not None:
                raise NoTargetError(
                    f"{name} has not said yet what it can do, and no other target can do this"
                    f" ({error.message})",
                    retry_after_seconds=shortage.RETRY_SECONDS,
                ) from None
            raise

    def codec_of(self, model: ModelFacts) -> Codec | None:
        """Return a model's tokenizer, if it has one."""
        return self._codecs.get(model.tokenizer_fingerprint)

    async def wait_for_codec(self) -> tuple[ModelFacts, Codec]:
        """Wait for a target; return its model, with those away, and the model's tokenizer.

        Raises:
            UnsupportedError: The model has none.
        """
        model = await self.wait()
        codec = self.codec_of(model)
        if codec is None:
            raise UnsupportedError("the model has no tokenizer")
        return self.with_those_away(model), codec

    async def _wait_for_begin(self, timeout_seconds: float) -> None:
        """Wait for the first target and its tokenizer: the first request may come before."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._begun.wait()
        except TimeoutError:
            raise LoadingError(
                f"{self._what_is_missing()}: try again if it is still loading",
                retry_after_seconds=shortage.RETRY_SECONDS,
            ) from None

    def _what_is_missing(self) -> str:
        try:
            model = self._pool.model()
        except NoTargetError as error:
            return error.message
        reason = self._codecs.why_refused(model.tokenizer_fingerprint)
        return reason or "the tokenizer is being fetched"


def _patience_seconds(deadline: Deadline | None) -> float:
    if deadline is None:
        return shortage.WAIT_SECONDS
    return min(shortage.WAIT_SECONDS, deadline.remaining_seconds)
