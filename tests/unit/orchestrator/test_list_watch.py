"""What an API server may answer, one answer after another, and what is asked next, and when."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from paceline_orchestrator.fleet.discovery.list_watch import ApiRefusalError, ListWatch
from paceline_orchestrator.fleet.discovery.metrics import DiscoveryMetrics, WatchMetrics


def a_slice(uid, version="7"):
    return {"metadata": {"uid": uid, "resourceVersion": version}}


def a_list(*uids, version="5"):
    return {"metadata": {"resourceVersion": version}, "items": [a_slice(it) for it in uids]}


def event(kind, each):
    return {"type": kind, "object": each}


def refused(**status):
    return event("ERROR", {"kind": "Status", "status": "Failure", **status})


class Scripted:
    """An API that answers as told, in turn; then it is over.

    A list is an answer to `list`, a tuple one to `watch`: its events, and at last perhaps what it
    breaks with. An exception refuses whatever is asked.
    """

    def __init__(self, *answers):
        self._answers = list(answers)
        self.asked = []
        self.over = asyncio.Event()

    async def _next(self, what):
        if not self._answers:
            self.over.set()
            await asyncio.Event().wait()
        self.asked.append(what)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def list(self):
        answer = await self._next("list")
        assert isinstance(answer, dict), "a watch was expected"
        return answer

    async def watch(self, version, *, seconds):
        answer = await self._next(version)
        assert isinstance(answer, tuple), "a list was expected"
        for each in answer:
            if isinstance(each, Exception):
                raise each
            yield each


async def play(*answers):
    """Return what was asked (list, or a watch's version), the views, and the pauses."""
    api, pauses, views = Scripted(*answers), [], []

    async def sleep(seconds):
        pauses.append(seconds)

    metrics = WatchMetrics(DiscoveryMetrics(CollectorRegistry()), of="models")
    following = ListWatch(api, metrics=metrics, sleep=sleep)

    async def follow():
        async for each in following.snapshots():
            views.append(names := [it["metadata"]["uid"] for it in each])
            names.sort()

    task = asyncio.create_task(follow())
    over = asyncio.create_task(api.over.wait())
    await asyncio.wait((task, over), return_when=asyncio.FIRST_COMPLETED)
    for each in (task, over):
        each.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return api.asked, views, pauses


@pytest.mark.parametrize("code", [401, 429, 503])
async def test_an_api_that_cannot_answer_a_watch_is_asked_for_that_watch_again_and_no_list(code):
    busy = ApiRefusalError("busy", code=code, retry_after_seconds=7.0)
    asked, views, pauses = await play(
        a_list("a"), busy, busy, (event("ADDED", a_slice("b", "8")),), ()
    )
    assert asked == ["list", "5", "5", "5", "8"]
    assert views == [["a"], ["a", "b"]]
    assert pauses[:2] == [7.0, 7.0]


@pytest.mark.parametrize("code", [0, 400, 403, 404, 410, 500, 504])
async def test_an_api_that_refuses_a_watch_otherwise_is_asked_for_a_list(code):
    asked, views, _ = await play(a_list("a"), ApiRefusalError("no", code=code), a_list("b"))
    assert asked == ["list", "5", "list"]
    assert views == [["a"], ["b"]]


async def test_a_version_that_is_always_refused_is_given_up_in_the_end():
    busy = ApiRefusalError("busy", code=503)
    asked, views, _ = await play(a_list("a"), *[busy] * 6, a_list("b"))
    assert asked == ["list", *["5"] * 6, "list"]
    assert views == [["a"], ["b"]]


@pytest.mark.parametrize("code", [429, 503])
@pytest.mark.parametrize(
    ("details", "least"),
    [
        ({"retryAfterSeconds": 9}, 9.0),
        ({"retryAfterSeconds": 10**9}, 60.0),
        ({"retryAfterSeconds": -9}, 0.0),
        ({"retryAfterSeconds": "9"}, 0.0),
        ({}, 0.0),
        (None, 0.0),
        ("soon", 0.0),
    ],
)
async def test_a_refusal_in_a_running_watch_says_when_to_come_again(code, details, least):
    status = refused(code=code, message="too much", details=details)
    bookmark = event("BOOKMARK", a_slice("", "6"))
    asked, views, pauses = await play(a_list("a"), (bookmark, status), ())
    assert asked == ["list", "5", "6"]
    assert views == [["a"]]
    assert pauses[0] == least if least else 0 < pauses[0] <= 0.1


async def test_a_version_that_is_gone_in_a_running_watch_is_listed_anew():
    asked, views, pauses = await play(
        a_list("a"),
        (event("ADDED", a_slice("b", "8")), refused(code=410, message="too old")),
        a_list("c", version="20"),
        (),
    )
    assert asked == ["list", "5", "list", "20"]
    assert views == [["a"], ["a", "b"], ["c"]]
    assert pauses[0] <= 0.1


@pytest.mark.parametrize(
    "nonsense",
    [
        event("PLEASED", a_slice("b")),
        {"object": a_slice("b")},
        {"type": "ADDED"},
        event("ADDED", None),
        event("ADDED", ["b"]),
        event("ADDED", {}),
        event("ADDED", {"metadata": "b"}),
        event("ADDED", {"metadata": {"uid": "b"}}),
        event("MODIFIED", {"metadata": {"resourceVersion": "9"}}),
        event("ERROR", "no"),
        refused(code="many", message=None),
    ],
    ids=str,
)
async def test_an_event_that_makes_no_sense_is_answered_with_a_list(nonsense):
    asked, views, pauses = await play(a_list("a"), (nonsense,), a_list("c"))
    assert asked == ["list", "5", "list"]
    assert views[0] == ["a"]
    assert views[-1] == ["c"]
    assert len(pauses) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"metadata": None},
        {"metadata": {}},
        {"metadata": {"resourceVersion": ""}},
        {"metadata": {"resourceVersion": "5"}, "items": [{}]},
        {"metadata": {"resourceVersion": "5"}, "items": ["a"]},
    ],
    ids=str,
)
async def test_a_list_that_makes_no_sense_is_asked_for_again(answer):
    asked, views, pauses = await play(answer, a_list("a"))
    assert asked == ["list", "list"]
    assert views == [["a"]]
    assert len(pauses) == 1


