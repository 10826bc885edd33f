"""`npm ci` takes the TypeScript client's lock file, from any registry and on any platform."""

from __future__ import annotations

import json
from pathlib import Path

FILE = Path(__file__).parents[2] / "clients/typescript/package-lock.json"
PACKAGES = json.loads(FILE.read_text())["packages"]


def test_it_names_no_registry():
    assert not [name for name, package in PACKAGES.items() if "resolved" in package]


def test_it_has_what_is_needed_on_every_platform():
    missing = [
        name
        for package in PACKAGES.values()
        for name in package.get("optionalDependencies", {})
        if f"node_modules/{name}" not in PACKAGES
    ]
    assert missing == []


def test_what_has_no_hash_is_a_tool_for_one_platform():
    without = [it for name, it in PACKAGES.items() if name and "integrity" not in it]
    assert all(it["optional"] and it["dev"] and it["os"] and it["cpu"] for it in without)
