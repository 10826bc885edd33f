"""Writes a generation's text as it arrives, the origins of its tokens, and the last line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.text import Text

from paceline import TokenOrigin
from paceline_cli.model_costs import improvement_told
from paceline_contract.words import counted
from paceline_local.screen import safe

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import TextIO

    from paceline import Chunk, Completion, Statistics

_ACCEPTED, _TARGET = "green", "bold underline magenta"
_LEGEND = Text.assemble(
    ("accepted draft tokens", _ACCEPTED), " · ", ("the target's own tokens", _TARGET)
)


class TextStream:
    """Writes chunks as they arrive, for the time of a `with`.

    On a terminal origins are colours (and an underline, also under NO_COLOR). In a pipe the
    target's own tokens are in brackets. Without `show_origins` a pipe gets the text unchanged.

    Attributes:
        ends_line: Whether the written text ends a line; on a terminal always, after the `with`.
    """

    def __init__(self, file: TextIO, *, show_origins: bool) -> None:
        self._file = file
        self._terminal = file.isatty()
        self._show_origins = show_origins
        self._console = Console(file=file, highlight=False, soft_wrap=True, markup=False)
        self.ends_line = True

    def write(self, chunk: Chunk) -> None:
        """Write a chunk at once."""
        if not chunk.text:
            return
        text = safe(chunk.text) if self._terminal else chunk.text
        origins = set(chunk.origins) if self._show_origins else set()
        # The text of a chunk cannot be divided by token, so a mixed one is left plain.
        own, drafted = origins == {TokenOrigin.TARGET}, origins == {TokenOrigin.ACCEPTED_DRAFT}
        if self._terminal and (own or drafted):
            self._console.print(Text(text, style=_TARGET if own else _ACCEPTED), end="")
        else:
            self._file.write(f"[{text}]" if own else text)
        self._file.flush()
        self.ends_line = text.endswith("\n")

    def __enter__(self) -> Self:
        if self._show_origins and self._terminal:
            self._console.print(_LEGEND)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._terminal and not self.ends_line:
            self._file.write("\n")
            self._file.flush()
            self.ends_line = True


def statistics_line(completion: Completion, *, costs: Mapping[str, float] | None = None) -> str:
    """Describe a generation in one line; with costs of models' forwards, its SWI, too."""
    started, finished = completion.started, completion.finished
    statistics = finished.statistics
    seconds = statistics.total_ns / 1e9
    resumed = completion.resumed_token_count
    count = len(completion.token_ids) - resumed
    parts = [
        f"resumed after {counted(resumed, 'token')}" if resumed else "",
        f"{counted(count, 'token')} in {seconds:.2f} s",
        f"{count / seconds:.1f} tokens/s" if seconds else "",
        f"first after {statistics.time_to_first_token_ns / 1e6:.0f} ms",
        _strategy_used(completion),
        counted(statistics.target_forward_count, "target forward"),
        f"acceptance {statistics.acceptance_rate:.0%}" if statistics.drafted_token_count else "",
        f"{counted(statistics.corrections_ahead_count, 'correction')} found ahead"
        if started.width > 1
        else "",
        _stack_used(statistics),
        f"{statistics.cancelled_rpc_count} cancelled" if statistics.cancelled_rpc_count else "",
        improvement_told(statistics, token_count=count, costs=costs or {}),
        f"seed {started.seed}",
        f"ended by {finished.finish_reason}",
    ]
    parts += [f"{kind} x{count}" for kind, count in statistics.fallbacks.items()]
    return " · ".join(filter(None, parts))


def _stack_used(statistics: Statistics) -> str:
    """Say how often each model of a stack ran; empty for a single drafter."""
    models = statistics.drafter_models
    if len(models) < 2:
        return ""
    return ", ".join(f"{safe(each.model_name)} x{each.forward_count}" for each in models)


def _strategy_used(completion: Completion) -> str:
    words, finished = completion.started.strategy.abbreviation, completion.finished
    if finished.lookahead:
        words += f" with lookahead {finished.lookahead}"
    return f"{words} on {counted(finished.targets_used, 'target')}"
