"""Reading a stream while something happens to the servers behind it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline import Client, Completion, Generation

__all__ = ["PROMPT", "disturbed", "mishaps", "plain"]

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
    """Return the fallbacks that a busy machine does not explain.

    A call has a second or more; where many processes share few cores, one may miss that and be made
    elsewhere. Its server then pauses, which runs of that time or soon after feel:
    give them together. A test of what a strategy does needs runs without any fallback besides.
    """
    fallbacks: Counter[str] = Counter()
    for completion in completions:
        fallbacks.update(completion.finished.statistics.fallbacks)
    if fallbacks.pop("deadline", 0):
        fallbacks.pop("no_drafter", None)
    return fallbacks
