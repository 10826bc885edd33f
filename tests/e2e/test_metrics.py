"""The metrics that docs/operations.md lists are those that servers show, with their labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline import Strategy
from support.system import simulated_system
from support.waiting import eventually

OPERATIONS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
# What `documented` and `shown` leave out: model servers put it on everything.
ROLE = "role"
# Only a drafter that is a stack of models has stages.
STACKS = {"paceline_stage_forwards_total"}
# Of Kubernetes, which is not here: tests/contract/test_kubernetes_discovery.py sees them count.
DISCOVERY = {"paceline_discovery_relists_total", "paceline_discovery_failures_total"}


@pytest.fixture(scope="module")
def pages():
    """What each kind of server shows after requests of every kind, the last without a drafter."""
    with simulated_system(target_count=2).running() as system, system.client() as client:
        for strategy in (Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE, Strategy.DISTRIBUTED):
            client.generate("def ", max_tokens=24, strategy=strategy).collect()
        client.generate("def ", max_tokens=24, strategy=Strategy.SPECULATIVE, width=3).collect()
        for server in system.models:
            eventually(lambda it=server: not it.metric("paceline_calls_live"), what="it rests")
        models = [server.page("/metrics") for server in system.models]
        system.drafters[0].kill()
        eventually(lambda: len(_ready(client)) == len(system.targets), what="the drafter is gone")
        client.generate("def ", max_tokens=4, strategy=Strategy.SPECULATIVE).collect()
        eventually(lambda: not client.info().running_request_count, what="all is counted")
        return {
            "orchestrator": [system.orchestrators[0].page("/metrics")],
            "model server": models,
        }


def _ready(client):
    return [server for server in client.info().servers if server.ready]


def documented(who):
    """Return the labels of each metric that the table lists for a kind of server."""
    rows = re.findall(r"^\| ([a-z ]+) \| `(\w+)(?:\{([\w,]+)\})?` \|", OPERATIONS, re.MULTILINE)
    return {
        name: set(labels.split(",")) - {"", ROLE}
        for owner, name, labels in rows
        if owner in (who, "all")
    }


def shown(page):
    """Return the labels that were seen of each metric on a page; a new counter has none yet."""
    found = {}
    for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE):
        if name.endswith("_created"):
            continue  # when a counter began to count: the client library adds it
        sample = f"{name}_count" if kind in {"histogram", "summary"} else name
        labels = re.findall(rf"^{sample}\{{(.*)\}} ", page, re.MULTILINE)
        found[name] = set(re.findall(r'(\w+)="', " ".join(labels))) - {ROLE}
    return found


@pytest.mark.parametrize("who", ["orchestrator", "model server"])
def test_the_documentation_lists_every_metric_and_no_other(who, pages):
    expected = documented(who)
    for page in pages[who]:
        assert set(shown(page)) == set(expected)


@pytest.mark.parametrize("who", ["orchestrator", "model server"])
def test_a_metric_has_the_labels_that_the_documentation_says(who, pages):
    expected = documented(who)
    expected["paceline_build_info"] = {"version", "python", "grpc"}
    for page in pages[who]:
        for name, labels in shown(page).items():
            assert labels in (set(), expected[name]), name
    fired = {name for page in pages[who] for name, labels in shown(page).items() if labels}
    assert {name for name, labels in expected.items() if labels} - fired <= DISCOVERY | STACKS


@pytest.mark.parametrize(
    "sample",
    [
        "paceline_incoming_requests_total",
        "paceline_time_to_first_token_seconds_count",
        "paceline_inter_token_latency_seconds_count",
        "paceline_request_duration_seconds_count",
        "paceline_request_spec_decode_acceptance_rate_count",
        "paceline_speculation_parallelism_count",
        'paceline_speedup_vs_autoregressive_count{strategy="autoregressive"}',
        'paceline_speedup_vs_autoregressive_count{strategy="speculative"}',
        'paceline_speedup_vs_autoregressive_count{strategy="distributed"}',
        'paceline_request_walltime_improvement_count{strategy="autoregressive"}',
        'paceline_rpc_hop_seconds_count{rpc="Draft"}',
        'paceline_rpc_hop_seconds_count{rpc="Verify"}',
        "paceline_spec_decode_num_accepted_tokens_total",
        "paceline_branch_rows_total",
        'paceline_fallbacks_total{kind="no_drafter"}',
    ],
)
def test_an_orchestrator_measures_what_it_served(sample, pages):
    (page,) = pages["orchestrator"]
    (value,) = re.findall(rf"^{re.escape(sample)} (.*)$", page, re.MULTILINE)
    assert float(value) > 0


def test_every_metric_that_the_documentation_speaks_of_is_in_its_table():
    known = documented("orchestrator") | documented("model server")
    for name in re.findall(r"`(paceline_\w+)", OPERATIONS):
        assert name in known
