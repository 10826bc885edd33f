"""What `paceline top` shows of a snapshot: totals, pools and servers, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.markup import escape
from rich.text import Text

from paceline_cli.standing import sentence_on, state_of
from paceline_cli.top_figures import OF_A_SERVER, TOTALS, Figures, figures, totals
from paceline_local.screen import natural_width, table
from paceline_serving.one_line import on_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from paceline import ServerInfo
    from paceline_cli.top_figures import Figure
    from paceline_cli.top_watch import Scrape, Snapshot
    from paceline_local.metrics_samples import Readings, Samples

_ROLES = ("target", "drafter", "orchestrator", "gateway", "unknown")
# By a metric that only they have; no orchestrator lists them.
_CALLERS = {
    "orchestrator": "paceline_incoming_requests_total",
    "gateway": "paceline_http_in_flight",
}
_UP, _GONE, _SILENT = "up", "gone", "no answer"
_DOT = " · "
_UNKNOWN = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server.

    Attributes:
        name: As the orchestrator calls it, or its address.
        state: The orchestrator's word on it; else "up", "gone" or "no answer".
        is_well: Whether it takes work, or is up where nobody says whether it does.
        address: The address of its metrics page; without one, the address where it serves.
        note: Why its metrics cannot be read; empty if they can.
        remark: Why it is not used, in a sentence; empty if it is, or its state says it all.
        gone_seconds: Time since its metrics page last answered; 0 if it answered now.
        figures: What its metrics say.
    """

    name: str
    role: str
    state: str
    is_well: bool
    address: str
    note: str
    remark: str
    gone_seconds: float
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """All servers of a role, with the sums and means over them; servers by name."""

    role: str
    ready_count: int
    figures: Figures
    servers: tuple[ServerView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What `paceline top` shows."""

    model_name: str
    problem: str
    totals: Figures
    pools: tuple[PoolView, ...]

    def record(self) -> dict[str, Any]:
        """Describe it for JSON."""
        return asdict(self)


def view(snapshot: Snapshot) -> View:
    """Work out what to show."""
    info = snapshot.info
    known = info.servers if info is not None else ()
    matched = [(scrape, _match(scrape, known)) for scrape in snapshot.scrapes]
    seen = {server for _, server in matched}
    servers = [_server_view(server, scrape) for scrape, server in matched]
    servers += [_server_view(server, None) for server in known if server not in seen]
    # The scraped servers come first, in the order of their scrapes.
    fresh = list(zip(servers, (scrape.fresh for scrape in snapshot.scrapes), strict=False))

    def readings(role: str) -> list[Readings]:
        return [it for server, it in fresh if server.role == role and it is not None]

    return View(
        model_name=info.model_name if info is not None else "",
        problem=snapshot.problem,
        totals=totals(
            readings("orchestrator"),
            readings("target"),
            told_running=info.running_request_count if info is not None else None,
        ),
        pools=tuple(
            PoolView(
                role=role,
                ready_count=sum(it.is_well for it in own),
                figures=figures(role, readings(role)),
                servers=tuple(own),
            )
            for role in _ROLES
            if (own := sorted((it for it in servers if it.role == role), key=lambda it: it.name))
        ),
    )


def _match(scrape: Scrape, known: Sequence[ServerInfo]) -> ServerInfo | None:
    """Find the server that a page is of: by the name that was given, or if it is alone there."""
    if scrape.page.source.name:
        return next((it for it in known if it.name == scrape.page.source.name), None)
    neighbours = [
        it for it in known if it.address.rpartition(":")[0].strip("[]") == scrape.page.host
    ]
    is_caller = scrape.readings and _scraped_role(scrape.readings.now) in _CALLERS
    return neighbours[0] if len(neighbours) == 1 and not is_caller else None


def _scraped_role(samples: Samples) -> str:
    for role in ("target", "drafter"):
        if any(("role", role) in it for it in samples.values.get("paceline_sessions_active", ())):
            return role
    return next((role for role, metric in _CALLERS.items() if metric in samples), "unknown")


def _server_view(info: ServerInfo | None, scrape: Scrape | None) -> ServerView:
    """Describe a server by what the orchestrator says of it, by its page, or by both."""
    role = "unknown"
    if scrape is not None and scrape.readings is not None:
        role = _scraped_role(scrape.readings.now)
    if role == "unknown" and info is not None and info.role in _ROLES:
        role = info.role
    state, takes_work = _state(info, scrape), info is not None and info.ready
    problem = "" if scrape is None else scrape.problem
    if scrape is None or (takes_work and problem):
        problem = f"no metrics, {problem}" if problem else "no metrics"
    names = [info.name] if info else []
    names += [scrape.page.source.name, scrape.page.address] if scrape else []
    return ServerView(
        name=next(filter(None, names)),
        role=role,
        state=state,
        is_well=takes_work or state == _UP,
        address=scrape.page.address if scrape else info.address if info else "",
        note=problem,
        remark="" if info is None or takes_work else sentence_on(info),
        gone_seconds=scrape.gone_seconds if scrape else 0.0,
        figures=figures(role, [scrape.fresh] if scrape and scrape.fresh else []),
    )


def _state(info: ServerInfo | None, scrape: Scrape | None) -> str:
    """Say how a server is. If the orchestrator works with it, it is there, whatever is seen."""
    if info is not None and info.ready:
        return state_of(info)
    if scrape is not None and scrape.problem:
        return _SILENT if scrape.readings is None else _GONE
    return _UP if info is None else state_of(info).lower().replace("_", " ")


def draw(seen: View, *, title: str, console: Console) -> RenderableType:
    """Lay a view out; a terminal that is too small cuts off what matters least."""
    heading = [Text(on_one_line(title), style="bold")]
    if seen.problem:
        problem = f"the orchestrator does not answer: {on_one_line(seen.problem)}"
        heading.append(Text(problem, style="red"))
    remarks = [
        Text(on_one_line(it.remark), style="yellow")
        for pool in seen.pools
        for it in pool.servers
        if it.remark
    ]
    facts = (Text(f"{name:10}{words}") for name, words in _facts(seen) if words)
    servers = _servers_table(seen.pools)
    servers.width = natural_width(servers, console)
    if servers.width > console.width:
        told = f"the table is {servers.width} letters wide, this terminal {console.width}: columns"
        heading.append(Text(f"{told} on the right are cut off", style="yellow"))
    return Group(*heading, Text(), *facts, Text(), servers, *remarks)


def _facts(seen: View) -> Iterator[tuple[str, str]]:
    """Yield the lines above the table: what each is about, and what it says."""
    yield "model", on_one_line(seen.model_name)
    for name, group in TOTALS.items():
        words = [
            figure.words.format(figure.form(number))
            for figure in group
            if (number := seen.totals[figure.name]) is not None
        ]
        if name == "targets":
            words[:0] = [f"{it.ready_count} ready" for it in seen.pools if it.role == "target"]
        if name != "trees" or seen.totals["branch_won_share"] is not None:
            yield name, _DOT.join(words)


def _servers_table(pools: Sequence[PoolView]) -> Table:
    """Lay out pools and their servers, those first that are not well."""
    shown = [it for it in OF_A_SERVER if any(pool.figures[it.name] is not None for pool in pools)]
    rows = []
    for pool in pools:
        name = pool.role if pool.role == "unknown" else f"{pool.role}s"
        words = (name, f"{pool.ready_count} of {len(pool.servers)}")
        rows.append([f"[bold]{cell}[/]" for cell in (*words, *_cells(pool.figures, shown))])
        for it in sorted(pool.servers, key=lambda it: it.is_well):
            state = f"[{_colour(it)}]{escape(_state_words(it))}[/]"
            rows.append([f"  {escape(it.name)}", state, *_cells(it.figures, shown)])
    return table(["server", "state", *(it.words for it in shown)], rows)


def _cells(numbers: Figures, shown: Sequence[Figure]) -> list[str]:
    known = ((it, numbers[it.name]) for it in shown)
    return [_UNKNOWN if number is None else it.form(number) for it, number in known]


def _state_words(server: ServerView) -> str:
    gone = f" {server.gone_seconds:.0f} s" if server.state == _GONE else ""
    return f"{server.state}{gone}: {server.note}" if server.note else server.state


def _colour(server: ServerView) -> str:
    if server.is_well:
        return "green"
    return "red" if server.state in {_GONE, _SILENT} else "yellow"
