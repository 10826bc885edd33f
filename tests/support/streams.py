"""Reading a stream while something happens to the servers behind it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline import Client, Completion, Generation
    from support.processes import ServerProcess
    from support.system import System

_BY_SLOWNESS = ("deadline", "drafter_lost", "no_drafter", "target_lost")

PROMPT = "def paceline(riders):"


def plain(client: Client, *, max_tokens: int) -> tuple[int, ...]:
    """Decode the prompt without speculation and without trouble."""
    done = client.generate(PROMPT, max_tokens=max_tokens, strategy="autoregressive").collect()
    assert not mishaps(done)
    return done.token_ids


def disturbed(generation: Generation, action: Callable[[], None], *, after: int) -> Completion:
    """Read a stream to its end, and do something once so many tokens have come.

    Whether it came in time to matter the caller sees from the statistics' fallbacks.
    """
    count, acted = 0, False
    for chunk in generation:
        count += len(chunk.token_ids)
        if count >= after and not acted:
            acted = True
            action()
    assert acted
    return generation.collect()


def at_work(system: System, servers: Sequence[ServerProcess]) -> ServerProcess:
    """Return a server that has a call just now, whose loss matters; any, if all is over."""
    with system.client() as client:
        return eventually(
            lambda: (
                next((it for it in servers if it.metric("paceline_calls_live")), None)
                or (not client.info().running_request_count and servers[0])
            ),
            what="a server has a call",
        )


def kill_who_decodes(system: System) -> None:
    """Kill the orchestrator that has a request; none, if all is over."""
    for index, orchestrator in enumerate(system.orchestrators):
        with system.client(index) as client:
            if client.info().running_request_count:
                orchestrator.kill()
                return


def mishaps(*completions: Completion) -> dict[str, int]:
    """Return the fallbacks that slowness does not explain.

    Where many processes share few cores, one may miss a call's time, or a ping's, which is a second
    and costs the connection; then it pauses, and there may be no drafter. What a server holds, or
    refuses, has nothing to do with time. A test of what happens without any fallback needs streams
    that have none, out of as many as it takes.
    """
    fallbacks: Counter[str] = Counter()
    for completion in completions:
        fallbacks.update(completion.finished.statistics.fallbacks)
    return {kind: count for kind, count in fallbacks.items() if kind not in _BY_SLOWNESS}
