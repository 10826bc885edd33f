"""How often the draft tokens of each rank are right, learnt from one request for the next."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from paceline_protocol.ranks import DEFAULT_RANK_DECAY, MOST_WIDTH, hit_rates, shares_of

if TYPE_CHECKING:
    from paceline_protocol.draft_statistics import DraftStatistics

ASSUMED_ACCEPTANCE_RATE = 0.7
"""The rate of two models that have not worked together yet."""

# The assumption counts for so many values; after so many new values the older ones count half.
_ASSUMED_COUNT = 20
_REMEMBERED_COUNT = 2000
# Pairs that are remembered, those used last: models come and go with each rollout. With each of its
# LoRA adapters, which may be 64, a model is a pair of its own.
_MOST_PAIRS = 256


class DecayingMean:
    """A mean in which later values count more."""

    def __init__(self, assumed: float) -> None:
        self._sum = assumed * _ASSUMED_COUNT
        self._count = float(_ASSUMED_COUNT)

    @property
    def value(self) -> float:
        """What a value is expected to be."""
        return self._sum / self._count

    def add(self, amount: float, *, count: float) -> None:
        """Take in the sum of so many values."""
        if self._count > _REMEMBERED_COUNT:
            self._sum /= 2
            self._count /= 2
        self._sum += amount
        self._count += count


class Pair(NamedTuple):
    """A target's model and a drafter's, by their fingerprints."""

    target: str
    drafter: str


class HitRates:
    """What is known of a pair's draft tokens.

    A rank's decay is how often its token is right where those before it are wrong. So what a
    narrow draft teaches of the first ranks holds for wide ones, too.
    """

    def __init__(self) -> None:
        self._first = DecayingMean(ASSUMED_ACCEPTANCE_RATE)
        self._decays = [DecayingMean(DEFAULT_RANK_DECAY) for _ in range(MOST_WIDTH - 1)]

    @property
    def acceptance_rate(self) -> float:
        """How often a drafter's first choice is right."""
        return self._first.value

    @property
    def decays(self) -> tuple[float, ...]:
        """The decay of the second rank and of each further rank."""
        return tuple(decay.value for decay in self._decays)

    @property
    def by_rank(self) -> tuple[float, ...]:
        """How often the token of each rank is right, from the first on."""
        shares = shares_of(self.decays)
        return hit_rates(self.acceptance_rate, shares=shares, width=MOST_WIDTH)

    def learn(self, drafts: DraftStatistics, *, width: int) -> None:
        """Take in what became of a request's draft tokens, so many of them at a place."""
        judged_count = drafts.first_accepted + drafts.rejected
        self._first.add(drafts.first_accepted, count=judged_count)
        for rank, decay in enumerate(self._decays[: width - 1], 2):
            reached = sum(count for other, count in drafts.ranks.items() if not 0 < other < rank)
            decay.add(drafts.ranks[rank], count=reached)

    def doubt(self) -> None:
        """Pull what is known of runners-up a little back to what is assumed."""
        for decay in self._decays:
            decay.add(DEFAULT_RANK_DECAY, count=1)


class LearntRates:
    """Hit rates by pair of models."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[Pair, HitRates] = OrderedDict()  # the one used last comes last

    def of(self, pair: Pair) -> HitRates:
        """Return a pair's, which may still be what is assumed of any."""
        rates = self._pairs.setdefault(pair, HitRates())
        self._pairs.move_to_end(pair)
        while len(self._pairs) > _MOST_PAIRS:
            self._pairs.popitem(last=False)
        return rates
