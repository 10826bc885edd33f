"""What a model server needs of the model behind it; the engine's `ModelHost` is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from paceline_engine.sessions.host import HostLimits, HostStatistics
    from paceline_engine.terms.backend import ChatTemplate
    from paceline_engine.terms.calls import (
        Decoded,
        DecodeOptions,
        Drafted,
        DraftOptions,
        ModelDescription,
        PrefixCall,
        SessionGrant,
        SessionSpec,
        Verdict,
        VerifyOptions,
    )
    from paceline_engine.terms.latencies import ModelLatencies
    from paceline_engine.terms.proposal import Proposal

__all__ = ["Host"]


class Host(Protocol):
    """A model with its sessions and its queue. Its errors are `PacelineError`s.

    Until `start` has returned, whatever needs the model raises LoadingError.
    """

    incarnation: str
    limits: HostLimits

    @property
    def description(self) -> ModelDescription:
        """The model."""

    async def start(self) -> None:
        """Load the model and warm it up."""

    async def settled(self) -> None:
        """Wait until every session is closed, or its lease is over."""

    def end_sessions(self) -> None:
        """End all sessions, and with DrainingError their live calls and those that come later."""

    async def stop(self) -> None:
        """Free everything."""

    def open_session(self, spec: SessionSpec) -> SessionGrant:
        """Reserve memory and name a session."""

    def renew_session(self, session_id: str, *, caller: str) -> float:
        """Start the lease of a caller's session anew; return it in seconds."""

    def live_sequence(self, session_id: str, *, caller: str) -> int:
        """Return the sequence of a session's call that can be expected to be answered, or 0."""

    def close_session(self, session_id: str, *, caller: str) -> None:
        """End a caller's session; an unknown one is fine."""

    def spec_of(self, session_id: str, *, caller: str) -> SessionSpec:
        """Return what a caller's session was opened for."""

    async def verify(
        self, call: PrefixCall, proposal: Proposal, *, options: VerifyOptions
    ) -> Verdict:
        """Judge a proposal."""

    def decode(self, call: PrefixCall, options: DecodeOptions) -> AsyncGenerator[Decoded]:
        """Choose the tokens that follow. Closing the generator stops it."""

    def draft(self, call: PrefixCall, options: DraftOptions) -> AsyncGenerator[Drafted]:
        """Draft until the window is full. Closing the generator stops it."""

    def tokenizer_bytes(self) -> bytes | None:
        """Return the tokenizer.json, if the model has one."""

    def chat_template(self) -> ChatTemplate | None:
        """Return how the model wants conversations, if it says so."""

    def latencies(self) -> ModelLatencies:
        """Return what forwards cost, as measured."""

    def overdue_seconds(self) -> float:
        """How long the running forward has taken, if it counts as hung; else 0."""

    def statistics(self) -> HostStatistics:
        """Return how full the host is, and what it did so far."""
