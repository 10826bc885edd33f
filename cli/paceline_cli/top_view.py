"""The contents of `paceline top`, from a snapshot: totals, pools and servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from paceline_cli.standing import sentence_on, state_of
from paceline_cli.top_figures import Figures, Totals, figures, totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import ServerInfo
    from paceline_cli.top_watch import Scrape, Snapshot
    from paceline_local.metrics_samples import Readings, Samples

_ROLES = ("target", "drafter", "orchestrator", "unknown")
_UP, _GONE, _SILENT = "up", "gone", "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server.

    Attributes:
        name: The orchestrator's name for the server, or its address.
        state: Its standing with the orchestrator; without one "up", "gone" or "no answer".
        is_well: Whether the server takes work; if that is not known, whether it is up.
        address: The address of its metrics page; without one, the address where it serves.
        note: Why its metrics cannot be read; empty if they can.
        remark: A sentence that says why the server is not used; empty if the state says enough.
        gone_seconds: Time since its metrics page last answered; 0 if it answered now.
        figures: The figures from its metrics; empty if they cannot be read.
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
    """All servers of a role.

    Attributes:
        role: The role of all its servers.
        ready_count: Servers that take work.
        figures: The sums and means over its servers.
        servers: The servers, by name.
    """

    role: str
    ready_count: int
    figures: Figures
    servers: tuple[ServerView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The contents of `paceline top`."""

    model_name: str
    problem: str
    totals: Totals
    pools: tuple[PoolView, ...]


def view(snapshot: Snapshot) -> View:
    """Make the view of a snapshot."""
    info = snapshot.info
    known = info.servers if info is not None else ()
    matched = [(scrape, _match(scrape, known)) for scrape in snapshot.scrapes]
    servers = [(_scraped_view(scrape, server), _fresh(scrape)) for scrape, server in matched]
    seen = {server for _, server in matched}
    servers += [(_unscraped_view(server), None) for server in known if server not in seen]
    return View(
        model_name=info.model_name if info is not None else "",
        problem=snapshot.problem,
        totals=totals(
            _readings("orchestrator", servers),
            _readings("target", servers),
            told_running=info.running_request_count if info is not None else None,
        ),
        pools=tuple(_pool(role, servers) for role in _ROLES if _has(role, servers)),
    )


def _match(scrape: Scrape, known: Sequence[ServerInfo]) -> ServerInfo | None:
    """Find a page's server: by the given name, or by the host if only one server is there."""
    if scrape.page.source.name:
        return next((it for it in known if it.name == scrape.page.source.name), None)
    neighbours = [
        it for it in known if it.address.rpartition(":")[0].strip("[]") == scrape.page.host
    ]
    is_model_server = (
        scrape.readings is None or _scraped_role(scrape.readings.now) != "orchestrator"
    )
    return neighbours[0] if len(neighbours) == 1 and is_model_server else None


def _scraped_role(samples: Samples) -> str:
    for role in ("target", "drafter"):
        if any(("role", role) in it for it in samples.values.get("paceline_sessions_active", ())):
            return role
    return "orchestrator" if "paceline_incoming_requests_total" in samples else "unknown"


def _reported_role(info: ServerInfo) -> str:
    return info.role if info.role in _ROLES else "unknown"


def _fresh(scrape: Scrape) -> Readings | None:
    return None if scrape.problem else scrape.readings


def _scraped_view(scrape: Scrape, info: ServerInfo | None) -> ServerView:
    """Describe a server by its page and by the orchestrator's report."""
    role = "unknown" if scrape.readings is None else _scraped_role(scrape.readings.now)
    name = info.name if info is not None else scrape.page.source.name
    fresh, state, problem = _fresh(scrape), _state(info, scrape), scrape.problem
    takes_work = info is not None and info.ready
    return ServerView(
        name=name or scrape.page.address,
        role=_reported_role(info) if info is not None and role == "unknown" else role,
        state=state,
        is_well=takes_work or state == _UP,
        address=scrape.page.address,
        note=f"no metrics, {problem}" if takes_work and problem else problem,
        remark=_remark(info),
        gone_seconds=scrape.gone_seconds,
        figures=figures(role, [fresh] if fresh is not None else []),
    )


def _unscraped_view(info: ServerInfo) -> ServerView:
    """Describe a server by the orchestrator's report alone."""
    return ServerView(
        name=info.name,
        role=_reported_role(info),
        state=_state(info),
        is_well=info.ready,
        address=info.address,
        note="no metrics",
        remark=_remark(info),
        gone_seconds=0.0,
        figures=Figures(),
    )


def _state(info: ServerInfo | None, scrape: Scrape | None = None) -> str:
    """Return a server's state. A server that the orchestrator uses is up in any case."""
    if info is not None and info.ready:
        return state_of(info)
    if scrape is not None and scrape.problem:
        return _SILENT if scrape.readings is None else _GONE
    return _UP if info is None else state_of(info).lower().replace("_", " ")


def _remark(info: ServerInfo | None) -> str:
    return "" if info is None or info.ready else sentence_on(info)


_Server: TypeAlias = tuple[ServerView, "Readings | None"]


def _has(role: str, servers: Sequence[_Server]) -> bool:
    return any(it.role == role for it, _ in servers)


def _pool(role: str, servers: Sequence[_Server]) -> PoolView:
    own = sorted((it for it, _ in servers if it.role == role), key=lambda it: it.name)
    return PoolView(
        role=role,
        ready_count=sum(it.is_well for it in own),
        figures=figures(role, _readings(role, servers)),
        servers=tuple(own),
    )


def _readings(role: str, servers: Sequence[_Server]) -> list[Readings]:
    return [readings for it, readings in servers if it.role == role and readings is not None]
