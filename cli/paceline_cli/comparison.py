"""Runs the same prompts with every strategy, and compares outputs and times."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from statistics import mean
from typing import TYPE_CHECKING, Self

from paceline import Strategy
from paceline_local.screen import table
from paceline_protocol.methods import METHODS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from paceline import AsyncClient, Completion, GenerateOptions
    from paceline.prompts import Prompt

# The strategies that need only targets and a drafter.
STRATEGIES = tuple(
    Strategy(strategy.value) for strategy, method in METHODS.items() if not method.self_drafts
)
_HEADINGS = ("", "TTFT ms", "tokens/s", "forwards", "acceptance", "speed-up", "output")


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of a comparison, and how it is continued.

    Attributes:
        options: For every strategy, besides the number of tokens; greedy unless they say otherwise.
    """

    prompt: Prompt
    options: GenerateOptions

    @classmethod
    def to_continue(cls, text: str) -> Self:
        """Continue a text, for as many tokens as are allowed."""
        return cls(text, {"ignore_eos": True})


@dataclass(slots=True)
class Comparison:
    """Each strategy's results for the prompts, in the prompts' order."""

    completions: defaultdict[Strategy, list[Completion]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def is_identical(self, strategy: Strategy) -> bool:
        """Whether a strategy's tokens equal those of plain decoding, for every prompt."""
        plain = self.completions[Strategy.AUTOREGRESSIVE]
        own = self.completions[strategy]
        return [each.token_ids for each in own] == [each.token_ids for each in plain]

    @property
    def all_identical(self) -> bool:
        """Whether the tokens of all strategies are equal."""
        return all(map(self.is_identical, self.completions))

    def tokens_per_second(self, strategy: Strategy) -> float:
        """Tokens per second over all prompts, from request to end."""
        own = self.completions[strategy]
        nanoseconds = sum(each.finished.statistics.total_ns for each in own)
        return sum(len(each.token_ids) for each in own) * 1e9 / nanoseconds if nanoseconds else 0.0

    def speed_up(self, strategy: Strategy) -> float:
        """The speed relative to plain decoding; above 1 is faster."""
        plain = self.tokens_per_second(Strategy.AUTOREGRESSIVE)
        return self.tokens_per_second(strategy) / plain if plain else 0.0

    def acceptance_rate(self, strategy: Strategy) -> float:
        """The accepted fraction of the judged draft tokens; 0 without any."""
        statistics = [each.finished.statistics for each in self.completions[strategy]]
        accepted = sum(each.accepted_token_count for each in statistics)
        judged = accepted + sum(each.rejected_token_count for each in statistics)
        return accepted / judged if judged else 0.0

    def forwards(self, strategy: Strategy) -> int:
        """Forwards of targets, over all prompts."""
        own = self.completions[strategy]
        return sum(each.finished.statistics.target_forward_count for each in own)

    @property
    def drafted_token_count(self) -> int:
        """Draft tokens over all strategies."""
        completions = chain.from_iterable(self.completions.values())
        return sum(each.finished.statistics.drafted_token_count for each in completions)

    def table(self) -> Table:
        """Make a table with a row for each strategy: time to first token, target forwards, ..."""
        return table(_HEADINGS, [self._row(strategy) for strategy in self.completions])

    def _row(self, strategy: Strategy) -> tuple[str, ...]:
        statistics = [each.finished.statistics for each in self.completions[strategy]]
        acceptance = self.acceptance_rate(strategy)
        return (
            strategy.abbreviation,
            f"{mean(each.time_to_first_token_ns for each in statistics) / 1e6:.0f}",
            f"{self.tokens_per_second(strategy):.1f}",
            f"{self.forwards(strategy)}",
            f"{acceptance:.0%}" if acceptance else "-",
            f"{self.speed_up(strategy):.2f}x",
            "identical" if self.is_identical(strategy) else "[bold red]DIFFERENT[/]",
        )


async def compare(
    client: AsyncClient,
    prompts: Sequence[Asked],
    *,
    max_tokens: int,
    on_run: Callable[[str], None],
) -> Comparison:
    """Run each prompt with each strategy, alternating.

    Alternating, so that other load on the machine affects all strategies alike.
    """
    comparison = Comparison()
    for number, prompt in enumerate(prompts, 1):
        for strategy in STRATEGIES:
            options: GenerateOptions = {
                **prompt.options,
                "strategy": strategy,
                "max_tokens": max_tokens,
            }
            stream = client.generate(prompt.prompt, **options)
            comparison.completions[strategy].append(await stream.collect())
            on_run(f"prompt {number} of {len(prompts)}, {strategy.abbreviation}")
    return comparison
