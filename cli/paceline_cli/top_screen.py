"""Draws a view on a terminal of any size, and as plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from paceline_local.screen import safe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rich.console import RenderableType

    from paceline_cli.top_figures import Figures, Totals
    from paceline_cli.top_view import PoolView, ServerView, View

_UNKNOWN = "-"
_DOT = " · "
_GAP = 2
_LABEL_WIDTH = 10
_REMARKS_SHARE = 4  # of the lines that are left
_LOST = ("gone", "no answer")


def draw(view: View, *, title: str, width: int, height: int | None = None) -> RenderableType:
    """Lay a view out.

    Args:
        view: The view.
        title: The first line.
        width: Columns of the terminal; if they are few, the least important ones are left out.
        height: Lines of the terminal; further rows are only counted. None: no limit.
    """
    heading = [_line(title, style="bold")]
    if view.problem:
        heading.append(_line(f"the orchestrator does not answer: {view.problem}", style="red"))
    facts = list(_facts(view, width))
    used = len(heading) + sum(words.count("\n") + 1 for _, words in facts) + 3  # blank, blank, head
    room = None if height is None else height - used
    remarks = _remarks(view, room)
    if room is not None:
        room -= len(remarks)
    return Group(*heading, Text(), _grid(facts), Text(), _table(view.pools, width, room), *remarks)


def _remarks(view: View, room: int | None) -> list[Text]:
    """Say why servers are not used, in few lines, since the table needs the room."""
    remarks = [it.remark for pool in view.pools for it in pool.servers if it.remark]
    shown = remarks if room is None else remarks[: max(0, room // _REMARKS_SHARE)]
    return [_line(it, style="yellow") for it in shown]


def _line(text: str, *, style: str = "") -> Text:
    return Text(safe(text), style=style, no_wrap=True, overflow="ellipsis")


def _facts(view: View, width: int) -> Iterator[tuple[str, str]]:
    """Yield the lines above the table, each with its title."""
    totals = view.totals
    room = width - _LABEL_WIDTH
    if view.model_name:
        yield "model", safe(view.model_name)
    yield "requests", _wrapped(_requests(totals), room)
    yield "tokens", _wrapped(_tokens(totals), room)
    if totals.branch_won_share is not None:
        yield "trees", _wrapped(_trees(totals), room)
    yield "waste", _wrapped(_waste(totals), room)
    targets = next((it for it in view.pools if it.role == "target"), None)
    if targets is not None:
        yield "targets", _wrapped([f"{targets.ready_count} ready", *_wanted(totals)], room)


def _wanted(totals: Totals) -> Iterator[str]:
    """Say what an autoscaler would do; after a burst it keeps more than the streams need."""
    asked, wanted = totals.asked_targets, totals.wanted_targets
    yield _phrase("streams ask for {}", _count(asked))
    lingers = asked is not None and wanted is not None and wanted > asked
    yield _phrase(f"an autoscaler would {'keep' if lingers else 'have'} {{}}", _count(wanted))


def _requests(totals: Totals) -> Iterator[str]:
    yield _phrase("{} running", _count(totals.running))
    yield _phrase("{}/s come", _rate(totals.requests_per_second))
    yield _phrase("{}/s fail", _rate(totals.failures_per_second))
    yield _phrase("first token after {} ms", _milliseconds(totals.first_token_seconds))
    yield _phrase("{} ms between tokens", _milliseconds(totals.token_gap_seconds))
    yield _phrase("{} ms network", _milliseconds(totals.hop_seconds))


def _tokens(totals: Totals) -> Iterator[str]:
    yield _phrase("{}/s", _rate(totals.tokens_per_second))
    yield _phrase("acceptance {}", _percent(totals.acceptance_rate))
    yield _phrase("{} times as fast as plain decoding", _rate(totals.speed_up))
    yield _phrase("SP {} targets per stream", _rate(totals.targets_per_stream))
    yield _phrase("{} verifications per stream now", _rate(_verifications_per_stream(totals)))


def _verifications_per_stream(totals: Totals) -> float | None:
    if totals.verifications is None or not totals.running:
        return None
    return totals.verifications / totals.running


def _trees(totals: Totals) -> Iterator[str]:
    yield _phrase("{}/s corrections found ahead", _rate(totals.corrections_per_second))
    yield _phrase("{}/s rows of branches", _rate(totals.branch_rows_per_second))
    yield _phrase("{} of them became output", _percent(totals.branch_won_share))


def _waste(totals: Totals) -> Iterator[str]:
    yield _phrase("{} of the draft tokens", _percent(totals.wasted_share))
    yield _phrase("{}/s rejected", _rate(totals.rejected_per_second))
    yield _phrase("{}/s discarded", _rate(totals.discarded_per_second))
    yield _phrase("{}/s calls cancelled", _rate(totals.cancelled_per_second))
    yield _phrase("{}/s repairs", _rate(totals.repairs_per_second))


def _phrase(words: str, number: str) -> str:
    """Put a number into words; empty if the number is not known."""
    return "" if number == _UNKNOWN else words.format(number)


def _wrapped(phrases: Iterable[str], room: int) -> str:
    """Join phrases, and begin a new line if the next phrase does not fit."""
    lines: list[str] = []
    for phrase in filter(None, phrases):
        if lines and len(lines[-1]) + len(_DOT) + len(phrase) <= room:
            lines[-1] += _DOT + phrase
        else:
            lines.append(phrase)
    return "\n".join(lines) or _UNKNOWN


def _grid(facts: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid()
    grid.add_column(min_width=_LABEL_WIDTH)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for name, words in facts:
        grid.add_row(Text(name, style="dim"), Text(words))
    return grid


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[Figures], str]
    rank: int  # a narrow terminal keeps the smallest ones


_COLUMNS = (
    _Column("sessions", lambda it: _count(it.sessions), 2),
    _Column("running", lambda it: _count(it.running), 1),
    _Column("waiting", lambda it: _count(it.waiting), 0),
    _Column("queue ms", lambda it: _milliseconds(it.queue_seconds), 4),
    _Column("forward ms", lambda it: _milliseconds(it.forward_seconds), 5),
    _Column("forwards/s", lambda it: _rate(it.forwards_per_second), 3),
    _Column("positions/s", lambda it: _rate(it.positions_per_second), 8),
    _Column("accepted", lambda it: _percent(it.accepted_share), 10),
    _Column("wasted/s", lambda it: _rate(it.wasted_per_second), 6),
    _Column("cancelled/s", lambda it: _rate(it.cancelled_per_second), 7),
    _Column("memory", lambda it: _percent(it.memory_share), 9),
)


def _table(pools: Sequence[PoolView], width: int, room: int | None) -> RenderableType:
    """Make a table of pools and their servers, with the columns and rows that fit."""
    rows = [row for pool in pools for row in _rows(pool)]
    if not rows:
        return Text("no server is known")
    count = len(rows)
    if room is not None and count > room:
        rows = _most_telling(rows, room - 1)
    columns = _fitting(rows, width)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("server", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True, overflow="ellipsis")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in rows:
        cells = (column.cell(row.figures) for column in columns)
        state = Text(row.state, style=_colour(row))
        table.add_row(Text(row.name), state, *cells, style=row.style)
    left = count - len(rows)
    return Group(table, Text(f"... and {left} more", style="dim")) if left else table


def _most_telling(rows: Sequence[_Row], room: int) -> list[_Row]:
    """Keep pools, then servers that are not well, then the first of the others."""
    by_worth = sorted(range(len(rows)), key=lambda index: rows[index].worth)
    return [rows[index] for index in sorted(by_worth[: max(room, 0)])]


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    state: str
    figures: Figures
    health: str = ""
    is_well: bool = True
    style: str = ""

    @property
    def worth(self) -> int:
        """The order in which a short terminal keeps rows: the smallest first."""
        return 0 if self.style else 2 if self.is_well else 1


def _rows(pool: PoolView) -> Iterator[_Row]:
    count = len(pool.servers)
    name = pool.role if pool.role == "unknown" else f"{pool.role}s"
    yield _Row(name, f"{pool.ready_count} of {count}", figures=pool.figures, style="bold")
    for server in pool.servers:
        name, state = f"  {safe(server.name)}", _state(server)
        yield _Row(
            name,
            state,
            health=server.state,
            is_well=server.is_well,
            figures=server.figures,
        )


def _state(server: ServerView) -> str:
    if server.state == "gone":
        return f"{server.state} {server.gone_seconds:.0f} s: {server.note}"
    return safe(f"{server.state}: {server.note}" if server.note else server.state)


def _colour(row: _Row) -> str:
    if not row.health:
        return ""
    return "green" if row.is_well else "red" if row.health in _LOST else "yellow"


def _fitting(rows: Sequence[_Row], width: int) -> list[_Column]:
    """Return the columns that fit, in their order."""
    names = (len("server"), *(cell_len(it.name) for it in rows))
    states = (len("state"), *(cell_len(it.state) for it in rows))
    room = width - max(names) - max(states) - 2 * _GAP
    kept = set()
    for column in sorted(_COLUMNS, key=lambda it: it.rank):
        cells = [column.cell(it.figures) for it in rows]
        if all(cell == _UNKNOWN for cell in cells):
            continue
        room -= max(len(column.heading), *map(len, cells)) + _GAP
        if room < -_GAP:  # the last column needs no gap
            break
        kept.add(column.heading)
    return [column for column in _COLUMNS if column.heading in kept]


def _count(number: int | None) -> str:
    return _UNKNOWN if number is None else str(number)


def _rate(number: float | None) -> str:
    if number is None:
        return _UNKNOWN
    return f"{number:.0f}" if number >= 100 or number == 0 else f"{number:.1f}"


def _milliseconds(seconds: float | None) -> str:
    return _UNKNOWN if seconds is None else f"{seconds * 1e3:.1f}"


def _percent(share: float | None) -> str:
    return _UNKNOWN if share is None else f"{share:.0%}"
