"""Each panel of the dashboard draws what its title, description and unit say, of one made-up hour.

The world: two orchestrators, a target in each of two pools, a drafter, a gateway. What counters
grow by is given each minute, what panels show each second.
"""

from __future__ import annotations

import json
import re

import pytest

from support.helm import CHART
from support.promtool import Promtool, counter, gauge, histogram

GENERATE = "paceline.v1.OrchestratorService/Generate"
PANELS = {
    it["title"]: it
    for it in json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    if it["type"] != "row"
}
O_0, O_1 = {"pod": "o-0"}, {"pod": "o-1"}
T_0 = {"pod": "t-0", "role": "target", "paceline_pool": "a"}
T_1 = {"pod": "t-1", "role": "target", "paceline_pool": "b"}
D_0 = {"pod": "d-0", "role": "drafter", "paceline_pool": "a"}
# Half of the observations below 0.1 s, 90 % below 0.25 s, 95 % below 0.5 s, the rest below 1 s.
TIMES = {0.1: 600, 0.25: 480, 0.5: 60, 1.0: 60}
P50_P95 = {"p50": {"{}": 0.1}, "p95": {"{}": 0.5}}


def times(name, **labels):
    return histogram(name, TIMES, **labels)


def rpcs(each_minute, code, reason="", *, method=GENERATE, **labels):
    return counter(
        "paceline_rpcs_total", each_minute, method=method, code=code, reason=reason, **labels
    )


def both(name, first, second, **labels):
    return counter(name, first, **O_0, **labels) | counter(name, second, **O_1, **labels)


