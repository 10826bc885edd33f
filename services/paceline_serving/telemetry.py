"""Logs and metrics, neither with a prompt, a token, a session handle or an exception's text.

Metrics have a registry that is passed around, so that two servers can live in one process. Labels
come from fixed sets, never from a peer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import sys
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
)

from paceline_serving import tracing
from paceline_serving.one_line import on_one_line
from paceline_serving.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import TextIO

# Seconds. A forward of a small model takes 1 ms, a cold prefill of a large one 10 s, and a call at
# most 600 by default, and as long as an operator may let it.
LATENCY_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 14_400.0, 86_400.0),
)

# So many failures of a group are shown.
_MOST_MEMBERS = 8

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_CANCEL_REASONS = {
    "CANCELLED": "client_cancel",
    "DEADLINE_EXCEEDED": "deadline",
    "SUPERSEDED": "superseded",
}


@dataclass(slots=True)
class _Outcome:
    code: str = "OK"
    reason: str = ""


class RpcMetrics:
    """A server's metrics of its calls."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._calls = Counter(
            "paceline_rpcs", "Calls served", ["method", "code", "reason"], registry=registry
        )
        self._seconds = Histogram(
            "paceline_rpc_seconds",
            "Time from a call's arrival to its end",
            ["method"],
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self._in_flight = Gauge(
            "paceline_rpcs_in_flight", "Calls being served", ["method"], registry=registry
        )
        self._cancelled = Counter(
            "paceline_cancelled_rpcs",
            "Calls that ended before their answer",
            ["reason"],
            registry=registry,
        )

    @contextmanager
    def rpc(self, method: str) -> Iterator[_Outcome]:
        """Count a call; its code and reason are written into the outcome."""
        name = method.lstrip("/")
        outcome = _Outcome()
        started = time.perf_counter()
        in_flight = self._in_flight.labels(name)
        in_flight.inc()
        try:
            yield outcome
        finally:
            self._seconds.labels(name).observe(time.perf_counter() - started)
            self._calls.labels(name, outcome.code, outcome.reason).inc()
            cancel_reason = _CANCEL_REASONS.get(outcome.reason) or _CANCEL_REASONS.get(outcome.code)
            if cancel_reason:
                self._cancelled.labels(cancel_reason).inc()
            in_flight.dec()  # last: when no call is in flight, all have been counted


def new_registry() -> CollectorRegistry:
    """Return a registry with the facts of this process."""
    registry = CollectorRegistry()
    Info("paceline_build", "Versions in this process", registry=registry).info(
        {
            "version": VERSION,
            "python": platform.python_version(),
            "grpc": grpc.__version__,
        }
    )
    # Memory, processor time, and open descriptors, most of which are connections.
    ProcessCollector(registry=registry)
    return registry


def count_tasks(registry: CollectorRegistry, loop: asyncio.AbstractEventLoop) -> None:
    """Show the number of asyncio tasks, which is constant without work."""
    Gauge("paceline_tasks", "asyncio tasks", registry=registry).set_function(
        lambda: len(asyncio.all_tasks(loop))
    )


def configure_logging(*, level: str, log_format: str, stream: TextIO = sys.stderr) -> None:
    """Send all logs to one stream, as JSON lines or as text."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class _SafeFormatter(logging.Formatter):
    """Shows an exception's origin and type, never its text, which may have a prompt in it."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return _without_text(ei[1])


class _TextFormatter(_SafeFormatter):
    """One line for people: time, level, message, fields; then where an exception came from."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {on_one_line(record.getMessage() + fields)}"
        if record.exc_info and record.exc_info[1]:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _JsonFormatter(_SafeFormatter):
    """One JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1]:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of the call being served, and the record's own (`extra=`)."""
    call = tracing.current()
    fields: dict[str, Any] = {}
    if call is not None:
        fields = {
            "method": call.method,
            "request_id": call.request_id,
            "trace_id": call.trace_id,
        }
    own = {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
    return fields | own


def _without_text(error: BaseException) -> str:
    parts = []
    cause: BaseException | None = error
    while cause is not None:
        frames = _frames(cause.__traceback__)
        name = f"{frames}{type(cause).__module__}.{type(cause).__qualname__}"
        parts.append(name + _members(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "\n caused by:\n".join(parts)


def _members(error: BaseException) -> str:
    """Show the exceptions in a group: they say what happened, the group only where."""
    if not isinstance(error, BaseExceptionGroup):
        return ""
    shown = map(_without_text, error.exceptions[:_MOST_MEMBERS])
    return "".join(f"\n of which one:\n{member}" for member in shown)


def _frames(trace: TracebackType | None) -> str:
    return "".join(traceback.format_tb(trace))
