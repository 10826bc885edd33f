"""Plans requests from the measured latencies, costs and load, and from how often drafts are right.

`experience.py` has what is known, `planner.py` chooses by it. Here a request's wish meets both.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import NoTargetError, TokenizerMismatchError, UnsupportedError
from paceline_contract.calls import VerificationRule
from paceline_contract.limits import MOST_TARGETS
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.fitting import unapplied
from paceline_orchestrator.planning.experience import Experience, trial_cost_tokens
from paceline_orchestrator.planning.hit_rates import HitRates, Pair
from paceline_orchestrator.planning.planner import Plan, Planner, Wish
from paceline_orchestrator.planning.refinement import Refinement
from paceline_protocol.draft_shape import CHAIN
from paceline_protocol.methods import METHODS
from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.errors import PacelineError
    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.planning.evidence import GuessEvidence
    from paceline_orchestrator.planning.measurements import Measurements
    from paceline_protocol.methods import Strategy

_GRAMMAR = frozenset({"grammar"})


class RequestPlanner:
    """Plans requests from what earlier ones have shown.

    Args:
        pool: The model servers.
        planner: Chooses among the methods; None: one of its own.
        cpu_clock: CPU time of the event loop's thread, in ns.
        clock: In seconds.
        thread_clock: CPU time of the thread that asks, in seconds.

    Attributes:
        experience: What is known of servers, and of earlier requests.
        refinement: Makes plans better while there is time for it.
    """

    def __init__(
        self,
        pool: ServerPool,
        *,
        planner: Planner | None = None,
        cpu_clock: Callable[[], int] = time.thread_time_ns,
        clock: Callable[[], float] = time.monotonic,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._pool = pool
        self._planner = planner or Planner()
        self.experience = Experience(cpu_clock)
        self.refinement = Refinement(self._planner, clock=clock, thread_clock=thread_clock)

    def plan(
        self, wish: Wish, model: ModelFacts, *, prompt_length: int, limit_length: int = 0
    ) -> Plan:
        """Choose how to decode a request; what it wishes wins. Nothing is changed: see `begin`.

        Args:
            wish: What it says.
            model: Its target model.
            prompt_length: Tokens of its text, with what was resumed.
            limit_length: The most tokens that the text may have: targets without so much room do
                not count.

        Raises:
            NoTargetError: No target of its model is ready any more, or one that drafts for itself
                is asked for, and is away.
            TokenizerMismatchError: It asks for speculation, and no drafter fits the target.
            UnsupportedError: It asks for self-speculation, and no target drafts for itself.
        """
        targets = self._targets(wish, model, limit_length=limit_length)
        if not targets:  # there was one before its text was tokenised
            raise NoTargetError(
                "no target of this model is ready any more",
                retry_after_seconds=shortage.RETRY_SECONDS,
            )
        asks_servers = wish.drafter is None or wish.drafter.has_servers
        ready = self._drafters(model, wish.strategy) if asks_servers else []
        drafters = _longer(ready, than=prompt_length)
        pair, rates = self._known_of(model, drafters)
        measurements = self.experience.measurements_for(
            targets, drafters, length=prompt_length, rates=rates, rule=wish.rule
        )
        if wish.strategy and METHODS[wish.strategy].self_drafts and not measurements.guess_count:
            raise self._no_guesses(wish, model)
        if _may_draft_from_text_alone(wish, has_drafters=bool(drafters)):
            plan = self._plan_for_text(measurements, wish)
        else:
            plan = replace(self._planner.choose(measurements, wish), drafter=wish.drafter)
        note = plan.note if wish.strategy is None else ""
        return replace(
            _granting(wish, plan, model=model, drafters=drafters),
            pair=pair,
            hit_rates=rates.by_rank,
            note=note,
        )

    def begin(self, plan: Plan, wish: Wish, *, model: ModelFacts) -> None:
        """Take notice that a request begins with a plan.

        Of a drafter that the plan does not use nothing is learnt, so what was once measured as too
        little would never be tried again. Each such request moves the drafter's rates a little back
        to the assumed ones.
        """
        if not any(target.primary_count for target in self._pool.targets(model)):
            self.experience.rest()
        if wish.leaves_trees_open and plan.shape == CHAIN:
            self.experience.rates_of(plan.pair).doubt()
        if wish.strategy is None and model.self_draft_depth and not plan.method.self_drafts:
            self.experience.doubt_guesses()
        is_for_text = _may_draft_from_text_alone(wish, has_drafters=plan.pair is not None)
        if is_for_text and not plan.method.drafts:
            self.experience.doubt_text()

    def plan_again(
        self,
        wish: Wish,
        model: ModelFacts,
        *,
        length: int,
        limit_length: int = 0,
        drafts: bool,
        acceptance_rate: float | None = None,
    ) -> Plan | None:
        """Choose how a running request, that leaves it to the planner, is to be decoded by now.

        Args:
            wish: What it said.
            model: Its target model.
            length: Tokens of its text by now.
            limit_length: The most tokens that the text may have; see `plan`.
            drafts: Whether it has a drafter.
            acceptance_rate: How often its drafts are right by its own verdicts; None: as often as
                its models' drafts are.

        Returns:
            None while no target or no drafter is ready: then there is nothing to choose.
        """
        targets = self._targets(wish, model, limit_length=limit_length)
        ready = self._drafters(model, wish.strategy)
        if not (targets and ready):
            return None
        drafters = _longer(ready, than=length)
        pair, rates = self._known_of(model, drafters)
        measurements = self.experience.measurements_for(
            targets,
            drafters,
            length=length,
            rates=rates,
            rule=wish.rule,
            is_here=True,
            drafts=drafts,
        )
        if not drafters:  # the text is too long for all of them
            plan = self._plan_for_text(measurements, wish)
            return _granting(wish, plan, model=model, drafters=())
        if acceptance_rate is not None:
            measurements = replace(measurements, acceptance_rate=acceptance_rate)
        plan = self._planner.choose(measurements, wish)
        plan = _granting(wish, plan, model=model, drafters=drafters)
        return replace(plan, pair=pair, hit_rates=rates.by_rank)

    def plan_without_drafters(
        self,
        wish: Wish,
        model: ModelFacts,
        *,
        length: int,
        limit_length: int,
        guesses: GuessEvidence,
    ) -> Plan | None:
        """Choose between a target's own guesses and plain decoding for a running request.

        Args:
            wish: What it said.
            model: Its target model.
            length: Tokens of its text by now.
            limit_length: The most tokens that the text may have; see `plan`.
            guesses: What the guesses have shown.

        Returns:
            None while no target is ready.
        """
        targets = self._targets(wish, model, limit_length=limit_length)
        if not targets:
            return None
        measurements = self.experience.measurements_for(
            targets, (), length=length, rates=self.experience.rates_of(None), is_here=True
        )
        if measurements.guess_count:
            measurements = replace(
                measurements, guess_count=guesses.guess_count, guesses_accepted=guesses.accepted
            )
        plan = self._planner.choose(measurements, wish)
        return _granting(wish, plan, model=model, drafters=())

    def context_lengths(self) -> Sequence[int]:
        """Return the contexts that there are among the servers that are ready, the shortest first.

        Requests whose texts lie between the same two of them have the same servers to choose from.
        """
        return sorted(
            {it.facts.context_length for it in self._pool.servers if it.ready and it.facts}
        )

    def trial_tokens(self, model: ModelFacts, *, length: int) -> float:
        """Return what it costs a request to find out that a drafter is still wrong.

        Args:
            model: Its target model.
            length: Tokens of its text.

        Returns:
            The time of so many tokens of plain decoding; 1 while a server is missing, since then
            nothing is tried.
        """
        targets = self._pool.targets(model)
        drafters = _longer(self._drafters(model, None), than=length)
        if not (targets and drafters):
            return 1.0
        return trial_cost_tokens(targets[0], drafters[0], length=length)

    def _known_of(
        self, model: ModelFacts, drafters: Sequence[ModelServer]
    ) -> tuple[Pair | None, HitRates]:
        """Return the pair of models, if a server drafts, and what is known of its tokens."""
        facts = drafters[0].facts if drafters else None
        if facts is None:
            return None, self.experience.rates_of(None)
        drafting = facts.with_lora(model.lora) or facts
        pair = Pair(model.fingerprint, drafting.fingerprint)
        return pair, self.experience.rates_of(pair)

    def _no_guesses(self, wish: Wish, model: ModelFacts) -> PacelineError:
        """Say why there is no self-speculation: for now, or for good."""
        if wish.rule is not VerificationRule.EXACT:
            reason = "what a target drafts for itself is judged by EXACT, not by REJECTION"
        elif self._pool.with_those_away(model).self_draft_depth:
            return NoTargetError(
                "the target that drafts for itself (strategy) is away",
                retry_after_seconds=shortage.RETRY_SECONDS,
            )
        else:
            reason = "no target of this model drafts for itself (paceline serve target --adapter)"
        return UnsupportedError(f"strategy: {reason}")

    def _plan_for_text(self, measurements: Measurements, wish: Wish) -> Plan:
        """Plan a request whose text is the only drafter, if it is of use."""
        by_text = self.experience.of_text_alone(measurements, is_predicted=wish.has_prediction)
        return self._planner.choose_for_text(measurements, wish, by_text=by_text)

    def _targets(self, wish: Wish, model: ModelFacts, *, limit_length: int) -> list[ModelServer]:
        """Return the targets with room for a text of so many tokens, that apply its sampling.

        While there is none, all targets are returned: the request then waits for one that can.
        """
        targets = self._pool.targets(model)
        able = [
            it
            for it in targets
            if it.facts and limit_length <= it.facts.context_length
            if not unapplied(wish.sampling_used, it.facts, model)
        ]
        return able or targets

    def _drafters(self, model: ModelFacts, strategy: Strategy | None) -> list[ModelServer]:
        try:
            return self._pool.drafters(model)
        except TokenizerMismatchError:
            if strategy is None or not METHODS[strategy].drafts:
                return []
            raise


def _may_draft_from_text_alone(wish: Wish, *, has_drafters: bool) -> bool:
    """Whether the text itself is the only drafter that a request may have."""
    if wish.drafter is not None:
        return not wish.drafter.has_servers
    return wish.strategy is None and not has_drafters


def _granting(
    wish: Wish, plan: Plan, *, model: ModelFacts, drafters: Sequence[ModelServer]
) -> Plan:
    """Return a plan with what the request says, as far as the model's servers can do it."""
    overlaps = plan.method.overlaps
    judges_trees = plan.method.drafts and model.tree_token_limit > 0
    shape = (wish.shape or plan.shape) if judges_trees else CHAIN
    # Guesses ride along where no token comes later for them.
    may_ride = wish.dispatch is not DispatchPolicy.BLOCKS and (overlaps or shape == CHAIN)
    return replace(
        plan,
        target_count=(overlaps and wish.target_count) or plan.target_count,
        shape=shape,
        own_guesses=may_ride
        and (plan.own_guesses or _needs_forced(wish, plan, model=model, drafters=drafters)),
        target_limit=_target_limit(wish, plan),
    )


def _needs_forced(
    wish: Wish, plan: Plan, *, model: ModelFacts, drafters: Sequence[ModelServer]
) -> bool:
    """Whether only targets can say which tokens the grammar forces, and they may ride along.

    A drafter that knows grammars has them in its chains. With guesses from targets, these begin no
    forward by themselves after a correction.
    """
    if not (wish.has_grammar and wish.rule is VerificationRule.EXACT and plan.method.drafts):
        return False
    has_servers = plan.drafter is None or plan.drafter.has_servers
    return not has_servers or all(
        it.facts is None or unapplied(_GRAMMAR, it.facts, model) for it in drafters
    )


def _target_limit(wish: Wish, plan: Plan) -> int:
    # The planner may have chosen SI because there were too few targets.
    runs_ahead = plan.method.drafts if wish.strategy is None else METHODS[wish.strategy].overlaps
    return (wish.target_count or MOST_TARGETS) if runs_ahead else 1


def _longer(drafters: Sequence[ModelServer], *, than: int) -> list[ModelServer]:
    """Return the drafters whose context is longer than a text of so many tokens."""
    return [it for it in drafters if it.facts and than < it.facts.context_length]