WORLD = (
    rpcs(60, "OK", **O_0)
    | rpcs(120, "OK", **O_1)
    | rpcs(60, "RESOURCE_EXHAUSTED", "OVERLOADED", **O_0)
    | rpcs(60, "CANCELLED", "CLIENT_CANCELLED", **O_0)
    | rpcs(60, "ABORTED", "SUPERSEDED", method="Verify", **T_0)
    | rpcs(180, "ABORTED", "STALE_CALL", method="Verify", **T_0)
    | rpcs(600, "OK", method="Verify", **T_0)
    | gauge("paceline_num_requests_running", 3, **O_0)
    | gauge("paceline_num_requests_running", 5, **O_1)
    | gauge("paceline_num_requests_running", 1, **T_0)
    | gauge("paceline_num_requests_running", 1, **T_1)
    | gauge("paceline_num_requests_waiting", 4, **T_0)
    | gauge("paceline_num_requests_waiting", 3, **T_1)
    | gauge("paceline_num_requests_waiting", 2, **D_0)
    | times("paceline_time_to_first_token_seconds", **O_0)
    | times("paceline_time_to_first_token_seconds", **O_1)
    | times("paceline_request_duration_seconds", **O_0)
    | times("paceline_inter_token_latency_seconds", **O_0)
    | both("paceline_inter_token_latency_seconds_count", 600, 1200)
    | times("paceline_rpc_hop_seconds", rpc="Verify", **O_0)
    | histogram("paceline_rpc_hop_seconds", {0.01: 60}, rpc="Draft", **O_0)
    | both("paceline_speculation_parallelism_sum", 300, 120)
    | both("paceline_speculation_parallelism_count", 60, 60)
    | both("paceline_speedup_vs_autoregressive_sum", 120, 240, strategy="dsi")
    | both("paceline_speedup_vs_autoregressive_count", 60, 60, strategy="dsi")
    | counter("paceline_spec_decode_num_draft_tokens_total", 500, **T_0)
    | counter("paceline_spec_decode_num_draft_tokens_total", 300, **T_1)
    | counter("paceline_spec_decode_num_draft_tokens_total", 5000, **D_0)
    | counter("paceline_spec_decode_num_accepted_tokens_total", 350, **T_0)
    | counter("paceline_spec_decode_num_accepted_tokens_total", 250, **T_1)
    | counter("paceline_spec_decode_num_accepted_tokens_per_pos_total", 60, position="0", **T_0)
    | counter("paceline_spec_decode_num_accepted_tokens_per_pos_total", 120, position="0", **T_1)
    | counter("paceline_spec_decode_num_accepted_tokens_per_pos_total", 30, position="1", **T_0)
    | counter("paceline_wasted_tokens_total", 60, reason="rejected", **T_0)
    | counter("paceline_wasted_tokens_total", 60, reason="rejected", **T_1)
    | counter("paceline_wasted_tokens_total", 600, reason="rejected", **D_0)
    | counter("paceline_cancelled_rpcs_total", 60, reason="deadline", **O_0)
    | counter("paceline_cancelled_rpcs_total", 120, reason="deadline", **T_0)
    | both("paceline_branch_rows_total", 600, 60)
    | both("paceline_branch_rows_accepted_total", 120, 60)
    | both("paceline_corrections_ahead_total", 60, 0)
    | gauge("paceline_desired_verifiers", 8, **O_0)
    | gauge("paceline_desired_verifiers", 8, **O_1)
    | gauge("paceline_desired_verifiers_unlimited", 11, **O_0)
    | gauge("paceline_desired_verifiers_unlimited", 11, **O_1)
    | gauge("paceline_sessions_active", 4, **T_0)
    | gauge("paceline_sessions_active", 6, **T_1)
    | gauge("paceline_sessions_active", 0, **{**T_1, "pod": "t-2"})
    | gauge("paceline_sessions_active", 7, **D_0)
    | gauge("paceline_servers", 2, role="target", standing="used", **O_0)
    | gauge("paceline_servers", 1, role="target", standing="used", **O_1)
    | gauge("paceline_servers", 1, role="target", standing="other_dtype", **O_1)
    | gauge("paceline_servers", 0, role="drafter", standing="used", **O_0)
    | times("paceline_queue_seconds", **T_0)
    | times("paceline_queue_seconds", **T_1)
    | histogram("paceline_queue_seconds", {0.01: 60}, **D_0)
    | times("paceline_forward_seconds", phase="verify", **T_0)
    | histogram("paceline_forward_seconds", {0.01: 60}, phase="draft", **D_0)
    | counter("paceline_forwards_total", 600, **T_0)
    | counter("paceline_forwards_total", 300, **T_1)
    | counter("paceline_forwards_interrupted_total", 60, **T_0)
    | gauge("paceline_kv_cache_usage_perc", 0.5, **T_0)
    | counter("paceline_calls_refused_total", 60, **T_0)
    | counter("paceline_calls_refused_total", 60, **T_1)
    | both("paceline_fallbacks_total", 60, 120, kind="target_lost")
    | counter("paceline_sessions_evicted_total", 60, reason="expired", **T_0)
    | counter("paceline_sessions_evicted_total", 60, reason="expired", **T_1)
    | counter("paceline_http_requests_total", 60, route="a", status="200", pod="g-0")
    | counter("paceline_http_requests_total", 120, route="b", status="200", pod="g-1")
    | counter("paceline_http_requests_total", 60, route="a", status="503", pod="g-0")
)
TARGET, DRAFTER = '{role="target"}', '{role="drafter"}'
ALL_OF_T_0 = (
    'paceline_kv_cache_usage_perc{namespace="serving", job="demo-metrics", paceline_pool="a",'
    ' pod="t-0", role="target"}'
)
# By title: the unit, and by legend what is drawn of that world.
SHOWN = {
    "Requests by outcome": (
        "reqps",
        {
            "{{code}}": {
                '{code="OK"}': 3,
                '{code="RESOURCE_EXHAUSTED"}': 1,
                '{code="CANCELLED"}': 1,
            }
        },
    ),
    "Running": ("short", {"{{pod}}": {'{pod="o-0"}': 3, '{pod="o-1"}': 5}}),
    "Time to first token": ("s", P50_P95),
    "Duration": ("s", P50_P95),
    "Output tokens": ("short", {"tokens": {"{}": 30}}),
    "Time between tokens": ("s", P50_P95),
    "Network time": (
        "s",
        {
            "{{rpc}} p50": {'{rpc="Verify"}': 0.1, '{rpc="Draft"}': 0.0075},
            "{{rpc}} p95": {'{rpc="Verify"}': 0.5, '{rpc="Draft"}': 0.0098},
        },
    ),
    "Targets per stream": ("short", {"mean": {"{}": 3.5}}),
    "Speed-up over plain decoding": ("none", {"{{strategy}}": {'{strategy="dsi"}': 3}}),
    "Acceptance rate": ("percentunit", {"accepted": {"{}": 0.75}}),
    "Accepted by position": (
        "short",
        {"{{position}}": {'{position="0"}': 3, '{position="1"}': 0.5}},
    ),
    "Targets' useless work": ("short", {"{{reason}}": {'{reason="rejected"}': 2}}),
    "Cancelled calls": ("short", {"{{reason}}": {'{reason="deadline"}': 3}}),
    "Token trees": (
        "short",
        {
            "judged": {"{}": 11},
            "became output": {"{}": 3},
            "corrections found ahead": {"{}": 1},
        },
    ),
    "Targets: wanted and present, by pool": (
        "short",
        {
            "wanted": {"{}": 8},
            "wanted without limits": {"{}": 11},
            "there: {{paceline_pool}}": {'{paceline_pool="a"}': 1, '{paceline_pool="b"}': 2},
        },
    ),
    "Time in a queue": (
        "s",
        {
            "{{role}} p50": {TARGET: 0.1, DRAFTER: 0.0075},
            "{{role}} p95": {TARGET: 0.5, DRAFTER: 0.0098},
        },
    ),
    "Time of a forward": (
        "s",
        {
            "{{role}} {{phase}}": {
                '{phase="verify", role="target"}': 0.1,
                '{phase="draft", role="drafter"}': 0.0075,
            }
        },
    ),
    "Forwards": ("short", {"{{role}}": {TARGET: 15}, "{{role}}, given up": {TARGET: 1}}),
    "Waiting and running": (
        "short",
        {"{{role}} waiting": {TARGET: 7, DRAFTER: 2}, "{{role}} running": {TARGET: 2}},
    ),
    "Sessions": ("short", {"{{role}}": {TARGET: 10, DRAFTER: 7}}),
    "Reserved memory": ("percentunit", {"{{pod}}": {ALL_OF_T_0: 0.5}}),
    "Refused by model servers": ("short", {"{{role}}": {TARGET: 2}}),
    "Servers by standing": (
        "short",
        {
            "{{role}} {{standing}}": {
                '{role="target", standing="used"}': 2,
                '{role="target", standing="other_dtype"}': 1,
            }
        },
    ),
    "Repairs": ("short", {"{{kind}}": {'{kind="target_lost"}': 3}}),
    "Failed calls": (
        "short",
        {
            "{{code}} {{reason}}": {
                '{code="RESOURCE_EXHAUSTED", reason="OVERLOADED"}': 1,
                '{code="ABORTED", reason="STALE_CALL"}': 3,
            }
        },
    ),
    "Sessions ended by their lease": ("short", {"{{role}}": {TARGET: 2}}),
    "HTTP answers by status": ("reqps", {"{{status}}": {'{status="200"}': 3, '{status="503"}': 1}}),
}


