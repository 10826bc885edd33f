"""A server that is well by all signs, and does not answer: it costs seconds once, and no token.

Its health, its pings and all other methods go through; only its work hangs, as with a stuck GPU.
"""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from support.links import linked_system
from support.streams import PROMPT
from support.system import simulated_model
from support.waiting import eventually

WORK = {"target": ("Verify", "Decode"), "drafter": ("Draft",)}
CASES = [
    ("distributed", "target"),
    *(
        pytest.param(strategy, role, marks=pytest.mark.long)
        for strategy, role in [
            ("autoregressive", "target"),
            ("speculative", "target"),
            ("auto", "target"),
            ("auto", "drafter"),
            ("speculative", "drafter"),
            ("distributed", "drafter"),
        ]
    ),
]
TOKENS, REQUESTS, CALM_REQUESTS = 16, 100, 10
FORGETTING_SECONDS, MOST_REQUESTS = 1.1, REQUESTS + 20
# What is promised of a reaction; how long this machine takes for the same when all is well comes on
# top of it, several times, since it may be busy.
LONGEST_GAP_SECONDS, BACK_WITHIN_SECONDS, CALM_GAPS = 3.0, 5.0, 10
# A gap like this says that a request waited for the hung server.
FELT_SECONDS = 0.25
LEFT_ALONE_AFTER = 2
# Longer than the first pauses of a server whose calls failed: 0.5 and 1 s.
LEFT_ALONE_SECONDS = 3.0
# A request that hangs ends here, so that the test tells which it was.
GIVEN_UP_SECONDS = 12.0


@pytest.fixture(scope="module")
def linked():
    """One drafter and two targets, of which each can hang; AUTO has use for all of them."""
    drafter = simulated_model("drafter", seconds=0.001, simulated_acceptance_rate=0.8)
    targets = [simulated_model("target", index, seconds=0.008) for index in range(2)]
    with linked_system(drafters=[drafter], targets=targets) as whole:
        yield whole


@pytest.fixture
def system(linked):
    system, links = linked
    system.wait_until_whole()
    yield system
    for link in links.values():
        link.heal()
    system.wait_until_whole()


@pytest.fixture
def links(linked):
    return linked[1]


@pytest.fixture(scope="module")
def text(linked):
    with linked[0].client() as client:
        return client.generate(PROMPT, max_tokens=TOKENS, strategy="autoregressive").collect()


def longest_gap(client, strategy, text):
    """Decode, compare, and return the longest time without a token."""
    options = {"strategy": strategy, "max_tokens": TOKENS, "targets": 2, "lookahead": 3}
    if strategy == "auto":
        options = {"max_tokens": TOKENS}
    generation = client.generate(PROMPT, timeout=GIVEN_UP_SECONDS, **options)
    gaps, before = [], time.monotonic()
    for _ in generation:
        now = time.monotonic()
        gaps.append(now - before)
        before = now
    assert generation.collect().token_ids == text.token_ids
    return max(gaps)


def calm_gap(client, strategy, text):
    return max(longest_gap(client, strategy, text) for _ in range(CALM_REQUESTS))


@contextmanager
def hung(link, role):
    link.calls.hang(*WORK[role])
    try:
        yield
    finally:
        link.calls.heal()


@pytest.mark.parametrize(("strategy", "role"), CASES)
def test_a_hung_server_costs_two_requests_seconds_and_the_others_nothing(
    strategy, role, system, links, text
):
    with system.client() as client:
        calm = CALM_GAPS * calm_gap(client, strategy, text)
        felt = 0

        def met():
            return sum(links[f"{role}-0"].calls.hits[each] for each in WORK[role])

        with hung(links[f"{role}-0"], role):
            for number in range(MOST_REQUESTS):
                if number >= REQUESTS:
                    if met():
                        break
                    # Requests stay with a target that was free a moment ago; then a lot decides.
                    time.sleep(FORGETTING_SECONDS)
                gap = longest_gap(client, strategy, text)
                assert gap <= LONGEST_GAP_SECONDS + calm, f"request {number} waited {gap:.1f} s"
                felt += gap > FELT_SECONDS + calm
                assert felt <= LEFT_ALONE_AFTER, f"request {number} waited {gap:.1f} s, too"
    assert met(), "the fault met nothing"


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_server_that_hung_is_back_when_it_is_well_and_not_before(role, system, links, text):
    link = links[f"{role}-0"]

    def seen_ready():
        servers = client.info().servers
        return next(it.ready for it in servers if it.name == f"{role}-0")

    with system.client() as client:
        calm = calm_gap(client, "speculative", text)
        with hung(link, role):
            eventually(
                lambda: longest_gap(client, "speculative", text) and not seen_ready(),
                what="the hung server is left alone",
            )
            ends = time.monotonic() + LEFT_ALONE_SECONDS
            while time.monotonic() < ends:
                longest_gap(client, "speculative", text)
                assert not seen_ready(), "its health alone brought it back"
        eventually(
            seen_ready,
            what="it is used again",
            within_seconds=BACK_WITHIN_SECONDS + CALM_GAPS * calm,
        )
