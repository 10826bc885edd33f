"""How much of what a target writes a drafter can say: measured on a sample of text and code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from paceline_engine.speaking.vocabulary import Vocabulary

LEAST_COVER = 0.4
"""Below this share a drafter is refused: it would need several forwards for most tokens."""

SAMPLE = '''The committee met on Tuesday to discuss the results of last year's survey. Most people \
who answered live in towns with fewer than 20,000 inhabitants, and about half of them said that \
they travel to work by train or by bicycle. "We did not expect that," said the chair, "but it is \
good news." What happens next depends on the budget, which will be decided in the spring.

def read_lines(path: str, *, limit: int = 100) -> list[str]:
    """Return the first lines of a file, without their ends."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number >= limit:
                break
            lines.append(line.rstrip("\\n"))
    return lines


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self, value: int) -> None:
        if value != 0:
            self.count += value
        else:
            raise ValueError("nothing to add")

Die Ergebnisse werden im Herbst erwartet. La biblioteca está abierta hasta las ocho de la tarde.
'''


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a drafter's vocabulary has of a target's.

    Attributes:
        vocabulary: The share of the target's tokens that are tokens of the drafter, by bytes.
        cover: The same of the tokens of the sample.
        ratio: How many tokens of the drafter's the sample has for each of the target's.
    """

    vocabulary: float
    cover: float
    ratio: float

    @property
    def suffices(self) -> bool:
        """Whether the drafter has enough of what the target writes."""
        return self.cover >= LEAST_COVER

    def check(self, name: str) -> None:
        """Refuse a drafter that has too little of what its target writes.

        Raises:
            ModelLoadError: it has less than LEAST_COVER of the sample.
        """
        if not self.suffices:
            raise ModelLoadError(
                f"--speak: model {name!r} has only {self.cover:.0%} of the tokens that the target"
                f" writes; below {LEAST_COVER:.0%} drafting would not pay"
            )


def measure_overlap(target: Vocabulary, drafter: Vocabulary) -> Overlap:
    """Measure on the sample."""
    drafter_contents = {content for content in drafter.contents if content}
    written = [content for content in target.contents if content]
    sample = SAMPLE.encode()
    said = target.encode(sample)
    count = max(1, len(said))
    return Overlap(
        sum(content in drafter_contents for content in written) / max(1, len(written)),
        sum(target.contents[token] in drafter_contents for token in said) / count,
        max(1 / 8, len(drafter.encode(sample)) / count),
    )
