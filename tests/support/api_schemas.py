"""What an API server of some version checks before anything else: unknown fields and types."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
from referencing import Registry, Resource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SCHEMAS = files("kubernetes_validate") / "kubernetes-json-schema"
# Of what operators of a cluster install; only what the chart uses, and closed.
_OWN_SCHEMAS = Path(__file__).parents[1] / "chart" / "custom_resources"


def violations(manifest: Mapping[str, Any], *, kube_version: str) -> list[str]:
    """Return what an API server would say, as `path: message`."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    kind = manifest["kind"].lower()
    if (own := _OWN_SCHEMAS / f"{kind}.{group}.json").exists():
        validator = jsonschema.Draft202012Validator(json.loads(own.read_text()))
    else:
        minor = kube_version.rpartition(".")[0]
        name = "-".join(filter(None, (kind, group.partition(".")[0], version)))
        validator = _validator(minor, name)
    found = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
    for template in _pod_templates(manifest):
        found += violations(template, kube_version=kube_version)
    return found


def _pod_templates(manifest: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what a custom resource makes pods from, as the objects that API servers know."""
    if manifest["kind"] == "LeaderWorkerSet":
        groups = manifest["spec"]["leaderWorkerTemplate"]
        for name in ("leaderTemplate", "workerTemplate"):
            head = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name}}
            yield {**head, "template": groups[name]}


@cache
def _validator(minor: str, name: str) -> jsonschema.Draft202012Validator:
    folder = _SCHEMAS / f"v{minor}.0-local-strict"
    schema = json.loads((folder / f"{name}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(minor))


@cache
def _definitions(minor: str) -> Registry[Any]:
    folder = _SCHEMAS / f"v{minor}.0-local-strict"
    definitions = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    return definitions @ Registry()
