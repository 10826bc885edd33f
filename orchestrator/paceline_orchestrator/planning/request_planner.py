"""Plans requests from the measured latencies, costs and load, and from how often drafts are right.

The orchestrator is stateless, and one of several. It knows where its own requests are. It hears of
the others' requests in the answers of the servers: how many calls were in a forward, and how long
a call waited for it. The larger of the two numbers of requests is believed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.errors import NoTargetError, TokenizerMismatchError, UnsupportedError
from paceline_contract.calls import VerificationRule
from paceline_contract.limits import MOST_TARGETS
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.hardware import count_side_by_side
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.background_computation import (
    Allowance,
    BackgroundComputation,
    ComputationEndedError,
)
from paceline_orchestrator.planning.hit_rates import DecayingMean, HitRates, LearntRates, Pair
from paceline_orchestrator.planning.measurements import MOST_TREE_TOKENS, Measurements
from paceline_orchestrator.planning.planner import Plan, Planner, Wish
from paceline_protocol.draft_shape import CHAIN
from paceline_protocol.methods import METHODS
from paceline_protocol.task import DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_orchestrator.fleet.pool import ServerPool
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.methods import Strategy

_log = logging.getLogger(__name__)

# Where nothing was measured yet. The ratios of the latencies matter, not the latencies.
_ASSUMED_TEXT_RATE = 0.4
# Acceptance rate of what a client predicts. Its blocks are long: where the prediction is wrong,
# little of it is drafted.
_PREDICTED_RATE = 0.9
_ASSUMED_TARGET_NS = 30_000_000
_ASSUMED_DRAFTER_NS = 5_000_000
_ASSUMED_CALL_NS = 1_000_000
_ASSUMED_DISPATCH_NS = 1_000_000
# A target that drafts for itself: the nodes of a tree as `paceline train` makes it, and how many of
# them become output, below what the papers' tables say of any model.
_ASSUMED_GUESSES = 16.0
_ASSUMED_GUESSES_ACCEPTED = 1.0
# Rejected tokens after which nothing is left of the rate that is assumed of a pair of models.
_TRIAL_ROUNDS = 3
# The text itself drafts a token in some 20 us.
_TEXT_STEP_NS = 20_000
# The part of the calls met, on average, that is our own last call: a forward that has become
# worthless may have to run to its end.
_IGNORED_CALLS = 0.5
# Plans may wait this long for a moment at rest in which to be refined.
_PATIENCE_SECONDS = 10.0


class RequestPlanner:
    """Plans requests from what earlier ones have shown.

    Args:
        pool: The model servers.
        planner: Chooses among the methods; None: one of its own.
        cpu_clock: CPU time of the event loop's thread, in ns.
        clock: In seconds.
        thread_clock: CPU time of the thread that asks, in seconds.
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
        self._rates = LearntRates()
        self._guess_count = DecayingMean(_ASSUMED_GUESSES)
        self._guesses_accepted = DecayingMean(_ASSUMED_GUESSES_ACCEPTED)
        self._text_rate = DecayingMean(_ASSUMED_TEXT_RATE)
        self._dispatch_ns = DecayingMean(_ASSUMED_DISPATCH_NS)
        self._cpu_clock = cpu_clock
        self._cpu_seen_ns = cpu_clock()
        self._clock = clock
        self._thread_clock = thread_clock
        self._refining: asyncio.Task[None] | None = None
        self._computing = BackgroundComputation()
        self._allowance = Allowance(clock)
        self._missing_since: float | None = None
        self._is_ending = False

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
            NoTargetError: No target of its model is ready any more.
            TokenizerMismatchError: It asks for speculation, and no drafter fits the target.
            UnsupportedError: It asks for self-speculation, and no target drafts for itself.
        """
        targets = self._targets(model, limit_length=limit_length)
        if not targets:  # there was one before its text was tokenised
            raise NoTargetError(
                "no target of this model is ready any more",
                retry_after_seconds=shortage.RETRY_SECONDS,
            )
        asks_servers = wish.drafter is None or wish.drafter.has_servers
        ready = self._drafters(model, wish.strategy) if asks_servers else []
        drafters = _longer(ready, than=prompt_length)
        pair, rates = self._known_of(model, drafters)
        measurements = self._measure(
            targets, drafters, length=prompt_length, rates=rates, rule=wish.rule
        )
        if wish.strategy and METHODS[wish.strategy].self_drafts and not measurements.guess_count:
            raise UnsupportedError(f"strategy: {_why_no_guesses(wish)}")
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
            self._cpu_seen_ns = self._cpu_clock()  # what it did at rest was not dispatching
        if wish.leaves_trees_open and plan.shape == CHAIN:
            self._rates_of(plan.pair).doubt()
        is_for_text = _may_draft_from_text_alone(wish, has_drafters=plan.pair is not None)
        if is_for_text and not plan.method.drafts:
            self._text_rate.add(_ASSUMED_TEXT_RATE, count=1)

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
        targets = self._targets(model, limit_length=limit_length)
        ready = self._drafters(model, wish.strategy)
        if not (targets and ready):
            return None
        drafters = _longer(ready, than=length)
        pair, rates = self._known_of(model, drafters)
        measurements = self._measure(
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

    def context_lengths(self) -> Sequence[int]:
        """Return the contexts that there are among the servers that are ready, the shortest first.

        Requests whose texts lie between the same two of them have the same servers to choose from.
        """
        return sorted(
            {it.facts.context_length for it in self._pool.servers if it.ready and it.facts}
        )

    def trial_tokens(self, model: ModelFacts, *, length: int) -> float:
        """Return what it costs a request to find out that a drafter is still wrong.

        Its blocks are of one token: after three that are rejected it decodes plainly again. And the
        drafter works through the text, while what the target has begun by itself is lost.

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
        target, drafter = targets[0].latency, drafters[0].latency
        call_ns = _ASSUMED_CALL_NS if target.call_ns is None else target.call_ns
        round_ns = (drafter.step_ns or _ASSUMED_DRAFTER_NS) + 2 * call_ns
        trial_ns = _TRIAL_ROUNDS * round_ns + drafter.expected_ns(length)
        return 1 + trial_ns / (target.step_ns or _ASSUMED_TARGET_NS)

    def _known_of(
        self, model: ModelFacts, drafters: Sequence[ModelServer]
    ) -> tuple[Pair | None, HitRates]:
        """Return the pair of models, if a server drafts, and what is known of its tokens."""
        facts = drafters[0].facts if drafters else None
        if facts is None:
            return None, self._rates_of(None)
        drafting = facts.with_lora(model.lora) or facts
        pair = Pair(model.fingerprint, drafting.fingerprint)
        return pair, self._rates_of(pair)

    def _rates_of(self, pair: Pair | None) -> HitRates:
        return HitRates() if pair is None else self._rates.of(pair)

    def _plan_for_text(self, measurements: Measurements, wish: Wish) -> Plan:
        """Plan a request whose text is the only drafter, if it is of use."""
        by_text = replace(
            measurements,
            drafter_step_ns=_TEXT_STEP_NS,
            acceptance_rate=_PREDICTED_RATE if wish.has_prediction else self._text_rate.value,
            drafter_count=1,
            # Of a round's two calls there is one.
            call_ns=measurements.call_ns // 2,
        )
        return self._planner.choose_for_text(measurements, wish, by_text=by_text)

    def learn(
        self,
        drafts: DraftStatistics,
        *,
        plan: Plan,
        verification_count: int,
        text_accepted_count: int = 0,
        text_rejected_count: int = 0,
        was_predicted: bool = False,
    ) -> None:
        """Take in what became of a request's draft tokens, and what its verifications cost.

        Of hit rates those of its pair of models are learnt, as far as its drafts were wide.

        Of a request for which the text itself has drafted, too, only that is learnt: which draft
        tokens were a server's cannot be told.

        With several requests at once, the CPU time since the last of them ended was spent on all;
        in the long run so were the verifications that it is set against. What was spent before a
        request without verifications ended is left out: it dispatched none.
        """
        if plan.method.self_drafts:
            # Each verdict has a token of the target's own; the first one had nothing to judge.
            count = max(0, drafts.own - 1)
            self._guess_count.add(drafts.accepted + drafts.rejected + drafts.discarded, count=count)
            self._guesses_accepted.add(drafts.accepted, count=count)
        elif text_count := text_accepted_count + text_rejected_count:
            if not was_predicted:  # which says nothing about texts that repeat themselves
                self._text_rate.add(text_accepted_count, count=text_count)
        elif plan.pair is not None:
            self._rates.of(plan.pair).learn(drafts, width=plan.shape.width)
        now_ns = self._cpu_clock()
        if verification_count:
            self._dispatch_ns.add(now_ns - self._cpu_seen_ns, count=verification_count)
        self._cpu_seen_ns = now_ns

    def refine_soon(self, tasks: asyncio.TaskGroup) -> None:
        """Let the planner simulate what it was lately asked for, on a thread, one at a time.

        Cancellation:
            Ends its thread, too, within some milliseconds; so does `end_refining`.
        """
        self._refine_on(tasks, with_requests=False)

    def refine_beside(self, tasks: asyncio.TaskGroup) -> None:
        """Take notice that a request runs: simulations make way for it from here on.

        Where there has been something to simulate for ten seconds, and never a moment at rest,
        that begins.
        """
        self._computing.share(with_requests=True)
        if not self._planner.is_missing_some:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = self._clock()
        elif self._clock() - self._missing_since >= _PATIENCE_SECONDS:
            self._missing_since = None
            self._refine_on(tasks, with_requests=True)

    def end_refining(self) -> None:
        """Let the planner's thread end, and begin no other: the process is about to stop."""
        self._is_ending = True
        self._computing.end()

    def _refine_on(self, tasks: asyncio.TaskGroup, *, with_requests: bool) -> None:
        self._computing.share(with_requests=with_requests)
        if self._is_ending or (self._refining is not None and not self._refining.done()):
            return
        if not self._allowance.is_left:
            return  # plans stay as they are meanwhile
        self._computing = BackgroundComputation()
        self._computing.share(with_requests=with_requests)
        self._refining = tasks.create_task(self._refine(self._computing), name="refine the plan")

    async def _refine(self, computing: BackgroundComputation) -> None:
        try:
            await asyncio.to_thread(self._compute, computing)
        except Exception:  # noqa: BLE001 - requests can do without it, and must not end with it
            _log.exception("the planner failed")
        finally:
            computing.end()  # a thread goes on where its task was cancelled

    def _compute(self, computing: BackgroundComputation) -> None:
        """Refine, on a thread, and note what it took, also where it failed."""
        began = self._thread_clock()
        try:
            with suppress(ComputationEndedError):
                self._planner.refine(computing.make_way)
        finally:
            self._allowance.spend(self._thread_clock() - began)

    def _targets(self, model: ModelFacts, *, limit_length: int) -> list[ModelServer]:
        """Return the targets that have room for a text of so many tokens.

        While none has room, all targets are returned: the request then waits for one that has.
        """
        targets = self._pool.targets(model)
        with_room = [it for it in targets if it.facts and limit_length <= it.facts.context_length]
        return with_room or targets

    def _drafters(self, model: ModelFacts, strategy: Strategy | None) -> list[ModelServer]:
        try:
            return self._pool.drafters(model)
        except TokenizerMismatchError:
            if strategy is None or not METHODS[strategy].drafts:
                return []
            raise

    def _measure(
        self,
        targets: Sequence[ModelServer],
        drafters: Sequence[ModelServer],
        *,
        length: int,
        rates: HitRates,
        rule: VerificationRule = VerificationRule.EXACT,
        is_here: bool = False,
        drafts: bool = False,
    ) -> Measurements:
        """Return what is known for a request.

        Args:
            targets: Where it may be verified.
            drafters: Where it may be drafted.
            length: Tokens of its text.
            rates: The hit rates of its models.
            rule: How its draft tokens are judged. A target's own guesses are judged by equality.
            is_here: Whether it has a primary target by now, and is counted there.
            drafts: Whether it has a drafter by now.
        """
        primaries = sum(it.primary_count for it in targets) - is_here
        target = targets[0].latency
        target_ns = target.step_ns or _ASSUMED_TARGET_NS
        drafter = drafters[0] if drafters else None
        drafter_ns = drafter.latency.step_ns if drafter else 0
        has_guesses = rule is VerificationRule.EXACT and _self_draft(targets)
        return Measurements(
            target_step_ns=target_ns,
            target_first_ns=max(target_ns, target.expected_ns(length)),
            drafter_step_ns=(drafter_ns or _ASSUMED_DRAFTER_NS)
            + (drafter.latency.lag_ns if drafter else 0),
            acceptance_rate=rates.acceptance_rate,
            target_count=len(targets),
            drafter_count=len(drafters),
            call_ns=_ASSUMED_CALL_NS if target.call_ns is None else target.call_ns,
            dispatch_ns=round(self._dispatch_ns.value),
            request_count=1 + _others(targets, own=primaries),
            drafting_count=1
            + (_others((drafter,), own=max(0, drafter.session_count - drafts)) if drafter else 0),
            target_prices=target.prices,
            drafter_prices=drafter.latency.prices if drafter else RowPrices(),
            guess_count=self._guess_count.value if has_guesses else 0.0,
            guesses_accepted=self._guesses_accepted.value,
            rank_decays=rates.decays,
            tree_tokens=min(MOST_TREE_TOKENS, _tree_tokens(targets[0], drafter)),
            tree_depth=targets[0].facts.tree_depth_limit if targets[0].facts else 0,
            side_by_side=count_side_by_side(
                [it.hardware for it in targets], drafter=drafter.hardware if drafter else None
            ),
            targets_run_on=any(_runs_on(it) for it in targets),
            drafter_runs_on=drafter is not None and _runs_on(drafter),
        )


