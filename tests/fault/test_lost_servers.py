"""A target or a drafter that dies, hangs or is missing costs time, and never a token.

With every strategy: tests/contract/generate/test_faults.py over fake models,
tests/unit/orchestrator/test_histories.py on virtual time, and test_bad_networks.py.
"""

from __future__ import annotations

import pytest

from paceline.errors import NoTargetError
from support.streams import PROMPT, at_work, disturbed
from support.waiting import eventually

TOKENS = 400
# Time enough for whatever is lost to be noticed and survived, on a busy machine.
PATIENCE_SECONDS = 60.0
# A busy machine may take so long to strike that the stream is over, or does without whom it struck.
ATTEMPTS = 4


def begin(client, strategy):
    """Ask for the text; nothing is sent yet."""
    options = {"targets": 2, "lookahead": 4, "timeout": PATIENCE_SECONDS}
    return client.generate(PROMPT, strategy=strategy, max_tokens=TOKENS, **options)


def kill_all(servers):
    """At once: a request under which servers end one after the other is taken for the cause."""
    for server in servers:
        server.kill(waits=False)
    for server in servers:
        server.wait(60)


def count(completion, *kinds):
    fallbacks = completion.finished.statistics.fallbacks
    return sum(fallbacks.get(kind, 0) for kind in kinds)


def survive(whole, strategy, strike, *, text, felt_as):
    """Strike in mid-stream, until a stream has felt it; each has the text."""
    for _ in range(ATTEMPTS):
        with whole.client() as client:
            done = disturbed(begin(client, strategy), strike, after=20)
        assert done.token_ids == text
        if count(done, *felt_as):
            return
        whole.mend()
    pytest.fail(f"none of {ATTEMPTS} streams has felt it")


@pytest.mark.parametrize("strategy", ["autoregressive", "distributed"])
def test_a_target_killed_mid_stream_costs_no_token(strategy, whole, text):
    def strike():
        at_work(whole, whole.targets).kill()

    survive(whole, strategy, strike, text=text, felt_as=["target_lost"])


def test_a_drafter_killed_mid_stream_costs_no_token(whole, text):
    def strike():
        at_work(whole, whole.drafters).kill()

    survive(whole, "speculative", strike, text=text, felt_as=["drafter_lost"])


@pytest.mark.parametrize("strategy", ["autoregressive", "speculative"])
def test_a_frozen_target_costs_no_token(strategy, whole, text):
    def strike():
        at_work(whole, whole.targets).freeze()

    survive(whole, strategy, strike, text=text, felt_as=["target_lost", "deadline"])


def test_a_frozen_drafter_costs_no_token(whole, text):
    def strike():
        at_work(whole, whole.drafters).freeze()

    survive(whole, "distributed", strike, text=text, felt_as=["drafter_lost", "deadline"])


def test_without_any_drafter_a_stream_goes_on_with_its_text_alone(whole, text):
    strategy = "distributed"

    def strike():
        kill_all(whole.drafters)

    survive(whole, strategy, strike, text=text, felt_as=["no_drafter"])
    with whole.client() as client:
        eventually(
            lambda: not any(it.ready for it in client.info().servers if it.role == "drafter"),
            what="the orchestrator knows that the drafters are gone",
        )
        begun_without = begin(client, strategy).collect()
    assert begun_without.token_ids == text
    took = begun_without.finished.statistics
    assert took.drafted_token_count == took.max_gram_drafted_token_count
    assert count(begun_without, "no_drafter") == 1


def test_without_any_target_a_stream_breaks_and_is_resumed_when_one_is_back(whole, text):
    with whole.client() as client:
        generation, broken = without_targets(whole, client)
        assert broken.retry_after_seconds
        whole.targets[0].revive()
        done = client.resume(generation, resume_attempts=20).collect()
    assert done.token_ids == text


def without_targets(whole, client):
    """Kill all targets in mid-stream; return the stream, and what it ended with."""
    for _ in range(ATTEMPTS):
        generation = begin(client, "distributed")
        try:
            disturbed(generation, lambda: kill_all(whole.targets), after=20)
        except NoTargetError as broken:
            return generation, broken
        whole.mend()
    pytest.fail(f"each of {ATTEMPTS} streams was over first")