def test_every_panel_is_looked_at_and_none_twice():
    assert list(SHOWN) == list(PANELS)


@pytest.mark.parametrize("title", SHOWN)
def test_a_panel_has_the_unit_of_what_it_draws_and_draws_from_zero(title):
    defaults = PANELS[title]["fieldConfig"]["defaults"]
    assert (defaults["unit"], defaults["min"]) == (SHOWN[title][0], 0)


@pytest.mark.parametrize("title", SHOWN)
def test_a_legend_names_what_tells_the_lines_apart(title):
    for legend, lines in SHOWN[title][1].items():
        named = re.findall(r"\{\{(\w+)\}\}", legend)
        assert len({tuple(_label(line, name) for name in named) for line in lines}) == len(lines)


def _label(line, name):
    return re.search(rf'\b{name}="([^"]*)"', line)[1]


def test_a_panel_draws_what_its_title_says(promtool, tmp_path):
    tests = []
    for title, (_, lines) in SHOWN.items():
        targets = PANELS[title]["targets"]
        assert [it["legendFormat"] for it in targets] == list(lines), title
        for target in targets:
            expected = lines[target["legendFormat"]]
            samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
            tests.append(
                {"expr": filled(target["expr"]), "eval_time": "30m", "exp_samples": samples}
            )
    promtool = Promtool(promtool, tmp_path)
    assert not promtool.complaints([(WORLD, {"promql_expr_test": tests})])


def filled(expression):
    """Fill Grafana's variables in; rounded, since promtool compares exactly."""
    for variable, value in {"$__rate_interval": "5m", "$namespace": ".*", "$job": ".*"}.items():
        expression = expression.replace(variable, value)
    if expression.startswith("paceline_"):
        return expression
    return f"round({expression}, 0.0001)"
