"""Discovery against an API over real HTTP, and against what a real API server once answered."""

from __future__ import annotations

import asyncio
import json
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import trustme
from prometheus_client import CollectorRegistry

from paceline_orchestrator.fleet.discovery import Role, Service, kubernetes, list_watch
from paceline_orchestrator.fleet.discovery.kubernetes import ClusterApi, KubernetesDiscovery
from paceline_orchestrator.fleet.discovery.list_watch import ApiRefusalError, ListWatch
from paceline_orchestrator.fleet.discovery.metrics import DiscoveryMetrics, WatchMetrics
from paceline_orchestrator.fleet.discovery.slices import read_slices
from support.fake_kubernetes import TOKEN, FakeKubernetes, Pod
from support.waiting import until

RECORDED = Path(__file__).parent / "recorded"
TARGETS = Service("target", Role.TARGET)


class View:
    """What discovery says, followed on a task."""

    def __init__(self, discovery, registry):
        self._discovery = discovery
        self._registry = registry
        self.endpoints = None
        self.change_count = 0

    async def follow(self):
        async for endpoints in self._discovery.endpoints():
            self.endpoints = endpoints
            self.change_count += 1

    def metric(self, name, **labels):
        return self._registry.get_sample_value(name, {"of": "models", **labels}) or 0

    def states(self):
        return {it.name: it.availability.name for it in self.endpoints or ()}

    async def until(self, **states):
        what = f"discovery says {states}, and not {self.states()}"
        await until(lambda: self.states() == states, what=what)


@pytest.fixture
def api(tmp_path, monkeypatch):
    with FakeKubernetes() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        yield server


@asynccontextmanager
async def following(*services):
    registry = CollectorRegistry()
    metrics = WatchMetrics(DiscoveryMetrics(registry), of="models")
    view = View(KubernetesDiscovery(services or [TARGETS], metrics=metrics), registry)
    task = asyncio.create_task(view.follow())
    try:
        yield view
    finally:
        task.cancel()
        await asyncio.wait((task,))


def pod(name, **state):
    return Pod(name, "10.0.0.1", 50051, **state)


async def test_pods_come_get_ready_terminate_and_go(api):
    one, other = pod("one"), pod("other", ready=False)
    async with following() as view:
        await view.until()
        api.publish("target", [one])
        await view.until(one="READY")
        api.publish("target", [one, other])
        await view.until(one="READY", other="NOT_READY")
        other.ready, one.terminating = True, True
        api.publish("target", [one, other])
        await view.until(one="TERMINATING", other="READY")
        api.publish("target", [other])
        await view.until(other="READY")
        api.delete("target-abcde")
        await view.until()
    assert view.metric("paceline_discovery_relists_total") == 1


async def test_all_slices_of_all_services_are_one_view_and_strangers_are_none(api):
    api.publish("target", [pod("one")])
    api.publish("target", [pod("other")], name="target-second")
    api.publish("drafter", [pod("small")])
    api.publish("stranger", [pod("no")])
    async with following(TARGETS, Service("drafter", Role.DRAFTER)) as view:
        await view.until(one="READY", other="READY", small="READY")
        api.publish("stranger", [])
        api.delete("target-second")
        await view.until(one="READY", small="READY")
        assert {it.name: it.role for it in view.endpoints} == {"one": "target", "small": "drafter"}


async def test_a_long_list_is_read_in_pages(api, monkeypatch):
    monkeypatch.setattr(kubernetes, "_PAGE_SLICES", 2)
    for number in range(5):
        api.publish("target", [pod(f"pod-{number}")], name=f"target-{number}")
    async with following() as view:
        await view.until(**{f"pod-{number}": "READY" for number in range(5)})
        api.delete("target-3")
        await view.until(**{f"pod-{number}": "READY" for number in (0, 1, 2, 4)})
    lists = [it for it in api.requests if it.get("watch") != "true"]
    assert [it["limit"] for it in lists] == ["2"] * 3
    assert ["continue" in it for it in lists] == [False, True, True]
    assert view.metric("paceline_discovery_relists_total") == 1


