"""Each alert fires just above what its text says, and not just below: Prometheus evaluates it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline_orchestrator.fleet.words import Word
from support.manifests import install, values_of
from support.promtool import Promtool, counter, gauge, histogram

GENERATE = "paceline.v1.OrchestratorService/Generate"
VALUES = values_of("keda.yaml")
MOST = VALUES["autoscaling"]["maxReplicas"]
# Standings for which somebody has to do something; all others take work, or pass.
IDLE_WORDS = tuple(str(word) for word in Word if not word.is_passing)
OTHER_WORDS = ("used", "resting", "loading", "draining")
CODES_THAT_FAIL = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNAVAILABLE")


@dataclass(frozen=True)
class Case:
    """What an alert says of some series.

    Attributes:
        alert: Its name.
        series: See support.promtool.
        says: Its summary; empty: it is quiet.
        labels: Those that it has besides its severity.
        at: After so many minutes.
    """

    alert: str
    series: dict[str, str]
    says: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    at: int = 59


def ends(code, each_minute, reason="", *, method=GENERATE, pod="o-0"):
    return counter(
        "paceline_rpcs_total", each_minute, method=method, code=code, reason=reason, pod=pod
    )


def http(status, each_minute):
    return counter("paceline_http_requests_total", each_minute, status=status, route="/v1")


def repairs(kind, each_minute):
    return counter("paceline_fallbacks_total", each_minute, kind=kind)


def age(name, minutes=0, **labels):
    """Return an age that has grown since the beginning, from so many minutes on."""
    (series,) = gauge(name, 0, **labels)
    return {series: f"{60 * minutes}+60x60"}


def first_tokens(each_minute):
    return histogram("paceline_time_to_first_token_seconds", each_minute)


def queue(each_minute, role="target"):
    return histogram("paceline_queue_seconds", each_minute, role=role)


def judged(drafted, accepted, role="target"):
    name = "paceline_spec_decode_num_{}_tokens_total"
    return counter(name.format("draft"), drafted, role=role) | counter(
        name.format("accepted"), accepted, role=role
    )


def ready(role, *counts):
    series = {}
    for index, count in enumerate(counts):
        series |= gauge("paceline_ready_servers", count, role=role, pod=f"o-{index}")
    return series


def standing(word, *counts, role="target"):
    series = {}
    for index, count in enumerate(counts):
        labels = {"role": role, "standing": word, "pod": f"o-{index}"}
        series |= gauge("paceline_servers", count, **labels)
    return series


def not_used(word, role="target"):
    labels = {"role": role, "standing": word}
    says = f"A {role} that runs gets no work: {word}"
    return Case("PacelineServerNotUsed", standing(word, 0, 1, role=role), says, labels)


def sessions(count, *, running, at_models=0):
    return (
        gauge("paceline_sessions_active", count, role="target")
        | gauge("paceline_num_requests_running", running)
        | gauge("paceline_num_requests_running", at_models, role="target")
    )


NO_TARGET = "No target is ready, so nothing can be decoded"
NO_DRAFTER = "No drafter is ready, so drafts come from the text itself only"
HANGS = "t-0 has a forward that does not end"
ERRORS = "More than one request in a hundred fails"
HTTP_ERRORS = "More than one HTTP request in a hundred fails at the gateways"
DEADLINES = "More than one request in twenty runs out of time"
UNKNOWN = "o-0 refuses more than one call in ten seconds for its key or certificate"
REFUSED = "Requests are refused because there is no room"
FIRST_TOKEN = "One request in twenty waits more than 5 s for its first token"
QUEUE = "One call in twenty waits more than 1 s for a target"
FULL = "A model server has reserved three quarters of its token budget"
ACCEPTANCE = "Fewer than 20 % of the draft tokens are accepted"
REPAIRS = "Orchestrators repair more than one session_lost in ten seconds"
LEFT = "Sessions stay open although no request runs"
STALE = "o-0 has had no news of the model servers for ten minutes"
NOT_SCRAPED = "t-0 is not scraped by Prometheus"
NOT_ASKED = "KEDA has not asked for the number of targets in five minutes"
MORE = f"More targets are wanted than the {MOST} that autoscaling.maxReplicas allows"

POD = {"pod": "o-0"}
OVERDUE, DISCOVERY = (
    "paceline_forward_overdue_seconds",
    "paceline_discovery_last_event_age_seconds",
)
ASKED, WISH = "paceline_scaler_asked_age_seconds", "paceline_desired_verifiers_unlimited"
MEMORY = "paceline_kv_cache_usage_perc"

CASES = [
    Case("PacelineNoTarget", ready("target", 0, 0) | ready("drafter", 2), NO_TARGET),
    Case("PacelineNoTarget", {}, NO_TARGET),
    Case("PacelineNoTarget", ready("target", 0, 1)),
    Case("PacelineNoDrafter", ready("drafter", 0, 0) | ready("target", 2), NO_DRAFTER),
    Case("PacelineNoDrafter", ready("drafter", 1, 0)),
    *(not_used(it) for it in IDLE_WORDS),
    not_used("other_tokenizer", "drafter"),
    *(Case("PacelineServerNotUsed", standing(it, 1, 1)) for it in OTHER_WORDS),
    Case("PacelineServerNotUsed", standing("other_dtype", 0, 0)),
    Case(
        "PacelineServerNotUsed",
        standing("other_dtype", 1),
        "A target that runs gets no work: other_dtype",
        {"role": "target", "standing": "other_dtype"},
        at=11,
    ),
    Case("PacelineServerNotUsed", standing("other_dtype", 1), at=9),
    Case("PacelineForwardHangs", gauge(OVERDUE, 1, pod="t-0"), HANGS, {"pod": "t-0"}),
    Case("PacelineForwardHangs", gauge(OVERDUE, 0, pod="t-0")),
    *(Case("PacelineErrors", ends("OK", 989) | ends(it, 11), ERRORS) for it in CODES_THAT_FAIL),
    *(Case("PacelineErrors", ends("OK", 991) | ends(it, 9)) for it in CODES_THAT_FAIL),
    Case("PacelineErrors", ends("OK", 989) | ends("CANCELLED", 500) | ends("NOT_FOUND", 500)),
    Case("PacelineErrors", ends("OK", 989) | ends("INTERNAL", 500, method="other/Method")),
    *(
        Case("PacelineGatewayErrors", http("200", 989) | http(it, 11), HTTP_ERRORS)
        for it in ("500", "502", "503", "504")
    ),
    Case("PacelineGatewayErrors", http("200", 991) | http("503", 9)),
    Case("PacelineGatewayErrors", http("200", 1) | http("429", 500) | http("499", 500)),
    Case("PacelineDeadlines", ends("OK", 949) | ends("DEADLINE_EXCEEDED", 51), DEADLINES),
    Case("PacelineDeadlines", ends("OK", 951) | ends("DEADLINE_EXCEEDED", 49)),
    Case(
        "PacelineDeadlines", ends("OK", 1) | ends("DEADLINE_EXCEEDED", 500, reason="SLOW_CONSUMER")
    ),
    Case("PacelineUnauthenticated", ends("UNAUTHENTICATED", 7), UNKNOWN, POD),
    Case("PacelineUnauthenticated", ends("PERMISSION_DENIED", 7, method="m"), UNKNOWN, POD),
    Case("PacelineUnauthenticated", ends("UNAUTHENTICATED", 6) | ends("OK", 500)),
    Case(
        "PacelineUnauthenticated",
        ends("UNAUTHENTICATED", 4) | ends("UNAUTHENTICATED", 4, pod="o-1"),
    ),
    Case("PacelineRefusing", ends("RESOURCE_EXHAUSTED", 1, "OVERLOADED"), REFUSED),
    Case("PacelineRefusing", ends("RESOURCE_EXHAUSTED", 1, "CACHE_EXHAUSTED"), REFUSED),
    Case("PacelineRefusing", ends("RESOURCE_EXHAUSTED", 500, "KEY_LIMIT") | ends("OK", 1)),
    Case("PacelineRefusing", ends("RESOURCE_EXHAUSTED", 0, "OVERLOADED")),
    Case("PacelineSlowFirstToken", first_tokens({0.1: 94, 10.0: 6}), FIRST_TOKEN),
    Case("PacelineSlowFirstToken", first_tokens({5.0: 96, 60.0: 4})),
    Case("PacelineTargetsQueue", queue({0.1: 94, 2.5: 6}), QUEUE),
    Case("PacelineTargetsQueue", queue({1.0: 96, 60.0: 4})),
    Case("PacelineTargetsQueue", queue({1.0: 1}) | queue({60.0: 9}, role="drafter")),
    Case("PacelineTargetMemoryFull", gauge(MEMORY, 0.76, pod="t-0"), FULL),
    Case("PacelineTargetMemoryFull", gauge(MEMORY, 0.74, pod="t-0")),
    Case("PacelineLowAcceptance", judged(100, 19), ACCEPTANCE),
    Case("PacelineLowAcceptance", judged(100, 21)),
    Case("PacelineLowAcceptance", judged(100, 21) | judged(100, 0, role="drafter")),
    Case("PacelineRepairs", repairs("session_lost", 7), REPAIRS, {"kind": "session_lost"}),
    Case("PacelineRepairs", repairs("session_lost", 6)),
    Case("PacelineRepairs", repairs("session_lost", 4) | repairs("target_lost", 4)),
    Case("PacelineRepairs", repairs("load_changed", 600)),
    Case("PacelineSessionsLeft", sessions(1, running=0, at_models=3), LEFT),
    Case("PacelineSessionsLeft", sessions(1, running=1)),
    Case("PacelineSessionsLeft", sessions(0, running=0)),
    Case("PacelineDiscoveryStale", age(DISCOVERY, pod="o-0"), STALE, POD, at=11),
    Case("PacelineDiscoveryStale", age(DISCOVERY, pod="o-0"), at=9),
    Case("PacelineNotScraped", gauge("up", 0, pod="t-0"), NOT_SCRAPED, {"pod": "t-0"}),
    Case("PacelineNotScraped", gauge("up", 1, pod="t-0")),
    Case("PacelineScalerNotAsked", age(ASKED, pod="o-0") | age(ASKED, 5), NOT_ASKED, at=6),
    Case("PacelineScalerNotAsked", age(ASKED, pod="o-0"), at=4),
    Case("PacelineScalerNotAsked", age(ASKED, pod="o-0") | gauge(ASKED, 5, pod="o-1")),
    Case("PacelineWantsMoreTargets", gauge(WISH, MOST + 1), MORE),
    Case("PacelineWantsMoreTargets", gauge(WISH, MOST)),
]


@pytest.fixture(scope="module")
def alerting(promtool, tmp_path_factory):
    (rule,) = install(VALUES).of("PrometheusRule")
    return Promtool(promtool, tmp_path_factory.mktemp("alerts"), rule["spec"]["groups"])


@pytest.mark.parametrize("alert", sorted({it.alert for it in CASES}))
def test_an_alert_fires_just_above_what_it_says_and_not_just_below(alerting, alert):
    (rule,) = (it for each in alerting.rules for it in each["rules"] if it["alert"] == alert)
    cases = [case for case in CASES if case.alert == alert]
    assert not alerting.complaints([(case.series, told(case, rule)) for case in cases])


def told(case, rule):
    expected = {
        "exp_labels": {**rule["labels"], **case.labels},
        "exp_annotations": {**rule["annotations"], "summary": case.says},
    }
    test = {
        "eval_time": f"{case.at}m",
        "alertname": case.alert,
        "exp_alerts": [expected] if case.says else [],
    }
    return {"alert_rule_test": [test]}


def test_every_alert_is_seen_to_fire_and_to_be_quiet(alerting):
    every = {it["alert"] for group in alerting.rules for it in group["rules"]}
    assert {it.alert for it in CASES if it.says} == every
    assert {it.alert for it in CASES if not it.says} == every


def test_every_word_on_a_server_is_one_to_be_woken_up_for_or_not():
    assert {*IDLE_WORDS, *OTHER_WORDS} == set(Word)


def test_where_there_shall_be_no_drafter_none_is_missed():
    (rule,) = install({**VALUES, "drafter": {"enabled": False}}).of("PrometheusRule")
    names = [it["alert"] for group in rule["spec"]["groups"] for it in group["rules"]]
    assert "PacelineNoDrafter" not in names
    assert "PacelineNoTarget" in names
