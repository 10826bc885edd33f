"""What a network does to the way to one server costs time, and never a token."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import grpc
import pytest

from paceline.errors import OverloadedError
from support.links import linked_system
from support.streams import PROMPT, disturbed
from support.system import simulated_model
from support.waiting import eventually

pytestmark = pytest.mark.long

TOKENS = 120
STRATEGIES = ("autoregressive", "speculative", "distributed")
SPECULATING = STRATEGIES[1:]
WORK = {"target": ("Verify", "Decode"), "drafter": ("Draft",)}
# Time enough for whatever is lost to be noticed and survived, on a busy machine.
PATIENCE_SECONDS = 60.0
FAR_SECONDS = 0.06  # there and back, as between two cities


@pytest.fixture(scope="module")
def linked():
    drafter = simulated_model("drafter", seconds=0.001, simulated_acceptance_rate=0.8)
    targets = [simulated_model("target", index) for index in range(2)]
    with linked_system(drafters=[drafter], targets=targets) as whole:
        yield whole


@pytest.fixture
def links(linked):
    """The links by role, all well before and after the test."""
    system, links = linked
    system.wait_until_whole()
    yield {role: [link for name, link in links.items() if name.startswith(role)] for role in WORK}
    for link in links.values():
        link.heal()
    system.wait_until_whole()


@pytest.fixture(scope="module")
def text(linked):
    with linked[0].client() as client:
        options = {"max_tokens": TOKENS, "strategy": "autoregressive"}
        return client.generate(PROMPT, **options).collect().token_ids


def is_at_work(link, role):
    return any(link.calls.running[method] for method in WORK[role])


def at_work(links, role):
    """Return a link with a call just now: one whose fault matters."""
    return eventually(
        lambda: next((it for it in links[role] if is_at_work(it, role)), None),
        what="a server has a call",
    )


def streams(system, strategies, strike):
    """Decode with all strategies at once; strike once each has begun."""
    under_way = threading.Barrier(len(strategies), action=strike, timeout=PATIENCE_SECONDS)

    def stream(strategy):
        options = {"targets": 2, "lookahead": 4, "timeout": PATIENCE_SECONDS}
        with system.client() as client:
            generation = client.generate(PROMPT, max_tokens=TOKENS, strategy=strategy, **options)
            return disturbed(generation, under_way.wait, after=20)

    with ThreadPoolExecutor(len(strategies)) as threads:
        return list(threads.map(stream, strategies))


def survive(fault, role, linked, links, text):
    """Strike one server's link while streams of every strategy that uses its role run."""

    def strike():
        fault(at_work(links, role))

    before = sum(link.hits for link in links[role])
    strategies = STRATEGIES if role == "target" else SPECULATING
    done = streams(linked[0], strategies, strike)
    assert [each.token_ids for each in done] == [text] * len(strategies)
    assert sum(link.hits for link in links[role]) > before, "the fault met nothing"


CONNECTION_FAULTS = {
    "delay": lambda link: link.connections.delay(round_trip_seconds=FAR_SECONDS),
    "stall": lambda link: link.connections.stall(),
    "half open up": lambda link: link.connections.stall("up"),
    "half open down": lambda link: link.connections.stall("down"),
    "cut": lambda link: link.connections.cut("down"),
    "cut up": lambda link: link.connections.cut("up"),
    "reset": lambda link: link.connections.reset(),
    "black hole": lambda link: link.connections.black_hole(),
}


@pytest.mark.parametrize("role", WORK)
@pytest.mark.parametrize("fault", CONNECTION_FAULTS)
def test_a_bad_connection_to_one_server_costs_no_token(fault, role, linked, links, text):
    survive(CONNECTION_FAULTS[fault], role, linked, links, text)


def failing(how):
    return lambda link: link.calls.fail(*chain(*WORK.values()), how=how)


# Each other status: test_lying_conversations.py.
CALL_FAULTS = {
    "slow": lambda link: link.calls.delay(*chain(*WORK.values()), seconds=FAR_SECONDS / 2),
    "internal": failing(grpc.StatusCode.INTERNAL),
    "overloaded": failing(OverloadedError("full", retry_after_seconds=0.5)),
}


@pytest.mark.parametrize("role", WORK)
@pytest.mark.parametrize("fault", CALL_FAULTS)
def test_a_server_whose_work_is_slow_or_fails_costs_no_token(fault, role, linked, links, text):
    survive(CALL_FAULTS[fault], role, linked, links, text)
