"""Output for people: colours and progress on a terminal, plain lines in a pipe."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline_serving.one_line import on_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# A model's text must not move the cursor or rename the window.
_UNSAFE = dict.fromkeys((*range(32), *range(0x7F, 0xA0)), "\N{REPLACEMENT CHARACTER}")
# More columns than a table of names, addresses and states needs.
_ANY_WIDTH = 10_000
_SAFE = {code: text for code, text in _UNSAFE.items() if chr(code) not in "\n\t"}


def diagnostics() -> Console:
    """Open the console for everything but results: standard error."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def safe(text: str) -> str:
    """Remove control characters from a text, for a terminal."""
    return text.translate(_SAFE)


@dataclass(frozen=True, slots=True)
class Steps:
    """Shows progress.

    Attributes:
        note: Shows a message that is not a step.
    """

    done: Callable[[str], None]
    note: Callable[[str], None]

    def __call__(self, step: str) -> None:
        """Note a finished step."""
        self.done(step)


@contextmanager
def progress(what: str, *, total: int) -> Iterator[Steps]:
    """Show progress during a long task; call the result after each step.

    On a terminal the progress is a bar, in a pipe a line for each step.
    """
    console = diagnostics()

    def say(step: str) -> None:
        console.print(f"  {step}", markup=False)

    if not sys.stderr.isatty():
        console.print(f"{what} ...", markup=False)
        yield Steps(say, say)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield Steps(
            lambda step: bar.update(task, advance=1, description=f"{what}: {step}"),
            lambda step: bar.update(task, description=f"{what}: {step}"),
        )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table: the first column is aligned left, numbers are aligned right.

    Cells have words of servers in them: each takes one line.
    """
    laid_out = Table(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        laid_out.add_column(heading, justify="right" if index else "left")
    for row in rows:
        laid_out.add_row(*map(on_one_line, row))
    return laid_out


def print_whole(laid_out: Table, console: Console) -> None:
    """Print each row on one line, of any width: pods' names differ only at their ends."""
    console.width = max(natural_width(laid_out, console), console.width)
    console.print(laid_out)


def natural_width(laid_out: Table, console: Console) -> int:
    """Return how wide a table is without a limit."""
    options = console.options.update(width=_ANY_WIDTH)
    return Measurement.get(console, options, laid_out).maximum
