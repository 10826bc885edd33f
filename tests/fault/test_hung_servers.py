"""A server that is well by all signs, and does not answer: it costs seconds once, and no token.

Its health, its pings and all other methods go through; only its work hangs, as with a stuck GPU.
How many seconds: tests/unit/orchestrator/test_silent_servers.py, on a clock of its own.
"""

from __future__ import annotations

import time
from contextlib import contextmanager, suppress

import pytest

from paceline.errors import NoTargetError
from support.links import linked_system
from support.streams import PROMPT
from support.system import simulated_model
from support.waiting import eventually

WORK = {"target": ("Verify", "Decode"), "drafter": ("Draft",)}
CASES = [
    ("distributed", "target"),
    ("autoregressive", "target"),
    ("auto", "target"),
    ("auto", "drafter"),
    ("speculative", "drafter"),
]
TOKENS, REQUESTS = 16, 40
FORGETTING_SECONDS, MOST_REQUESTS = 1.1, REQUESTS + 20
LEFT_ALONE_AFTER = 2
# Longer than the first pauses of a server whose calls failed: 0.5 and 1 s.
LEFT_ALONE_SECONDS = 3.0
# A request that hangs ends here, so that the test tells which it was.
GIVEN_UP_SECONDS = 60.0


@pytest.fixture(scope="module")
def linked():
    """One drafter and two targets, of which each can hang.

    A target's forward takes longer than all else, so that AUTO has use for a drafter on a busy
    machine, too.
    """
    drafter = simulated_model("drafter", seconds=0.001, simulated_acceptance_rate=0.8)
    targets = [simulated_model("target", index, seconds=0.02) for index in range(2)]
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


def given_up(client, strategy, text):
    """Decode, compare, and return how many servers it waited for in vain."""
    options = {"strategy": strategy, "max_tokens": TOKENS, "targets": 2, "lookahead": 3}
    if strategy == "auto":
        options = {"max_tokens": TOKENS}
    done = client.generate(PROMPT, timeout=GIVEN_UP_SECONDS, **options).collect()
    assert done.token_ids == text.token_ids
    return done.finished.statistics.fallbacks.get("deadline", 0)


@contextmanager
def hung(link, role):
    link.calls.hang(*WORK[role])
    try:
        yield
    finally:
        link.calls.heal()


@pytest.mark.long  # test_silent_servers.py has it in `make test`
@pytest.mark.parametrize(("strategy", "role"), CASES)
def test_a_hung_server_costs_two_requests_seconds_and_the_others_nothing(
    strategy, role, system, links, text
):
    def met():
        return sum(links[f"{role}-0"].calls.hits[each] for each in WORK[role])

    with system.client() as client, hung(links[f"{role}-0"], role):
        felt = 0
        for number in range(MOST_REQUESTS):
            if number >= REQUESTS:
                if met():
                    break
                # Requests stay with a target that was free a moment ago; then a lot decides.
                time.sleep(FORGETTING_SECONDS)
            met_before = met()
            # On a busy machine one may wait in vain for a server that is well, too.
            felt += given_up(client, strategy, text) > 0 and met() > met_before
            assert felt <= LEFT_ALONE_AFTER, f"request {number} waited, too"
    assert met(), "the fault met nothing"


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_server_that_hung_is_back_when_it_is_well_and_not_before(role, system, links, text):
    def seen_ready():
        servers = client.info().servers
        return next(it.ready for it in servers if it.name == f"{role}-0")

    with system.client() as client:
        with hung(links[f"{role}-0"], role):
            while seen_ready():
                with suppress(NoTargetError):  # on a very busy machine the other one is late, too
                    given_up(client, "speculative", text)
                # Requests stay with a target that was free a moment ago, and may never meet it.
                time.sleep(FORGETTING_SECONDS)
            ends = time.monotonic() + LEFT_ALONE_SECONDS
            while time.monotonic() < ends:
                with suppress(NoTargetError):
                    given_up(client, "speculative", text)
                assert not seen_ready(), "its health alone brought it back"
        eventually(seen_ready, what="it is used again")
