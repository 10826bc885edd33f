"""How many servers there are, by how they stand."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline_orchestrator.fleet.discovery import MODEL_ROLES
from paceline_orchestrator.fleet.words import Word

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import CollectorRegistry, Metric

    from paceline_orchestrator.fleet.pool import ServerPool


def count_servers(registry: CollectorRegistry, pool: ServerPool) -> None:
    """Show how many servers take work, and how many have which word, by role.

    Labels are from closed lists, so that there are as many series for one server as for a thousand.
    """
    registry.register(_Counts(pool))


class _Counts(Collector):
    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool

    def describe(self) -> list[Metric]:
        return []  # or the registry would collect before there is a loop

    def collect(self) -> Iterator[Metric]:
        standings = self._pool.standings()
        counts = Counter((it.role, standing.word) for it, standing in standings.items())
        ready = GaugeMetricFamily(
            "paceline_ready_servers",
            "Servers that this orchestrator gives work to",
            labels=["role"],
        )
        servers = GaugeMetricFamily(
            "paceline_servers",
            "Servers by how they stand, in one word",
            labels=["role", "standing"],
        )
        for role in MODEL_ROLES:
            ready.add_metric([role], sum(counts[role, it] for it in Word if it.takes_work))
            for word in Word:
                servers.add_metric([role, word], counts[role, word])
        yield ready
        yield servers
