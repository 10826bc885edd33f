"""An orchestrator that dies takes nothing with it: another one goes on, and leases clean up."""

from __future__ import annotations

import pytest

from paceline import Client
from paceline.errors import ConnectionLostError
from support.streams import PROMPT, disturbed, kill_who_decodes
from support.system import simulated_system
from support.waiting import eventually

TOKENS = 400
# A stream may be over before a busy machine has killed its orchestrator.
ATTEMPTS = 4
LEASE_SECONDS, MARGIN_SECONDS = 15.0, 30.0  # a busy machine looks late


@pytest.fixture(scope="module")
def system():
    with simulated_system(orchestrator_count=2, target_count=2).running() as system:
        yield system


def open_sessions(system):
    return sum(server.metric("paceline_sessions_active") for server in system.models)


def test_a_client_of_both_goes_on_by_itself_when_one_is_killed(system):
    for _ in range(ATTEMPTS):
        with Client([each.address for each in system.orchestrators]) as client:
            options = {"max_tokens": TOKENS, "temperature": 1.0}
            generation = client.generate(PROMPT, strategy="distributed", targets=2, **options)
            completion = disturbed(generation, lambda: kill_who_decodes(system), after=30)
            seed = completion.started.seed
            expected = client.generate(PROMPT, strategy="autoregressive", seed=seed, **options)
            assert completion.token_ids == expected.collect().token_ids
        system.mend()
        if generation.resumption_count:
            break
    assert generation.resumption_count == 1
    assert 30 <= completion.resumed_token_count < TOKENS


@pytest.mark.long  # a lease has to end
def test_a_stream_of_a_killed_orchestrator_goes_on_at_another(system):
    first, _ = system.orchestrators
    with system.client(0) as client, system.client(1) as other:
        options = {"max_tokens": TOKENS, "temperature": 1.0}
        generation = client.generate(PROMPT, strategy="distributed", targets=2, **options)
        with pytest.raises(ConnectionLostError):
            disturbed(generation, first.kill, after=30)
        received = sum(len(chunk.token_ids) for chunk in generation.transcript.chunks)
        assert 30 <= received < TOKENS
        assert open_sessions(system) >= 2, "the killed orchestrator leaves sessions behind"
        resumed = other.resume(generation).collect()
        seed = resumed.started.seed
        expected = other.generate(PROMPT, strategy="autoregressive", seed=seed, **options).collect()
    assert resumed.token_ids == expected.token_ids
    assert resumed.text == expected.text
    eventually(
        lambda: open_sessions(system) == 0,
        what="the orphaned sessions are gone with their lease",
        within_seconds=LEASE_SECONDS + MARGIN_SECONDS,
    )
    assert all(server.metric("paceline_num_requests_running") == 0 for server in system.models)