@pytest.mark.parametrize(
    ("limit", "most", "words"),
    [
        ("_MOST_LIST_BYTES", 1500, "a list of more than 1500 bytes"),
        ("MOST_OBJECTS", 3, "more than 3 EndpointSlices"),
    ],
)
async def test_a_list_beyond_its_limit_is_not_read_and_what_is_known_stays(
    api, monkeypatch, caplog, limit, most, words
):
    monkeypatch.setattr(kubernetes, "_PAGE_SLICES", 2)
    for module in (kubernetes, list_watch):
        monkeypatch.setattr(module, limit, most, raising=False)
    for number in range(2):
        api.publish("target", [pod(f"pod-{number}")], name=f"target-{number}")
    async with following() as view:
        await view.until(**{"pod-0": "READY", "pod-1": "READY"})
        # Its watch is broken, and what has happened meanwhile is forgotten: it lists anew.
        api.stop()
        for number in range(2, 8):
            api.publish("target", [pod(f"pod-{number}")], name=f"target-{number}")
        api.forget()
        api.start()
        await until(lambda: words in caplog.text, what="the log says so")
        assert view.states() == {"pod-0": "READY", "pod-1": "READY"}
        for number in range(1, 8):
            api.delete(f"target-{number}")
        await view.until(**{"pod-0": "READY"})


async def test_a_watch_beyond_the_limit_is_given_up_and_what_is_known_stays(
    api, monkeypatch, caplog
):
    for module in (kubernetes, list_watch):
        monkeypatch.setattr(module, "MOST_OBJECTS", 2)
    api.publish("target", [pod("pod-0")], name="target-0")
    async with following() as view:
        await view.until(**{"pod-0": "READY"})
        for number in (1, 2):
            api.publish("target", [pod(f"pod-{number}")], name=f"target-{number}")
        await until(lambda: "more than 2 EndpointSlices" in caplog.text, what="the log says so")
        assert view.states() == {"pod-0": "READY", "pod-1": "READY"}
        api.delete("target-0")
        await view.until(**{"pod-1": "READY", "pod-2": "READY"})


async def test_a_pod_that_moves_between_slices_never_vanishes(api):
    moving = pod("one")
    api.publish("target", [moving])
    async with following() as view:
        await view.until(one="READY")
        api.publish("target", [moving], name="target-second")
        api.delete("target-abcde")
        api.publish("target", [moving, pod("last")], name="target-second")
        await view.until(one="READY", last="READY")
    assert view.change_count == 2


async def test_a_broken_watch_goes_on_where_it_was(api):
    async with following() as view:
        for name in ("a", "b", "c"):
            await until(lambda: api.watch_count, what="it watches")
            api.cut()
            api.publish("target", [pod(name)])
            await view.until(**{name: "READY"})
    assert view.metric("paceline_discovery_relists_total") == 1
    assert view.metric("paceline_discovery_failures_total", reason="ConnectionError") >= 3


async def test_a_connection_that_breaks_in_the_middle_of_a_stream_loses_no_event(api):
    async with following() as view:
        await until(lambda: api.watch_count, what="it watches")
        api.faults.append("cut")
        api.cut()
        await until(lambda: api.watch_count, what="it watches again")
        for name in ("a", "b", "c"):
            api.publish("target", [pod(name)])
        await view.until(c="READY")


@pytest.mark.parametrize("as_status", [False, True])
async def test_a_history_that_is_gone_is_listed_anew_and_compared(api, as_status):
    api.gone_status = as_status
    api.publish("target", [pod("one"), pod("two")])
    async with following() as view:
        await view.until(one="READY", two="READY")
        await until(lambda: api.watch_count, what="it watches")
        api.stop()
        api.publish("target", [pod("two"), pod("three")])
        api.forget()
        api.start()
        await view.until(two="READY", three="READY")
    assert view.metric("paceline_discovery_relists_total") == 2
    assert view.metric("paceline_discovery_failures_total", reason="410") == 0


async def test_bookmarks_spare_a_list_after_the_history_was_forgotten(api):
    async with following() as view:
        await until(lambda: api.watch_count, what="it watches")
        api.forget()
        api.bookmark()
        api.end_watches()
        api.publish("target", [pod("one")])
        await view.until(one="READY")
    assert view.metric("paceline_discovery_relists_total") == 1


