"""Has running requests follow the load and their own verdicts, where all is left to the planner.

What is best for a request depends on who shares the servers with it, and that changes while it
runs. So of those whose method may change, one is planned again each second, and at once where a new
request shows that servers have become crowded. If it is better off with another method, so are
those that wish the same. A request that has changed stays so for a second, and twice as long each
time: to change costs a drafter's session, and load goes up and down.

It depends as much on how often drafts are right, which a request's own verdicts say soonest
(`evidence`). So with each of them it is asked whether drafting still pays, and with how long
blocks; and now and then whether a request that decodes plainly would draft if drafts were right.
In a crowd, drafts have to be right so often to pay that a few wrong ones by chance would end them.
So there a request drafts on as it does while that would pay at the next higher step of the rate.
A request whose target drafts for itself is asked only whether these guesses still pay. If not, it
decodes plainly to its end.

Planning takes a millisecond. So plans are kept for a second, for all requests that are alike.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from paceline_orchestrator.planning.evidence import Evidence, GuessEvidence
from paceline_orchestrator.planning.hit_rates import ASSUMED_ACCEPTANCE_RATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_orchestrator.front.generation import Generation
    from paceline_orchestrator.planning.planner import Plan, Wish
    from paceline_orchestrator.planning.request_planner import RequestPlanner

_INTERVAL_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 60.0
# Verdicts between two questions whether own guesses pay: to plan takes a millisecond.
_VERDICTS_OF_GUESSES = 4


@dataclass(slots=True)
class _Pace:
    """When a request may change, and what it has shown.

    Attributes:
        evidence: What its drafts have shown.
        not_before: When it may follow the load again, on the loop's clock.
        wait_seconds: For how long it stays so after its next change.
        rests: Whether it decodes plainly because drafts are wrong, and not because of the load.
        accepted: Draft tokens of servers that the evidence has; rejected likewise.
    """

    evidence: Evidence
    not_before: float = 0.0
    wait_seconds: float = _INTERVAL_SECONDS
    rests: bool = False
    accepted: int = 0
    rejected: int = 0


@dataclass(slots=True)
class _Guesses:
    """What a target's own guesses have shown in a request.

    Attributes:
        evidence: What they have shown.
        verdicts: The verdicts that had guesses to judge, as far as the evidence has them; guesses
            and accepted ones likewise.
    """

    evidence: GuessEvidence
    verdicts: int = 0
    guesses: int = 0
    accepted: int = 0


class _Likeness(NamedTuple):
    """What requests have in common that can be decoded with the same servers in the same way."""

    model_fingerprint: str  # of whichever server
    wish: Wish
    short_count: int  # of the contexts that there are: those too short for what it may become
    has_outgrown_drafters: bool


class _Kind(NamedTuple):
    """What requests have in common for which a plan is the same."""

    likeness: _Likeness
    drafts: bool
    rate: float


class Pacing:
    """Knows the requests whose method may change.

    Args:
        planning: Asked how they are to be decoded by now.
    """

    def __init__(self, planning: RequestPlanner) -> None:
        self._planning = planning
        self._paces: dict[Generation, _Pace] = {}
        self._plans: dict[_Kind, Plan] = {}
        self._context_lengths: Sequence[int] = ()  # as old as the plans
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def following(self, generation: Generation) -> Iterator[None]:
        """Have a request that runs meanwhile follow the load, and its own verdicts."""
        order = generation.order
        if order.may_leave_guesses:
            guesses = _Guesses(self._planning.experience.guess_evidence())
            generation.when_judged(partial(self._reconsider_guesses, generation, guesses))
        if not order.follows_load:
            yield
            return
        if not self._paces:
            self._forget_plans()  # of requests that have ended: nobody has looked since
        pace = self._paces[generation] = _Pace(
            Evidence(order.plan.hit_rates[0]),
            rests=not (generation.drafts or order.plan.is_crowded),
        )
        if pace.rests:
            pace.evidence.rest(at=0, trial_tokens=self._trial_tokens(generation))
        generation.when_judged(partial(self._reconsider, generation))
        try:
            self._look_later()
            if order.plan.is_crowded and not generation.drafts:
                self._look(drafting=True)
            yield
        finally:
            del self._paces[generation]
            if not self._paces and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    # --- the load -----------------------------------------------------------------------------

    def _look_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_INTERVAL_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look_later()
        for drafting in (True, False):
            self._look(drafting=drafting)

    def _look(self, *, drafting: bool) -> None:
        """Plan one request again that drafts, or one that does not; those like it follow it."""
        self._forget_plans()
        now = asyncio.get_running_loop().time()
        free = [
            generation
            for generation, pace in self._paces.items()
            if generation.drafts is drafting and pace.not_before <= now
        ]
        if not free:
            return
        first = free[0]
        plan = self._plan(first)
        self._paces[first] = self._paces.pop(first)  # next time it is another one's turn
        if plan is None or self._is_in_doubt(first, plan):
            return
        likeness = self._likeness(first)
        for generation in free:
            is_alike = self._likeness(generation) == likeness
            if is_alike and self._suits(plan, generation, first):
                self._follow(generation, plan, now=now)

    def _suits(self, plan: Plan, generation: Generation, first: Generation) -> bool:
        """Whether a plan for one request suits another, whose drafts may be more often right.

        If drafting pays for one request, it pays for requests with better drafts. If it does not
        pay even where all drafts are right, it pays for none.
        """
        rate, first_rate = (self._paces[it].evidence.rate for it in (generation, first))
        if plan.method.drafts:
            return rate >= first_rate
        if rate <= first_rate:
            return True
        return not self._would_draft(first)

    def _follow(self, generation: Generation, plan: Plan, *, now: float) -> None:
        pace = self._paces[generation]
        if generation.follow(plan):
            pace.not_before = now + pace.wait_seconds
            pace.wait_seconds = min(2 * pace.wait_seconds, _LONGEST_WAIT_SECONDS)
        if plan.method.drafts:
            pace.rests = False
        elif not pace.rests and self._would_draft(generation):
            self._rest(generation, pace)

    # --- its own verdicts ---------------------------------------------------------------------

    def _reconsider(self, generation: Generation) -> None:
        """Take notice of what became final, and of whether drafting pays by that."""
        pace = self._paces.get(generation)
        if pace is None:
            return
        has_news = _learn(pace, generation)
        if pace.rests:
            self._try_again(generation, pace)
        elif generation.drafts and generation.has_outgrown_drafters:
            self._do_without(generation)
        elif generation.drafts and has_news:
            self._go_on_or_retreat(generation, pace)

    def _do_without(self, generation: Generation) -> None:
        """Have a request that is too long for its drafters do what one does that has none."""
        plan = self._plan(generation)
        if plan is not None and not plan.method.drafts:
            generation.follow(plan)

    def _go_on_or_retreat(self, generation: Generation, pace: _Pace) -> None:
        """Have blocks be as long as pays; decode plainly where that is better, if drafts are why.

        Where it would be better with right drafts, too, that is the load's.
        """
        plan = self._plan(generation)
        if plan is None:
            return
        if plan.method.drafts:
            generation.pace(plan)
            return
        if self._is_in_doubt(generation, plan):
            return
        if self._would_draft(generation) and generation.follow(plan):
            self._rest(generation, pace)

    def _is_in_doubt(self, generation: Generation, plan: Plan) -> bool:
        """Whether a request that drafts in a crowd goes on, though its plan would now be another.

        Args:
            plan: What it would now be.
        """
        if plan.method.drafts or not (generation.drafts and plan.is_crowded):
            return False
        hopeful = self._plan(generation, rate=self._paces[generation].evidence.next_rate)
        return hopeful is not None and hopeful.method.drafts

    def _would_draft(self, generation: Generation) -> bool:
        """Whether drafting would pay if all drafts were right; if not, the load is the reason."""
        plan = self._plan(generation, rate=1.0)
        return plan is not None and plan.method.drafts

    def _rest(self, generation: Generation, pace: _Pace) -> None:
        pace.rests = True
        pace.evidence.retreat(
            at=_new_count(generation), trial_tokens=self._trial_tokens(generation)
        )

    def _trial_tokens(self, generation: Generation) -> float:
        return self._planning.trial_tokens(generation.order.model, length=generation.length)

    def _try_again(self, generation: Generation, pace: _Pace) -> None:
        """Have a request that has decoded plainly for long enough draft again, with short blocks.

        If it would not even if drafts were right, it rests on.
        """
        at = _new_count(generation)
        if not pace.evidence.has_rested(at):
            return
        pace.evidence.rest(at=at, trial_tokens=self._trial_tokens(generation))
        plan = self._plan(generation, rate=ASSUMED_ACCEPTANCE_RATE)
        if plan is None or not plan.method.drafts:
            return
        if not (plan.method.overlaps or generation.order.options.wish.lookahead):
            plan = replace(plan, lookahead=1)
        if generation.follow(plan):
            pace.rests = False
            pace.evidence.forget()

    def _reconsider_guesses(self, generation: Generation, seen: _Guesses) -> None:
        """Decode plainly if the target's own guesses do not pay by the verdicts so far."""
        if not generation.order.may_leave_guesses or generation.has_left_guesses:
            return
        drafts = generation.verdicts
        verdicts = drafts.own - 1  # the first one had nothing to judge
        if verdicts < seen.verdicts + _VERDICTS_OF_GUESSES:
            return
        guesses = drafts.accepted + drafts.rejected + drafts.discarded
        seen.evidence.judged(
            verdicts - seen.verdicts,
            guess_count=guesses - seen.guesses,
            accepted=drafts.accepted - seen.accepted,
        )
        seen.verdicts, seen.guesses, seen.accepted = verdicts, guesses, drafts.accepted
        plan = self._planning.plan_without_drafters(
            generation.order.options.wish,
            generation.order.model,
            length=generation.length,
            limit_length=generation.order.limit_length,
            guesses=seen.evidence,
        )
        if plan is not None and not plan.method.self_drafts:
            generation.leave_guesses(plan)

    # --- plans --------------------------------------------------------------------------------

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._context_lengths = self._planning.context_lengths()

    def _likeness(self, generation: Generation) -> _Likeness:
        order = generation.order
        return _Likeness(
            model_fingerprint=order.model.fingerprint,
            wish=order.options.wish,
            short_count=bisect_left(self._context_lengths, order.limit_length),
            has_outgrown_drafters=generation.has_outgrown_drafters,
        )

    def _kind(self, generation: Generation, *, rate: float | None = None) -> _Kind:
        return _Kind(
            self._likeness(generation),
            generation.drafts,
            self._paces[generation].evidence.rate if rate is None else rate,
        )

    def _plan(self, generation: Generation, *, rate: float | None = None) -> Plan | None:
        """Plan a request again, or one like it within the last second."""
        kind = self._kind(generation, rate=rate)
        plan = self._plans.get(kind)
        if plan is None:
            order = generation.order
            plan = self._planning.plan_again(
                order.options.wish,
                order.model,
                length=generation.length,
                limit_length=order.limit_length,
                drafts=kind.drafts,
                acceptance_rate=kind.rate,
            )
        if plan is not None:
            self._plans[kind] = plan
        return plan


def _new_count(generation: Generation) -> int:
    """Return how many tokens it has generated."""
    return generation.verdicts.accepted + generation.verdicts.own


def _learn(pace: _Pace, generation: Generation) -> bool:
    """Take in what became of servers' draft tokens; return whether there was any news.

    What the text has drafted beside them is left out, as far as it can be told.
    """
    verdicts, text = generation.verdicts, generation.text_verdicts
    accepted = max(pace.accepted, verdicts.first_accepted - text.accepted)
    rejected = max(pace.rejected, verdicts.rejected - text.rejected)
    news = (accepted - pace.accepted, rejected - pace.rejected)
    pace.accepted, pace.rejected = accepted, rejected
    pace.evidence.judged(accepted=news[0], rejected=news[1])
    return any(news)
