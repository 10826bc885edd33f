"""SIGTERM under load: what runs is finished, what comes is refused, the exit code is 0."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from paceline.errors import TryAgainError
from support.streams import PROMPT, disturbed, mishaps
from support.waiting import eventually

TOKENS, STREAMS = 400, 4


@pytest.mark.parametrize("role", ["target", "drafter", "orchestrator"])
def test_running_streams_end_well_and_the_process_too(role, whole, text):
    servers = {
        "target": whole.targets,
        "drafter": whole.drafters,
        "orchestrator": whole.orchestrators,
    }
    victim = servers[role][0]
    under_way = Barrier(STREAMS, action=victim.terminate, timeout=30)

    def stream(_):
        with whole.client() as client:
            generation = client.generate(
                PROMPT, strategy="distributed", targets=2, lookahead=4, max_tokens=TOKENS
            )
            return disturbed(generation, under_way.wait, after=5)

    with ThreadPoolExecutor(STREAMS) as threads:
        streams = list(threads.map(stream, range(STREAMS)))
    assert [done.token_ids for done in streams] == [text] * STREAMS
    assert victim.wait() == 0
    assert not any(map(mishaps, streams))


def test_a_draining_orchestrator_refuses_what_comes(whole, text):
    orchestrator = whole.orchestrators[0]
    with whole.client() as client, whole.client() as other:
        running = client.generate(PROMPT, strategy="autoregressive", max_tokens=TOKENS)
        client.info()

        def come_late():
            orchestrator.terminate()
            eventually(lambda: "draining" in orchestrator.log, what="it drains")
            with pytest.raises(TryAgainError):
                other.generate(PROMPT, max_tokens=4).collect()

        done = disturbed(running, come_late, after=5)
    assert done.token_ids == text
    assert orchestrator.wait() == 0
