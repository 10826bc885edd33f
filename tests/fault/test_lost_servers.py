"""A target or a drafter that dies, hangs or is missing costs time, and never a token."""

from __future__ import annotations

import pytest

from paceline.errors import NoTargetError
from support.streams import PROMPT, disturbed
from support.waiting import eventually

TOKENS = 400
SPECULATING = ["speculative", "distributed"]
# Time enough for whatever is lost to be noticed and survived, on a busy machine.
PATIENCE_SECONDS = 60.0
# A stream may end before a drafter that it does not wait for is found out.
ATTEMPTS = 4


def begin(client, strategy):
    """Ask for the text; nothing is sent yet."""
    options = {"targets": 2, "lookahead": 4, "timeout": PATIENCE_SECONDS}
    return client.generate(PROMPT, strategy=strategy, max_tokens=TOKENS, **options)


def at_work(servers):
    """Return a server that has a call just now: one whose loss matters."""
    return eventually(
        lambda: next((it for it in servers if it.metric("paceline_calls_live")), None),
        what="a server has a call",
    )


def kill_all(servers):
    for server in servers:
        server.kill()


def count(completion, *kinds):
    fallbacks = completion.finished.statistics.fallbacks
    return sum(fallbacks.get(kind, 0) for kind in kinds)


@pytest.mark.parametrize("strategy", ["autoregressive", *SPECULATING])
def test_a_target_killed_mid_stream_costs_no_token(strategy, whole, text):
    with whole.client() as client:
        generation = begin(client, strategy)
        done = disturbed(generation, lambda: at_work(whole.targets).kill(), after=20)
    assert done.token_ids == text
    assert count(done, "target_lost") >= 1


@pytest.mark.parametrize("strategy", SPECULATING)
def test_a_drafter_killed_mid_stream_costs_no_token(strategy, whole, text):
    with whole.client() as client:
        generation = begin(client, strategy)
        done = disturbed(generation, lambda: at_work(whole.drafters).kill(), after=20)
    assert done.token_ids == text
    assert count(done, "drafter_lost") >= 1


@pytest.mark.parametrize("strategy", ["autoregressive", *SPECULATING])
def test_a_frozen_target_costs_no_token(strategy, whole, text):
    with whole.client() as client:
        generation = begin(client, strategy)
        done = disturbed(generation, lambda: at_work(whole.targets).freeze(), after=20)
    assert done.token_ids == text
    assert count(done, "target_lost", "deadline") >= 1


@pytest.mark.parametrize("strategy", SPECULATING)
def test_a_frozen_drafter_costs_no_token(strategy, whole, text):
    for _ in range(ATTEMPTS):
        with whole.client() as client:
            generation = begin(client, strategy)
            done = disturbed(generation, lambda: at_work(whole.drafters).freeze(), after=20)
        assert done.token_ids == text
        if count(done, "drafter_lost", "deadline"):
            return
        whole.mend()
    pytest.fail(f"in none of {ATTEMPTS} streams was it found out")


@pytest.mark.parametrize("strategy", SPECULATING)
def test_without_any_drafter_a_stream_goes_on_with_its_text_alone(strategy, whole, text):
    with whole.client() as client:
        generation = begin(client, strategy)
        done = disturbed(generation, lambda: kill_all(whole.drafters), after=20)
        assert done.token_ids == text
        assert count(done, "no_drafter") >= 1
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
        generation = begin(client, "distributed")
        with pytest.raises(NoTargetError) as broken:
            disturbed(generation, lambda: kill_all(whole.targets), after=20)
        assert broken.value.retry_after_seconds
        whole.targets[0].revive()
        done = client.resume(generation, resume_attempts=20).collect()
    assert done.token_ids == text
