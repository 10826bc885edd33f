"""What is worth showing of a look: totals, pools, and servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from paceline_cli.top_figures import Figures, Totals, figures, totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import ServerInfo
    from paceline_cli.metrics_samples import Readings, Samples
    from paceline_cli.top_watch import Look, Sight

__all__ = ["PoolView", "ServerView", "View", "view"]

_ROLES = ("target", "drafter", "orchestrator", "unknown")
_READY, _UP, _GONE, _SILENT = "ready", "up", "gone", "no answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server.

    Attributes:
        name: As the orchestrator calls it, or its address.
        state: "ready" or why not, as the orchestrator sees it; else "up", "gone" or "no answer".
        address: Of its metrics; else where it serves.
        note: Why it cannot be seen; empty if it can.
        gone_seconds: For how long its metrics have not answered.
        figures: What it does; of a server whose metrics are away, nothing.
    """

    name: str
    role: str
    state: str
    address: str
    note: str
    gone_seconds: float
    figures: Figures


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """All servers of a role.

    Attributes:
        role: Theirs.
        ready_count: Of them, those that take work.
        figures: What they do together.
        servers: They.
    """

    role: str
    ready_count: int
    figures: Figures
    servers: tuple[ServerView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything."""

    model_name: str
    problem: str
    totals: Totals
    pools: tuple[PoolView, ...]


def view(look: Look) -> View:
    """Work out what to show."""
    info = look.info
    known = info.servers if info is not None else ()
    matched = [(sight, _match(sight, known)) for sight in look.sights]
    servers = [(_seen(sight, server), _fresh(sight)) for sight, server in matched]
    seen = {server for _, server in matched}
    servers += [(_told(server), None) for server in known if server not in seen]
    return View(
        model_name=info.model_name if info is not None else "",
        problem=look.problem,
        totals=totals(
            _readings("orchestrator", servers),
            _readings("target", servers),
            told_running=info.running_request_count if info is not None else None,
        ),
        pools=tuple(_pool(role, servers) for role in _ROLES if _has(role, servers)),
    )


def _match(sight: Sight, known: Sequence[ServerInfo]) -> ServerInfo | None:
    """Find the server that a page is of: by the name that was given, or if it is alone there."""
    if sight.page.source.name:
        return next((it for it in known if it.name == sight.page.source.name), None)
    neighbours = [
        it for it in known if it.address.rpartition(":")[0].strip("[]") == sight.page.host
    ]
    is_model_server = sight.readings is None or _role(sight.readings.now) != "orchestrator"
    return neighbours[0] if len(neighbours) == 1 and is_model_server else None


def _role(samples: Samples) -> str:
    for role in ("target", "drafter"):
        if any(("role", role) in it for it in samples.values.get("paceline_sessions_active", ())):
            return role
    return "orchestrator" if "paceline_incoming_requests_total" in samples else "unknown"


def _fresh(sight: Sight) -> Readings | None:
    return None if sight.problem else sight.readings


def _seen(sight: Sight, info: ServerInfo | None) -> ServerView:
    """Describe a server by its page, and by what the orchestrator says of it."""
    role = "unknown" if sight.readings is None else _role(sight.readings.now)
    name = info.name if info is not None else sight.page.source.name
    fresh, state = _fresh(sight), _state(info, sight)
    return ServerView(
        name=name or sight.page.address,
        role=info.role if info is not None and role == "unknown" else role,
        state=state,
        address=sight.page.address,
        note=f"no metrics, {sight.problem}" if state == _READY and sight.problem else sight.problem,
        gone_seconds=sight.gone_seconds,
        figures=figures(role, [fresh] if fresh is not None else []),
    )


def _told(info: ServerInfo) -> ServerView:
    """Describe a server by what the orchestrator says alone."""
    return ServerView(
        name=info.name,
        role=info.role,
        state=_state(info),
        address=info.address,
        note="no metrics",
        gone_seconds=0.0,
        figures=Figures(),
    )


def _state(info: ServerInfo | None, sight: Sight | None = None) -> str:
    """Say how a server is. If the orchestrator works with it, it is there, whatever is seen."""
    if info is not None and info.ready:
        return _READY
    if sight is not None and sight.problem:
        return _SILENT if sight.readings is None else _GONE
    return _UP if info is None else (info.status or "not ready").lower().replace("_", " ")


_Server: TypeAlias = tuple[ServerView, "Readings | None"]


def _has(role: str, servers: Sequence[_Server]) -> bool:
    return any(it.role == role for it, _ in servers)


def _pool(role: str, servers: Sequence[_Server]) -> PoolView:
    own = sorted((it for it, _ in servers if it.role == role), key=lambda it: it.name)
    return PoolView(
        role=role,
        ready_count=sum(it.state in (_READY, _UP) for it in own),
        figures=figures(role, _readings(role, servers)),
        servers=tuple(own),
    )


def _readings(role: str, servers: Sequence[_Server]) -> list[Readings]:
    return [readings for it, readings in servers if it.role == role and readings is not None]
