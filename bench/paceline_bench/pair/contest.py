"""Many variants of decoding, side by side, on the same prompts and in turn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, StrEnum
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import InvalidFieldError
from paceline.plain_files import read_plain_text
from paceline_bench.pair.acceptance import common_run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

Prompt: TypeAlias = "Sequence[int]"
Gap: TypeAlias = "Callable[[Prompt, tuple[int, int]], float]"
"""Tells how far the target's scores of two next tokens are apart."""

_MOST_PROMPT_BYTES = 64 << 20  # of a file of them
_WARM_UPS = 3  # The planner learns the acceptance rate from each request.


class Group(StrEnum):
    """Who decodes."""

    LIBRARY = "transformers"
    ENGINE = "our engine, no services"
    SERVICES = "the services"


class Method(Enum):
    """How, as far as comparisons need it."""

    BARE = "bare"
    PLAIN = "plain"
    SPECULATIVE = "speculative"
    DISTRIBUTED = "distributed"
    LOOKUP = "lookup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One text.

    Attributes:
        token_ids: The new tokens.
        elapsed_ns: From the prompt's token ids to the last new one.
        target_forwards: Of the target, or of all copies of it.
        first_token_ns: To the first new token, where it is told.
        forward_ns: In forwards of either model, choosing tokens included, where it is told.
        accepted: Draft tokens that were right.
        rejected: Draft tokens that were wrong.
    """

    token_ids: tuple[int, ...]
    elapsed_ns: int
    target_forwards: int
    first_token_ns: int | None = None
    forward_ns: int | None = None
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A variant of decoding, greedily, as many tokens as are asked for.

    Attributes:
        group: Who decodes.
        method: The decoding method.
        name: Told within its group.
        run: Decodes a prompt.
        lookahead: The one that is asked for, if any.
        targets: The most targets that it may use, if that is asked for.
    """

    group: Group
    method: Method
    name: str
    run: Callable[[Prompt, int], Awaitable[Outcome]]
    lookahead: int | None = None
    targets: int | None = None


@dataclass(slots=True)
class Entry:
    """What a contestant made of the prompts.

    Attributes:
        outcomes: By prompt, then by repeat.
        near_ties: Texts that left the reference where two candidates were too close to call.
        wrong: Texts that left it elsewhere.
    """

    contestant: Contestant
    outcomes: list[list[Outcome]]
    near_ties: int = 0
    wrong: int = 0

    @property
    def is_identical(self) -> bool:
        """Whether every text is the reference's, near-ties apart."""
        return not self.wrong

    @property
    def ms_per_token(self) -> float:
        """The median repeat's."""
        return median(self.repeats_ms_per_token)

    @property
    def repeats_ms_per_token(self) -> list[float]:
        """For each repeat, over all prompts: from request to end, prefill included."""
        rounds = zip(*self.outcomes, strict=True)
        return [
            sum(each.elapsed_ns for each in outcomes) / 1e6 / self._tokens(repeat)
            for repeat, outcomes in enumerate(rounds)
        ]

    @property
    def tokens_per_second(self) -> float:
        """The inverse."""
        return 1e3 / self.ms_per_token

    @property
    def forward_ms_per_token(self) -> float | None:
        """In forwards, a token's share, where it is told."""
        times = [each.forward_ns for each in self._all]
        known = [time_ns for time_ns in times if time_ns is not None]
        return sum(known) / 1e6 / self._all_tokens if len(known) == len(times) else None

    @property
    def first_token_ms(self) -> float | None:
        """To the first token, median, where it is told."""
        known = [x.first_token_ns / 1e6 for x in self._all if x.first_token_ns is not None]
        return median(known) if known else None

    @property
    def tokens_per_forward(self) -> float:
        """New tokens for each forward of the target."""
        return self._all_tokens / sum(each.target_forwards for each in self._all)

    @property
    def acceptance_rate(self) -> float | None:
        """Of the draft tokens that were decided, where it is told."""
        accepted = sum(each.accepted for each in self._all)
        decided = accepted + sum(each.rejected for each in self._all)
        return accepted / decided if decided else None

    @property
    def _all(self) -> list[Outcome]:
        return list(chain.from_iterable(self.outcomes))

    @property
    def _all_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self._all)

    def _tokens(self, repeat: int) -> int:
        return sum(len(repeats[repeat].token_ids) for repeats in self.outcomes)