@pytest.mark.parametrize("fault", [401, 403, 429, 500, 503, "garbage", "nested"])
async def test_an_api_that_refuses_is_asked_again(api, fault, caplog):
    api.faults += [fault, fault]
    api.publish("target", [pod("one")])
    async with following() as view:
        await view.until(one="READY")
    reason = str(fault) if isinstance(fault, int) else "refused"
    assert view.metric("paceline_discovery_failures_total", reason=reason) == 2
    if fault == 403:
        assert "endpointslices" in caplog.text


async def test_the_last_view_survives_an_outage_of_the_api(api):
    api.publish("target", [pod("one")])
    async with following() as view:
        await view.until(one="READY")
        await until(lambda: api.watch_count, what="it watches")
        api.stop()
        await until(
            lambda: view.metric("paceline_discovery_failures_total", reason="ConnectionError") >= 3,
            what="it has tried again",
        )
        assert view.states() == {"one": "READY"}
        assert view.metric("paceline_discovery_last_event_age_seconds") > 0
        api.start()
        api.publish("target", [pod("two")])
        await view.until(two="READY")


async def test_an_api_that_never_answers_is_given_up_and_asked_again(api, monkeypatch):
    monkeypatch.setattr("paceline_orchestrator.fleet.discovery.kubernetes._ANSWER_SECONDS", 0.2)
    api.publish("target", [pod("one")])
    api.faults.append("slow")
    async with following() as view:
        await view.until(one="READY")
    assert view.metric("paceline_discovery_failures_total", reason="TimeoutError") >= 1


async def test_watches_end_and_begin_again_without_a_list(api):
    api.watch_seconds = 0.05
    async with following() as view:
        await until(lambda: len(api.requests) > 4, what="it has watched again")
        api.publish("target", [pod("one")])
        await view.until(one="READY")


async def test_it_asks_for_its_services_only_and_for_bookmarks_and_an_end(api):
    async with following(TARGETS, Service("drafter", Role.DRAFTER)):
        await until(lambda: len(api.requests) > 1, what="it watches")
    listed, watched = api.requests[:2]
    assert listed["labelSelector"] == "kubernetes.io/service-name in (target,drafter)"
    assert "watch" not in listed
    assert watched["labelSelector"] == listed["labelSelector"]
    assert watched["allowWatchBookmarks"].lower() == "true"
    assert 30 <= int(watched["timeoutSeconds"]) <= 60
    assert watched["resourceVersion"]


async def test_without_a_way_to_the_api_it_goes_on_trying(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    async with following() as view:
        await until(lambda: "no way to reach it" in caplog.text, what="it says so")
        assert view.endpoints is None


def in_seconds(seconds):
    return format_datetime(datetime.now(UTC) + timedelta(seconds=seconds), usegmt=True)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [
        ("", 0, 0),
        ("3", 3, 3),
        (" 3 ", 3, 3),
        ("1000000", 60, 60),
        ("soon", 0, 0),
        ("-3", 0, 0),
        ("1.5", 0, 0),
        ("\u0663", 0, 0),
        pytest.param(in_seconds(-30), 0, 0, id="half a minute ago"),
        ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0),
        pytest.param(in_seconds(86_400), 60, 60, id="in a day"),
    ],
)
@pytest.mark.parametrize("what", ["list", "watch"])
async def test_a_refusal_says_when_to_come_again(api, status, retry_after, least, most, what):
    api.faults.append(status)
    api.retry_after = retry_after
    cluster = ClusterApi(["target"])
    try:
        with pytest.raises(ApiRefusalError) as refused:
            await (cluster.list() if what == "list" else anext(cluster.watch("1", seconds=30)))
    finally:
        await cluster.close()
    assert refused.value.code == status
    assert least <= refused.value.retry_after_seconds <= most


async def test_a_date_to_come_again_is_so_many_seconds_from_now(api):
    api.faults.append(503)
    api.retry_after = in_seconds(50)
    cluster = ClusterApi(["target"])
    try:
        with pytest.raises(ApiRefusalError) as refused:
            await cluster.list()
    finally:
        await cluster.close()
    assert 0 < refused.value.retry_after_seconds <= 50


