"""One method after another on the same text: what is right for a request changes as it runs.

Design. A method begins anew behind the tokens that are final, with the servers there are, so any
method can follow any other and none knows of it. It does so together with the next final tokens:
where SI has a verdict and DSI a target that is as far as the text, little in flight is lost. Each
method counts its calls from 1; here they are counted on, and what is answered late belongs to a
method that has gone, and is ignored.

Whoever chooses methods is asked whenever tokens have become final, before the calls that follow
from them are made. So a method that is not worth its calls any more makes none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from paceline_protocol.messages import (
    AbandonVerify,
    CapacityChanged,
    Command,
    EmitTokens,
    Event,
    Finish,
    PromoteVerify,
    StartDecode,
    StartDraft,
    StartVerify,
    StopDraft,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.methods import DecodingMethod

Successor: TypeAlias = "Callable[[tuple[int, ...], CapacityChanged], DecodingMethod]"
"""Makes a method for the rest of a text, from the tokens that are final and the servers there are.

The tokens are those that were emitted, without the prompt."""

Message = TypeVar("Message", bound="Command | Event")

_ID_NAMES = ("draft_id", "verify_id", "decode_id")
_STARTS = (StartDraft, StartVerify, StartDecode)


class SuccessiveDecoding:
    """A decoding method that another one can follow before the text ends.

    Args:
        first: What decodes at first, not yet started.
        capacity: The servers there are.
        reconsider: Called when tokens have become final and the text goes on; `become` there takes
            effect with these tokens.
    """

    def __init__(
        self,
        first: DecodingMethod,
        capacity: CapacityChanged,
        *,
        reconsider: Callable[[], None] = lambda: None,
    ) -> None:
        self._method = first
        self._reconsider = reconsider
        self._capacity = capacity
        self._past: DraftStatistics | None = None  # of the methods before
        self._next: Successor | None = None
        self._next_drafts = False
        self._emitted: list[int] = []
        self._passed = 0  # the highest id of the methods before
        self._highest = 0

    @property
    def statistics(self) -> DraftStatistics:
        """What became of all methods' draft tokens."""
        present = self._method.statistics
        return present if self._past is None else self._past + present

    def start(self) -> list[Command]:
        """Begin; see DecodingMethod."""
        return self._count(self._method.start())

    def handle(self, event: Event) -> list[Command]:
        """Take in an event; see DecodingMethod."""
        if isinstance(event, CapacityChanged):
            self._capacity = event
        return self._proceed(self._method.handle(_moved(event, -self._passed)))

    def stop(self) -> list[Command]:
        """End early; see DecodingMethod."""
        return self._count(self._method.stop())

    def become(self, successor: Successor, *, drafts: bool) -> None:
        """Let another method go on with the next final tokens; the last one named does.

        Args:
            successor: Makes it.
            drafts: Whether it has work for a drafter: then it waits until there is one.
        """
        self._next, self._next_drafts = successor, drafts

    def stay(self) -> None:
        """Take `become` back, where that has not happened yet: the method goes on as it is."""
        self._next = None

    def _proceed(self, commands: Sequence[Command]) -> list[Command]:
        emitted = [it.token_ids for it in commands if isinstance(it, EmitTokens)]
        self._emitted += [token_id for token_ids in emitted for token_id in token_ids]
        if emitted and not isinstance(commands[-1], Finish):
            self._reconsider()
            has_servers = bool(self._capacity.drafters) or not self._next_drafts
            if self._next is not None and has_servers:
                return self._change(commands)
        return self._count(commands)

    def _change(self, commands: Sequence[Command]) -> list[Command]:
        """Withdraw what the method has in flight, and begin the next one's work."""
        assert self._next is not None
        begun = {_call_of(it) for it in commands if isinstance(it, _STARTS)}
        ended = [it for it in commands if not isinstance(it, (*_STARTS, PromoteVerify))]
        withdrawn = [
            replace(it, by_rejection=False) if isinstance(it, AbandonVerify | StopDraft) else it
            for it in self._method.stop()
            if _call_of(it) not in (None, *begun)
        ]
        commands = self._count([*ended, *withdrawn])
        self._past = self.statistics
        self._passed = self._highest
        self._method = self._next(tuple(self._emitted), self._capacity)
        self._next = None
        return commands + self._count(self._method.start())

    def _count(self, commands: Sequence[Command]) -> list[Command]:
        """Give calls ids that count on from those of the methods before."""
        moved = [_moved(command, self._passed) for command in commands]
        begun = [_call_of(command) for command in moved if isinstance(command, _STARTS)]
        self._highest = max([self._highest, *(call[1] for call in begun if call)])
        return moved


def _call_of(message: Command | Event) -> tuple[str, int] | None:
    """Return the field that names a message's call, and the call's id, if it is about one."""
    name = next((name for name in _ID_NAMES if hasattr(message, name)), None)
    return None if name is None else (name, getattr(message, name))


def _moved(message: Message, offset: int) -> Message:
    """Return a message about the call that has another id."""
    call = _call_of(message) if offset else None
    if call is None:
        return message
    name, number = call
    changes: dict[str, Any] = {name: number + offset}
    return replace(message, **changes)
