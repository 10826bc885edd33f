"""What a running request's own verdicts say of drafting for it, and when it may try again.

How often a drafter is right depends on the text, and changes in it: code becomes prose. So what is
known of a pair of models is only where a request begins. Its own verdicts soon count for more, and
the latest of them the most. While it decodes plainly there are none; so it tries again now and
then, as if nothing were known of it. That costs time where the drafter is still wrong: it comes
after so many tokens that this is a small part of them, and each time in vain after twice as many.
"""

from __future__ import annotations

import math

from paceline_orchestrator.planning.hit_rates import ASSUMED_ACCEPTANCE_RATE

# Measured on rates from 0 to 0.9 and drafters of a tenth to a half of a target's step, against the
# best fixed lookahead for each (bench/LOG.md, 2026-11-25): what is known at the start counts for
# this many verdicts, and those before the last 16 count ever less.
_KNOWN_COUNT = 3
_REMEMBERED_COUNT = 16
# Of the time of tokens decoded plainly a trial in vain may take this part, at first.
_TRIAL_PART = 0.03
_LEAST_REST, _LONGEST_REST = 32, 1024
# Rates are told apart in steps of a twentieth.
_STEPS = 20


class GuessEvidence:
    """What a target's own guesses are worth to a request, by its verdicts; the latest count most.

    Args:
        guess_count: How many guesses a verdict judges, by what is known when it begins.
        accepted: How many of them are accepted.
    """

    def __init__(self, *, guess_count: float, accepted: float) -> None:
        self._guesses = guess_count * _KNOWN_COUNT
        self._accepted = accepted * _KNOWN_COUNT
        self._count = float(_KNOWN_COUNT)

    @property
    def guess_count(self) -> float:
        """How many guesses the next verdict is expected to judge."""
        return self._guesses / self._count

    @property
    def accepted(self) -> float:
        """How many of them are expected to be accepted."""
        return self._accepted / self._count

    def judged(self, verdict_count: int, *, guess_count: int, accepted: int) -> None:
        """Take in what became of the guesses that so many verdicts have judged."""
        self._guesses += guess_count
        self._accepted += accepted
        self._count += verdict_count
        if self._count > _REMEMBERED_COUNT:
            kept = _REMEMBERED_COUNT / self._count
            self._guesses *= kept
            self._accepted *= kept
            self._count = _REMEMBERED_COUNT


class Evidence:
    """How often the next draft tokens of a request are expected to be right.

    Args:
        known_rate: What is known of its models when it begins, in [0, 1].
    """

    def __init__(self, known_rate: float) -> None:
        self._sum = known_rate * _KNOWN_COUNT
        self._count = float(_KNOWN_COUNT)
        self._judged_count = 0  # since drafting began
        self._rests_until = 0.0
        self._in_vain_count = 0  # of the trials since drafts were last right
        self._has_tried = False

    @property
    def rate(self) -> float:
        """Probability that a target accepts the next draft token, in steps of 0.05."""
        return round(_STEPS * self._sum / self._count) / _STEPS

    @property
    def next_rate(self) -> float:
        """The next higher step of the rate, at most 1."""
        return min(_STEPS, round(_STEPS * self.rate) + 1) / _STEPS

    def judged(self, *, accepted: int, rejected: int) -> None:
        """Take in what became of the latest draft tokens, of which a rejected one comes last."""
        for is_right in (True,) * accepted + (False,) * rejected:
            self._sum += is_right
            self._count += 1
            if self._count > _REMEMBERED_COUNT:
                self._sum *= _REMEMBERED_COUNT / self._count
                self._count = _REMEMBERED_COUNT
        self._judged_count += accepted + rejected

    def retreat(self, *, at: int, trial_tokens: float) -> None:
        """Take notice that it decodes plainly from here on, since drafts are wrong.

        Args:
            at: How many tokens it has generated.
            trial_tokens: How many tokens of plain decoding a trial in vain takes the time of.
        """
        was_trial_in_vain = self._has_tried and self._judged_count <= _REMEMBERED_COUNT
        self._in_vain_count = self._in_vain_count + 1 if was_trial_in_vain else 0
        self._judged_count = 0
        self.rest(at=at, trial_tokens=trial_tokens)

    def rest(self, *, at: int, trial_tokens: float) -> None:
        """Take notice that it decodes plainly for a while from here on; see `retreat`."""
        shortest = max(_LEAST_REST, trial_tokens / _TRIAL_PART)
        rest = shortest * math.exp2(self._in_vain_count)
        self._rests_until = at + min(rest, max(shortest, _LONGEST_REST))

    def has_rested(self, at: int) -> bool:
        """Return whether it has decoded plainly for long enough to try again.

        Args:
            at: How many tokens it has generated.
        """
        return at >= self._rests_until

    def forget(self) -> None:
        """Know no more than of any models, and try: what has been judged is long ago."""
        self._has_tried = True
        self._sum = ASSUMED_ACCEPTANCE_RATE * _KNOWN_COUNT
        self._count = float(_KNOWN_COUNT)