def times_as_fast(own_ms: Sequence[float], other_ms: Sequence[float]) -> float:
    """Return how many times as fast one is as another: of the repeats' ratios the median.

    Both took turns in each repeat, so a machine that is slower in one slows both.

    Args:
        own_ms: For each repeat, what the one took for a token.
        other_ms: The same of the other.
    """
    return median(other / own for own, other in zip(own_ms, other_ms, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How a contest is run.

    Attributes:
        max_tokens: New tokens of each text.
        repeats: How often each contestant decodes each prompt.
        near_tie: Candidates with scores as close as this may come out either way: forwards over
            blocks of other shapes add the same numbers in another order.
    """

    max_tokens: int
    repeats: int
    near_tie: float


def contest_rounds(prompt_count: int, *, repeats: int) -> int:
    """Return how often a contest reports."""
    return min(_WARM_UPS, prompt_count) + repeats * prompt_count


async def contest(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    *,
    rules: Rules,
    gap: Gap,
    on_run: Callable[[str], None] = lambda _: None,
) -> list[Entry]:
    """Let everybody decode every prompt, in turn, and compare all texts with the first one's.

    Within a prompt all contestants follow each other, each time another one first, so that
    whatever else the machine does is shared fairly.
    """
    for prompt in prompts[:_WARM_UPS]:
        for contestant in contestants:
            await contestant.run(prompt, rules.max_tokens)
        on_run("warm-up")
    entries = [Entry(each, [[] for _ in prompts]) for each in contestants]
    for repeat in range(rules.repeats):
        for index, prompt in enumerate(prompts):
            first = (repeat + index) % len(entries)
            for entry in (*entries[first:], *entries[:first]):
                outcome = await entry.contestant.run(prompt, rules.max_tokens)
                entry.outcomes[index].append(outcome)
            on_run(f"repeat {repeat + 1} of {rules.repeats}, prompt {index + 1} of {len(prompts)}")
    for index, prompt in enumerate(prompts):
        reference = entries[0].outcomes[index][0].token_ids
        for entry in entries:
            for outcome in entry.outcomes[index]:
                _compare(
                    entry,
                    outcome.token_ids,
                    reference=reference,
                    prompt=prompt,
                    rules=rules,
                    gap=gap,
                )
    return entries


def _compare(
    entry: Entry,
    token_ids: tuple[int, ...],
    reference: tuple[int, ...],
    prompt: Prompt,
    *,
    rules: Rules,
    gap: Gap,
) -> None:
    at = common_run(token_ids, reference)
    if token_ids == reference:
        return
    if at < len(token_ids) == len(reference):
        choices = token_ids[at], reference[at]
        if gap((*prompt, *reference[:at]), choices) <= rules.near_tie:
            entry.near_ties += 1
            return
    entry.wrong += 1


def read_prompts(path: Path) -> list[str]:
    """Read a file with a prompt on each line: JSON objects with `text`, or the text itself.

    Raises:
        InvalidFieldError: It has none, or a line is not what it looks like.
    """
    prompts = []
    text = read_plain_text(path, most_bytes=_MOST_PROMPT_BYTES, allow_pipe=True)
    for number, line in enumerate(text.rstrip("\n").split("\n"), 1):
        if not line.startswith("{"):
            prompts.append(line)
            continue
        try:
            prompts.append(str(json.loads(line)["text"]))
        except (ValueError, KeyError, TypeError):
            raise InvalidFieldError.of(
                "prompts", f"line {number} of {path} is no JSON object with `text`"
            ) from None
    found = [prompt for prompt in prompts if prompt]
    if not found:
        raise InvalidFieldError.of("prompts", f"there is none in {path}")
    return found
