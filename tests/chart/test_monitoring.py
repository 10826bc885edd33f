"""Alerts and the dashboard ask for what servers really say, and the documentation explains them."""

import json
import re

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from paceline import Strategy
from paceline_gateway.metrics import GatewayMetrics
from support.helm import CHART
from support.manifests import install, values_of

# What Prometheus itself adds to every series.
SCRAPE_LABELS = {"job", "le", "namespace", "paceline_pool", "pod"}
SCRAPE_SERIES = {"up": set()}
EXAMPLE = values_of("hpa.yaml")
# All alerts there are: KEDA has one of its own.
ALERTS = values_of("keda.yaml")
DASHBOARD = json.loads((CHART / "files" / "dashboard.json").read_text())


@pytest.fixture(scope="session")
def series(system):
    """Metric name to the labels that it was seen with, of servers that have worked."""
    with system.client() as client:
        for strategy in Strategy.SPECULATIVE, Strategy.DISTRIBUTED:
            client.generate("def ", max_tokens=24, strategy=strategy).collect()
    found = {}
    pages = [it.page("/metrics") for it in (*system.models, *system.orchestrators)]
    for page in (*pages, gateways_page()):
        for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE):
            suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
            found |= {name + suffix: found.get(name + suffix, set()) for suffix in suffixes}
        for name, labels in re.findall(r"^(\w+)\{(.*)\} ", page, re.MULTILINE):
            found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found | SCRAPE_SERIES


def gateways_page():
    registry = CollectorRegistry()
    with GatewayMetrics(registry).request("/v1/completions", lambda: 200):
        pass
    return generate_latest(registry).decode()


def alerts():
    release = install(ALERTS)
    (rule,) = release.of("PrometheusRule")
    (group,) = rule["spec"]["groups"]
    return group["rules"]


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries():
    """Return every expression, with Grafana's variables filled in, and what it is for."""
    found = {alert["alert"]: alert["expr"] for alert in alerts()}
    for panel in panels():
        for target in panel["targets"]:
            name = f"{panel['title']} {target['refId']}"
            found[name] = target["expr"].replace("$__rate_interval", "5m")
    return [pytest.param(expression, id=name) for name, expression in found.items()]


def asked_for(expression):
    """Yield (metric, label) of all that an expression selects by, and (metric, None)."""
    selected, groupings = [], set()

    def visit(node):
        # A range such as x[5m] holds its selector, and the walk does not go into it.
        selector = getattr(node, "vector_selector", node)
        if isinstance(selector, promql_parser.VectorSelector):
            selected.append(selector)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            groupings.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    assert selected, f"no metric in {expression}"
    for selector in selected:
        yield selector.name, None
        for label in {matcher.name for matcher in selector.matchers.matchers} | groupings:
            yield selector.name, label


@pytest.mark.parametrize("expression", queries())
def test_a_query_asks_for_metrics_and_labels_that_servers_have(expression, series):
    for metric, label in asked_for(expression):
        assert metric in series
        # A counter without samples yet has no labels to compare with.
        if label is not None and series[metric]:
            assert label in series[metric] | SCRAPE_LABELS


def test_the_check_of_queries_sees_a_wrong_metric_and_a_wrong_label(series):
    found = set(asked_for('sum by (typo) (rate(paceline_rpcs_total{code="OK"}[5m])) > absent(no)'))
    assert found == {
        ("paceline_rpcs_total", None),
        ("paceline_rpcs_total", "code"),
        ("paceline_rpcs_total", "typo"),
        ("no", None),
        ("no", "typo"),
    }
    assert "typo" not in series["paceline_rpcs_total"]
    assert "no" not in series


def test_every_alert_asks_about_its_own_release_only():
    for alert in alerts():
        selectors = re.findall(r"\{([^}]*)\}", alert["expr"])
        assert selectors
        for selector in selectors:
            assert 'namespace="serving", job="demo-metrics"' in selector


def test_every_alert_says_how_bad_it_is_what_it_means_and_what_to_do():
    for alert in alerts():
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(alert["annotations"]) == {"summary", "description"}
        assert alert["annotations"]["description"].endswith(".")


def test_to_follow_the_load_is_no_repair():
    (repairs,) = (it["expr"] for it in alerts() if it["alert"] == "PacelineRepairs")
    assert 'kind!="load_changed"' in repairs


def test_the_readme_explains_every_alert_and_no_other():
    readme = (CHART / "README.md").read_text()
    explained = re.findall(r"^\| `(Paceline\w+)` \|", readme, re.MULTILINE)
    assert explained == [alert["alert"] for alert in alerts()]


def test_the_operator_scrapes_every_server_once():
    release = install(EXAMPLE)
    (monitor,) = release.of("ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = release.of("Service")
    (service,) = (each for each in services if wanted <= each["metadata"]["labels"].items())
    assert service["metadata"]["name"] == "demo-metrics"
    assert service["spec"]["publishNotReadyAddresses"] is True
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]


def test_the_dashboard_is_delivered_as_it_is_in_the_repository():
    (config_map,) = install(EXAMPLE).of("ConfigMap")
    ((file, content),) = config_map["data"].items()
    assert json.loads(content) == DASHBOARD
    # In one folder with those of other releases.
    assert file == f"{config_map['metadata']['name']}.json"
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_the_dashboard_is_bound_to_no_data_source_and_says_what_each_panel_shows():
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == [
        "datasource",
        "namespace",
        "job",
    ]
    for panel in panels():
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'namespace=~"$namespace", job=~"$job"' in target["expr"]


@pytest.mark.parametrize(
    "metric",
    [
        "paceline_time_to_first_token_seconds_bucket",
        "paceline_inter_token_latency_seconds_bucket",
        "paceline_request_duration_seconds_bucket",
        "paceline_rpc_hop_seconds_bucket",
        "paceline_speculation_parallelism_sum",
        "paceline_speedup_vs_autoregressive_sum",
        "paceline_spec_decode_num_accepted_tokens_total",
        "paceline_wasted_tokens_total",
        "paceline_queue_seconds_bucket",
        "paceline_forward_seconds_bucket",
        "paceline_kv_cache_usage_perc",
        "paceline_sessions_active",
        "paceline_fallbacks_total",
        "paceline_corrections_ahead_total",
    ],
)
def test_the_dashboard_shows_what_operators_look_for(metric):
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert any(re.search(rf"\b{metric}\b", expression) for expression in expressions)


def test_the_panels_of_the_dashboard_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert place["x"] + place["w"] <= 24
        taken |= cells
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)