def _runs_on(server: ModelServer) -> bool:
    """Whether a server has said that a withdrawn forward may run to its end."""
    return server.facts is not None and not server.facts.cancels_forwards


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
        it.facts is None or it.facts.grammar_engine != model.grammar_engine for it in drafters
    )


def _target_limit(wish: Wish, plan: Plan) -> int:
    # The planner may have chosen SI because there were too few targets.
    runs_ahead = plan.method.drafts if wish.strategy is None else METHODS[wish.strategy].overlaps
    return (wish.target_count or MOST_TARGETS) if runs_ahead else 1


def _tree_tokens(target: ModelServer, drafter: ModelServer | None) -> int:
    """Return the most tokens of a tree that both know what to do with."""
    if drafter is None or drafter.facts is None or target.facts is None:
        return 0
    return target.facts.tree_token_limit if drafter.facts.tree_token_limit else 0


def _self_draft(targets: Sequence[ModelServer]) -> bool:
    """Whether one of these drafts for itself: a request that wants that works there."""
    return any(it.facts is not None and it.facts.self_draft_depth > 0 for it in targets)


def _why_no_guesses(wish: Wish) -> str:
    if wish.rule is not VerificationRule.EXACT:
        return "what a target drafts for itself is judged by EXACT, not by REJECTION"
    return "no target of this model drafts for itself (paceline serve target --adapter)"


def _others(servers: Sequence[ModelServer], *, own: int) -> int:
    """Return how many other requests share servers: our own, or more if the answers say so.

    There is at least one request for each call that one of ours meets.
    """
    met = (max(0.0, it.latency.other_calls - _IGNORED_CALLS) for it in servers)
    return max(own, math.ceil(sum(met)))


def _longer(drafters: Sequence[ModelServer], *, than: int) -> list[ModelServer]:
    """Return the drafters whose context is longer than a text of so many tokens."""
    return [it for it in drafters if it.facts and than < it.facts.context_length]