@pytest.mark.parametrize("items", [{"items": []}, {"items": None}, {}])
async def test_an_empty_list_is_nobody_and_takes_away_who_was_there(items):
    gone = ApiRefusalError("gone", code=410)
    empty = {"metadata": {"resourceVersion": "9"}, **items}
    asked, views, _ = await play(a_list("a"), gone, empty, ())
    assert asked == ["list", "5", "list", "9"]
    assert views == [["a"], []]


async def test_a_bookmark_moves_the_version_and_is_no_change():
    bookmark = event("BOOKMARK", {"metadata": {"resourceVersion": "40"}})
    asked, views, _ = await play(a_list("a"), (bookmark,), ())
    assert asked == ["list", "5", "40"]
    assert views == [["a"]]


async def test_a_connection_that_breaks_goes_on_at_the_last_version():
    broken = ConnectionError("cut")
    asked, views, pauses = await play(
        a_list("a"), (event("ADDED", a_slice("b", "8")), broken), (broken,), ()
    )
    assert asked == ["list", "5", "8", "8"]
    assert views == [["a"], ["a", "b"]]
    assert 0 < pauses[0] <= 0.1 < pauses[1] * 2 <= 0.4


async def test_a_watch_that_ends_at_once_over_and_over_is_asked_for_less_and_less_often():
    answers = [each for _ in range(12) for each in (a_list("a"), ())]
    asked, _, pauses = await play(*answers)
    assert len(asked) == 24
    longest = [min(0.1 * 2**index, 10.0) for index in range(len(pauses))]
    assert all(each / 2 <= it <= each for it, each in zip(pauses, longest, strict=True))


async def test_a_watch_that_tells_something_and_ends_at_once_is_asked_for_once_a_second():
    same = (event("BOOKMARK", {"metadata": {"resourceVersion": "6"}}),)
    asked, _, pauses = await play(a_list("a"), same, same, same, same)
    assert asked == ["list", "5", "6", "6", "6"]
    assert len(pauses) == 3
    assert all(0.5 < pause <= 1.0 for pause in pauses)


async def test_what_was_deleted_is_gone_and_what_was_never_there_can_be_deleted():
    asked, views, _ = await play(
        a_list("a", "b"),
        (event("DELETED", a_slice("a", "8")), event("DELETED", a_slice("x", "9"))),
        (),
    )
    assert asked == ["list", "5", "9"]
    assert views == [["a", "b"], ["b"], ["b"]]
