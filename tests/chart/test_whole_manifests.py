"""Every field of every manifest, as it was reviewed: a change to any of them shows as a diff.

golden/ has, for each values file, the objects that a release of it has: with the default values
all of them, with others those that differ. `pytest tests/chart --rewrite-manifests` writes down
what is rendered now; the diff is what is reviewed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.manifests import VALUES_FILES, install, load_yaml, values_of

GOLDEN = Path(__file__).parent / "golden"
DEFAULT = "empty-values.yaml"
NAMES = [file.name for file in VALUES_FILES]
# What tests of its own compare with the repository's file.
ELSEWHERE = "... (test_monitoring.py)"


def rendered(name):
    """Return the objects of a release by kind and name, in order."""
    found = {}
    for each in install(values_of(name)).objects:
        if each["kind"] == "ConfigMap" and each["metadata"]["name"].endswith("-dashboard"):
            each["data"] = dict.fromkeys(each["data"], ELSEWHERE)
        found[f"{each['kind']} {each['metadata']['name']}"] = each
    return dict(sorted(found.items()))


def told(name):
    """Return what golden/ shall say of a values file."""
    objects, default = rendered(name), rendered(DEFAULT)
    if name == DEFAULT:
        return [*objects.values()]
    summary = {
        "as by default": [key for key in objects if objects[key] == default.get(key)],
        "not there": [key for key in default if key not in objects],
    }
    return [summary, *(it for key, it in objects.items() if it != default.get(key))]


@pytest.mark.parametrize("name", NAMES)
def test_a_release_is_as_it_was_reviewed(name, request):
    path = GOLDEN / name
    if request.config.getoption("--rewrite-manifests"):
        path.write_text(yaml.safe_dump_all(told(name), sort_keys=False, width=1000))
    assert told(name) == load_yaml(path.read_text()), (
        "if it shall be so: pytest tests/chart --rewrite-manifests, and read the diff"
    )


def test_golden_files_are_those_of_values_files():
    assert sorted(it.name for it in GOLDEN.iterdir()) == sorted(NAMES)


def test_every_kind_that_the_chart_has_is_among_them():
    kinds = {key.split()[0] for name in NAMES for key in rendered(name)}
    assert kinds >= {
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "Ingress",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "PrometheusRule",
        "Role",
        "RoleBinding",
        "ScaledObject",
        "Service",
        "ServiceAccount",
        "ServiceMonitor",
        "TriggerAuthentication",
    }
