"""The named cases of the clients' conformance suite, as the vectors hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS = {"name", "about", "needs", "timing", "server", "steps", "servers_saw"}

VECTORS = Path(__file__).parents[2] / "contract" / "vectors" / "clients"


@dataclass(frozen=True)
class Case:
    """One case: what happens, and what has to come of it; see the vectors' README."""

    group: str
    name: str
    timing: str
    needs: str
    server: dict[str, Any]
    steps: list[dict[str, Any]]
    servers_saw: dict[str, Any]


def all_cases() -> list[Case]:
    """Read every case, in the files' order."""
    return [
        _case(path.stem, entry)
        for path in sorted(VECTORS.glob("*.json"))
        for entry in json.loads(path.read_text())["cases"]
    ]


def with_references(value: Any, answers: list[dict[str, Any]]) -> Any:
    """Replace each {"$ref": "0.started.seed"} by what an earlier answer of the case has there."""
    if isinstance(value, list):
        return [with_references(each, answers) for each in value]
    if not isinstance(value, dict):
        return value
    if "$ref" not in value:
        return {key: with_references(each, answers) for key, each in value.items()}
    found: Any = answers
    for key in value["$ref"].split("."):
        found = found[int(key) if isinstance(found, list) else key]
    return found


def _case(group: str, entry: dict[str, Any]) -> Case:
    entry = _expanded(entry)
    assert entry.keys() <= _KEYS, f"{group}: {entry['name']} has unknown keys"
    return Case(
        group=group,
        name=entry["name"],
        timing=entry["timing"],
        needs=entry.get("needs", ""),
        server=entry["server"],
        steps=entry["steps"],
        servers_saw=entry.get("servers_saw", {}),
    )


def _expanded(value: Any) -> Any:
    """Write out each {"$repeat": [what, count]}."""
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "$repeat" in value:
        what, count = value["$repeat"]
        return what * count
    return {key: _expanded(each) for key, each in value.items()}
