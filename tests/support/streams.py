"""Reading a stream while something happens to the servers behind it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline import Client, Completion, Generation

__all__ = ["PROMPT", "disturbed", "mishaps", "plain"]

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