async def test_an_event_that_is_cut_in_the_middle_is_heard_from_the_next_watch(api):
    async with following() as view:
        await until(lambda: api.watch_count, what="it watches")
        api.faults.append("half")
        api.cut()
        await until(lambda: api.watch_count, what="it watches again")
        api.publish("target", [pod("one")])
        await view.until(one="READY")
    assert view.metric("paceline_discovery_relists_total") == 1
    assert view.metric("paceline_discovery_failures_total", reason="ConnectionError") >= 1


async def test_a_slice_of_a_thousand_pods_is_one_event_like_any_other(api):
    many = [Pod(f"pod-{n}", f"10.0.{n // 250}.{n % 250}", 50051) for n in range(1000)]
    async with following() as view:
        await until(lambda: api.watch_count, what="it watches")
        api.publish("target", many)
        await until(lambda: len(view.endpoints or ()) == 1000, what="all of them are seen")
    assert view.metric("paceline_discovery_relists_total") == 1


async def test_who_is_not_known_any_more_reads_anew_who_it_is(api, tmp_path):
    async with following() as view:
        await until(lambda: api.watch_count, what="it watches")
        api.token = "the next one"
        api.cut()
        reason = {"reason": "401"}
        await until(
            lambda: view.metric("paceline_discovery_failures_total", **reason) >= 1,
            what="it is refused",
        )
        api.kubeconfig(tmp_path / "kubeconfig")
        api.publish("target", [pod("one")])
        await view.until(one="READY")
    assert view.metric("paceline_discovery_relists_total") <= 2


async def test_in_a_pod_it_is_its_service_account_over_tls(monkeypatch, tmp_path):
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "namespace").write_text("paceline\n")
    files = "kubernetes.aio.config.incluster_config.SERVICE_{}_FILENAME"
    monkeypatch.setattr(files.format("TOKEN"), str(tmp_path / "token"))
    monkeypatch.setattr(files.format("CERT"), str(tmp_path / "ca.crt"))
    monkeypatch.setattr(
        "paceline_orchestrator.fleet.discovery.kubernetes._NAMESPACE_FILE", tmp_path / "namespace"
    )
    with FakeKubernetes(ssl_context=context) as api:
        monkeypatch.delenv("KUBECONFIG", raising=False)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.publish("target", [pod("one")])
        async with following() as view:
            await view.until(one="READY")


# --- what a real API server (1.36) answered: 1 -> 3 -> 1 replicas ------------------------------


class Recording:
    """An API that answers what was recorded, then nothing for ever: then it is over."""

    def __init__(self, *watches):
        self.watches = list(watches)
        self.list_count = 0
        self.over = asyncio.Event()

    async def list(self):
        self.list_count += 1
        return json.loads((RECORDED / "list.json").read_text())

    async def watch(self, version, *, seconds):
        assert version.isdecimal()
        if not self.watches:
            self.over.set()
            await asyncio.Event().wait()
        for line in (RECORDED / self.watches.pop(0)).read_text().splitlines():
            yield json.loads(line)


async def views(recording):
    """Return the availabilities of each view, and how often it slept."""
    registry = CollectorRegistry()
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    metrics = WatchMetrics(DiscoveryMetrics(registry), of="models")
    list_watch = ListWatch(recording, metrics=metrics, sleep=sleep)
    seen = []

    async def follow():
        services = [Service("r-paceline-target", Role.TARGET)]
        async for slices in list_watch.snapshots():
            found = read_slices(slices, services=services)
            seen.append(sorted(it.availability.name for it in found))

    following = asyncio.create_task(follow())
    await recording.over.wait()
    following.cancel()
    await asyncio.wait((following,))
    return seen, pauses


async def test_a_recorded_scaling_is_read_as_it_happened():
    seen, pauses = await views(Recording("watch_scale_1_3_1.jsonl"))
    assert seen[0] == ["READY"]
    assert ["READY", "READY", "READY"] in seen
    assert ["READY", "TERMINATING", "TERMINATING"] in seen
    assert seen[-1] == ["READY"]
    assert not pauses


async def test_a_recorded_410_makes_it_list_again():
    recording = Recording("watch_410.jsonl", "watch_scale_1_3_1.jsonl")
    seen, pauses = await views(recording)
    assert recording.list_count == 2
    assert len(pauses) == 1
    assert seen[-1] == ["READY"]
