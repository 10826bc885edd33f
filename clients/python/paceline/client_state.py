"""The part of a client that both clients share: all of it except waiting."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paceline.call_metadata import AsyncToken, CallMetadata, Metadata, Token, checked_metadata
from paceline.call_plan import CallPlan, RetryBudget, timeout_seconds
from paceline.channel import Route
from paceline.connection import AsyncConnection, Connection
from paceline.endpoints import Endpoint, Endpoints, listed
from paceline.request import GenerateOptions, Prompt, build_request
from paceline.stream_state import StreamState
from paceline.transcript import Transcript

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from paceline.call_metadata import MetadataSource
    from paceline.channel import ChannelOptions
    from paceline.credentials import Tls
    from paceline.errors import PacelineError

_Link = TypeVar("_Link", Connection, AsyncConnection)
_Token = TypeVar("_Token", Token, AsyncToken)
_Stream = TypeVar("_Stream", bound=StreamState[Any])

_TIMEOUT_SECONDS = 120.0


class ClientState(Generic[_Link, _Stream, _Token]):
    """A client's orchestrators and defaults; it makes generations. See `AsyncClient`."""

    _link_class: type[_Link]
    _stream_class: type[_Stream]

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout: float = _TIMEOUT_SECONDS,
        metadata: MetadataSource | None = None,
        token: _Token | None = None,
        channel_options: ChannelOptions = (),
        patience: float = math.inf,
    ) -> None:
        self._metadata = CallMetadata.of(metadata, token=token)
        routes = [
            Route.to(each, tls=tls, insecure=insecure, channel_options=channel_options)
            for each in listed(address)
        ]
        self._endpoints: Endpoints[_Link] = Endpoints(
            [
                Endpoint(route.address, self._link_class(route), leads_to_one=route.leads_to_one)
                for route in routes
            ]
        )
        self._timeout = timeout_seconds(timeout)
        self._budget = RetryBudget(patience_seconds=timeout_seconds(patience))

    @property
    def endpoints(self) -> Endpoints[_Link]:
        """The orchestrators, each with its recent failures."""
        return self._endpoints

    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        resume_attempts: int | None = None,
        metadata: Metadata | None = None,
        **options: Unpack[GenerateOptions],
    ) -> _Stream:
        """Continue a prompt. The request is sent when the result is first read.

        Args:
            prompt: Text, token ids, parts of a text, or two texts with a gap.
            timeout: The deadline of the whole generation, in seconds. Default: the client's.
            resume_attempts: How often the generation resumes by itself after a `TryAgainError`,
                such as a broken connection. The text has no gap and no duplicate. 0: never.
                Default: never with one orchestrator; with several, until all of them have failed
                several times. A request that an orchestrator refuses because it is shutting down
                goes to the next orchestrator in any case.
            metadata: Metadata of this generation's calls, in addition to the client's.
            options: See `GenerateOptions`.

        Raises:
            InvalidFieldError: An option has a value that cannot be sent, or a time or number of
                attempts is negative.
        """
        transcript = Transcript(build_request(prompt, options))
        return self._generation(
            transcript, timeout=timeout, resume_attempts=resume_attempts, metadata=metadata
        )

    def resume(
        self,
        generation: _Stream,
        *,
        timeout: float | None = None,
        resume_attempts: int | None = None,
        metadata: Metadata | None = None,
    ) -> _Stream:
        """Continue a generation that was left or broken, here or at another orchestrator.

        Iterating over the result gives the missing part; `collect` and `text` give the whole.
        """
        transcript = generation.transcript.branch()
        return self._generation(
            transcript, timeout=timeout, resume_attempts=resume_attempts, metadata=metadata
        )

    def _generation(
        self,
        transcript: Transcript,
        *,
        timeout: float | None,
        resume_attempts: int | None,
        metadata: Metadata | None,
    ) -> _Stream:
        return self._stream_class(
            self._endpoints,
            transcript,
            timeout=self._seconds(timeout),
            resume_attempts=resume_attempts,
            budget=self._budget,
            metadata=self._metadata,
            own_metadata=checked_metadata(metadata),
        )

    def _plan(self, timeout: float | None) -> CallPlan:
        seconds = self._seconds(timeout)
        return CallPlan(seconds, budget=self._budget, endpoint_count=len(self._endpoints))

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else timeout_seconds(timeout)

    def _pause_seconds(
        self, error: PacelineError, *, plan: CallPlan, endpoint: Endpoint[_Link]
    ) -> float:
        """Return how long to wait before another orchestrator is asked.

        Raises:
            PacelineError: The error, if no other orchestrator is to be asked.
        """
        seconds = plan.resend_seconds(error, endpoint=endpoint)
        if seconds is None and not self._endpoints.is_another_left(error, endpoint, plan.asked):
            raise error
        return seconds or 0.0
