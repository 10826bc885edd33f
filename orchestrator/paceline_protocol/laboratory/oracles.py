"""What simulated models say: which tokens a drafter finds, and which of them the target takes."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from paceline_contract.proposal import NOTHING
from paceline_protocol.ranks import MOST_WIDTH, hit_rates, runner_up_shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.proposal import Proposal
    from paceline_protocol.laboratory.guesses import OwnGuesses


class TokenOracle(Protocol):
    """What the models say."""

    def draft(self, drafter: int, text: Sequence[int]) -> int:
        """Return the token with which a drafter continues a text."""

    def rank(self, drafter: int, text: Sequence[int], *, width: int) -> Sequence[tuple[int, float]]:
        """Return tokens with which a drafter may continue a text, with their probabilities.

        The likeliest comes first, and is that of `draft`. There are at most width of them.
        """

    def judge(self, prefix: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
        """Return how many tokens of a block the target accepts, and its token after them."""

    def guess(self, text: Sequence[int]) -> Proposal:
        """Return what the target itself guesses to follow a text that ends in its next token."""


class AgreementOracle:
    """A target with one right token for each position, and drafters that often find it.

    At which rank a drafter has the right token at a position depends on the seed, the drafter and
    the position alone, so runs of different strategies and widths are paired. After a wrong token
    it stays wrong.
    """

    def __init__(
        self,
        acceptance_rate: float,
        *,
        seed: int,
        length: int,
        shares: tuple[float, ...] | None = None,
        guesses: OwnGuesses | None = None,
    ) -> None:
        """Draw which positions agree.

        Args:
            acceptance_rate: Probability that a drafter's token is right.
            seed: Names the draw.
            length: Positions there are, the prompt's included.
            shares: How likely each runner-up is right, given that the first token is wrong; their
                sum is at most 1. Usually those of ranks.py.
            guesses: What the target guesses by itself, with runner-ups as drafters'; or nothing.
        """
        self._acceptance_rate = acceptance_rate
        self._shares = runner_up_shares() if shares is None else shares
        self._up_to_rank = tuple(accumulate(self._shares))
        self._seed = seed
        self._length = length
        self._guesses = guesses
        self._draws: dict[int, list[float]] = {}

    def prompt(self, length: int) -> tuple[int, ...]:
        """Return a prompt of right tokens."""
        return tuple(2 * position for position in range(length))

    def draft(self, drafter: int, text: Sequence[int]) -> int:
        """Return the right token, an even number, or a wrong one; see TokenOracle."""
        position = len(text)
        is_right = text[-1] % 2 == 0 and self.agrees(drafter, position)
        return 2 * position if is_right else 2 * position + 1

    def rank(self, drafter: int, text: Sequence[int], *, width: int) -> list[tuple[int, float]]:
        """Return the right token at its rank and wrong ones around it; see TokenOracle."""
        position, right = len(text), width
        if text[-1] % 2 == 0:
            right = self._rank_of_right(self._draw(drafter)[position], self._acceptance_rate)
        token_ids = self._ranked(position, width, right=right)
        rates = hit_rates(self._acceptance_rate, shares=self._shares, width=width)
        rates += (0.0,) * (width - len(rates))
        return list(zip(token_ids, rates, strict=True))

    def agrees(self, drafter: int, position: int) -> bool:
        """Whether a drafter on the right text finds the token of a position, from 0 on."""
        return self._draw(drafter)[position] < self._acceptance_rate

    def judge(self, prefix: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
        """Accept right tokens; see TokenOracle."""
        position = len(prefix)
        for token_id in block:
            if token_id != 2 * position:
                break
            position += 1
        return position - len(prefix), 2 * position

    def guess(self, text: Sequence[int]) -> Proposal:
        """Return right tokens at their ranks, drawn anew after each text; see TokenOracle."""
        if self._guesses is None:
            return NOTHING
        source = random.Random(f"{self._seed}/own/{len(text)}")  # noqa: S311  no secret
        return self._guesses.proposal(
            [
                self._ranked(position, MOST_WIDTH, right=self._rank_of_right(source.random(), rate))
                for position, rate in enumerate(self._guesses.rates, start=len(text))
            ]
        )

    def _ranked(self, position: int, width: int, *, right: int) -> list[int]:
        """Return tokens for a position, with the right one at its rank if there are so many."""
        token_ids = [2 * (position + n * self._length) + 1 for n in range(width)]
        if right < width:
            token_ids = [*token_ids[:right], 2 * position, *token_ids[right : width - 1]]
        return token_ids

    def _rank_of_right(self, draw: float, rate: float) -> int:
        """Return how many tokens come before the right one; more than there are if it is none."""
        if draw < rate:
            return 0
        missed = (draw - rate) / (1 - rate)
        return 1 + sum(missed >= share for share in self._up_to_rank)

    def _draw(self, drafter: int) -> list[float]:
        if drafter not in self._draws:
            source = random.Random(f"{self._seed}/{drafter}")  # noqa: S311  no secret
            self._draws[drafter] = [source.random() for _ in range(self._length)]
        return self._draws[drafter]


class FeatureHeadOracle(AgreementOracle):
    """A drafter that reads the target's hidden states (EAGLE-3), told with each verdict.

    Its first token after the last one that the target decided rests on true hidden states. For each
    further token it takes its own instead, so the rate depends on how far ahead it drafts. The
    prompt's hidden states are there from the start. Drafters share what they were told.
    """

    def __init__(self, rates: Sequence[float], *, seed: int, length: int) -> None:
        """Draw which positions agree.

        Args:
            rates: Probability that a token is right if those before it are: of the first token
                after the last decided one, of the second, and so on; the last rate holds for all
                further ones.
            seed: Names the draw.
            length: Positions there are, the prompt's included.
        """
        super().__init__(rates[0], seed=seed, length=length)
        self._rates = rates
        self._last_decided = 0

    def prompt(self, length: int) -> tuple[int, ...]:
        """Return a prompt of right tokens, whose hidden states are known."""
        self._last_decided = length - 1
        return super().prompt(length)

    def agrees(self, drafter: int, position: int) -> bool:
        """Whether a drafter on the right text finds the token of a position, from 0 on."""
        ahead = max(position - self._last_decided, 1)
        rate = self._rates[min(ahead, len(self._rates)) - 1]
        return self._draw(drafter)[position] < rate

    def judge(self, prefix: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
        """Accept right tokens, and tell hidden states if the prefix is right; see TokenOracle."""
        accepted, token_id = super().judge(prefix, block)
        if tuple(prefix) == super().prompt(len(prefix)):
            self._last_decided = max(self._last_decided, len(prefix) + accepted)
        return accepted, token_id


def judge_tree(
    oracle: TokenOracle, prefix: Sequence[int], proposal: Proposal
) -> tuple[tuple[int, ...], int]:
    """Return the path of a proposal that the target takes, and its token after that.

    Under EXACT: from the prefix to the child that is the target's token, as far as there is one.
    """
    if not proposal.parents:
        accepted, next_token = oracle.judge(prefix, proposal.token_ids)
        return tuple(range(accepted)), next_token
    places = zip(proposal.parents, proposal.token_ids, strict=True)
    children = {place: index for index, place in enumerate(places)}
    text, parent = [*prefix], 0
    path: list[int] = []
    while True:
        _, token_id = oracle.judge(text, ())
        index = children.get((parent, token_id))
        if index is None:
            return tuple(path), token_id
        path.append(index)
        text.append(token_id)
        parent = index + 1
