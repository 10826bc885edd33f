"""Prometheus' own evaluation of expressions and alerts, over series that a test makes up."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from paceline_serving.telemetry import LATENCY_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

MINUTES = 60
"""How long series go on, with a sample each minute."""
_SCOPE = {"namespace": "serving", "job": "demo-metrics"}

Series = dict[str, str]
"""Name and labels, as PromQL has them, to promtool's notation of values."""


def gauge(name: str, value: float, **labels: str) -> Series:
    """Return a series that does not change."""
    return {_series(name, labels): f"{value}+0x{MINUTES}"}


def counter(name: str, each_minute: float, **labels: str) -> Series:
    """Return a series that grows by so much each minute."""
    return {_series(name, labels): f"0+{each_minute}x{MINUTES}"}


def histogram(name: str, each_minute: Mapping[float, int], **labels: str) -> Series:
    """Return the buckets of a histogram of ours: observations by the bucket that they fall into."""
    assert each_minute.keys() <= set(LATENCY_BUCKETS)
    found: Series = {}
    for bound in LATENCY_BUCKETS:
        count = sum(it for upper, it in each_minute.items() if upper <= bound)
        found |= counter(f"{name}_bucket", count, le=str(bound), **labels)
    return found | counter(f"{name}_bucket", sum(each_minute.values()), le="+Inf", **labels)


@dataclass(frozen=True)
class Promtool:
    """Runs promtool in a folder of its own.

    Attributes:
        path: The program.
        folder: Where its files may lie.
        rules: The groups of a PrometheusRule.
    """

    path: Path
    folder: Path
    rules: Sequence[Mapping[str, Any]] = field(default=())

    def complaints(self, tests: Iterable[tuple[Series, Mapping[str, Any]]]) -> str:
        """Run tests in promtool's form; return what it has to say, empty if all is as told."""
        rules, file = self.folder / "rules.yaml", self.folder / "tests.yaml"
        rules.write_text(yaml.safe_dump({"groups": list(self.rules)}))
        content = {
            "rule_files": [rules.name],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "name": f"number {number}: {', '.join(series)}",
                    "interval": "1m",
                    "input_series": [{"series": it, "values": series[it]} for it in series],
                    **test,
                }
                for number, (series, test) in enumerate(tests)
            ],
        }
        file.write_text(yaml.safe_dump(content))
        done = subprocess.run(
            [self.path, "test", "rules", file.name],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return "" if done.returncode == 0 else done.stdout + done.stderr


def _series(name: str, labels: Mapping[str, str]) -> str:
    pairs = ", ".join(f'{key}="{value}"' for key, value in {**_SCOPE, **labels}.items())
    return f"{name}{{{pairs}}}"
