"""Helm 4 as a library. Nothing else here knows which one it is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python
from helm_python import _native  # the public `render` cannot be told the cluster's version

if TYPE_CHECKING:
    from collections.abc import Mapping

CHART = Path(__file__).parents[2] / "k8s" / "paceline"
KUBE_VERSIONS = ("1.30.0", "1.31.0", "1.32.0", "1.33.0", "1.34.0", "1.35.0", "1.36.0")


class RefusedError(Exception):
    """The chart refuses its values: its text says why."""


@cache
def _chart() -> helm_python.Chart:
    return helm_python.Chart.load(CHART)


def render_templates(
    values: Mapping[str, Any],
    *,
    release: str = "demo",
    namespace: str = "serving",
    kube_version: str = KUBE_VERSIONS[-1],
) -> dict[str, str]:
    """Return template name, below templates/, to what it renders.

    Raises:
        RefusedError: the schema or a template refuses the values.
    """
    options = {"name": release, "namespace": namespace, "kube_version": f"v{kube_version}"}
    try:
        rendered = _native.call_string(
            "helm_render", _chart()._raw(), json.dumps(values), json.dumps(options)
        )
    except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
        raise RefusedError(str(error)) from None
    return {
        name.removeprefix("paceline/templates/"): text
        for name, text in json.loads(rendered).items()
    }


def lint(values: Mapping[str, Any], *, kube_version: str = KUBE_VERSIONS[-1]) -> list[str]:
    """Return what `helm lint --strict` has to say, apart from the missing icon."""
    report = helm_python.lint(CHART, dict(values), strict=True, kube_version=f"v{kube_version}")
    found = [*report["errors"], *(message["error"] for message in report["messages"])]
    return [text for text in found if text != "icon is recommended"]
