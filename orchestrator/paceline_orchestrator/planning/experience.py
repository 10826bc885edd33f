"""What is known before a request is planned: from servers' answers, and from earlier requests.

The orchestrator is stateless, and one of several. It knows where its own requests are. It hears of
the others' requests in the answers of the servers: how many calls were in a forward, and how long
a call waited for it. The larger of the two numbers of requests is believed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_orchestrator.fleet.hardware import count_side_by_side
from paceline_orchestrator.fleet.row_prices import RowPrices
from paceline_orchestrator.planning.evidence import GuessEvidence
from paceline_orchestrator.planning.hit_rates import DecayingMean, HitRates, LearntRates, Pair
from paceline_orchestrator.planning.measurements import MOST_TREE_TOKENS, Measurements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.planning.planner import Plan
    from paceline_protocol.draft_statistics import DraftStatistics

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
# Of a verdict. A request that tries guesses in vain has some 8 verdicts before it leaves them.
_DOUBT = 0.25
# Rejected tokens after which nothing is left of the rate that is assumed of a pair of models.
_TRIAL_ROUNDS = 3
# The text itself drafts a token in some 20 us.
_TEXT_STEP_NS = 20_000
# The part of the calls met, on average, that is our own last call: a forward that has become
# worthless may have to run to its end.
_IGNORED_CALLS = 0.5


class Experience:
    """What earlier requests have shown, to which the servers' own measurements are added.

    Args:
        cpu_clock: CPU time of the event loop's thread, in ns.
    """

    def __init__(self, cpu_clock: Callable[[], int]) -> None:
        self._rates = LearntRates()
        self._guess_count = DecayingMean(_ASSUMED_GUESSES)
        self._guesses_accepted = DecayingMean(_ASSUMED_GUESSES_ACCEPTED)
        self._text_rate = DecayingMean(_ASSUMED_TEXT_RATE)
        self._dispatch_ns = DecayingMean(_ASSUMED_DISPATCH_NS)
        self._cpu_clock = cpu_clock
        self._cpu_seen_ns = cpu_clock()

    def rates_of(self, pair: Pair | None) -> HitRates:
        """Return what is known of a pair's draft tokens; None: what is assumed of any."""
        return HitRates() if pair is None else self._rates.of(pair)

    def measurements_for(
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
        """Return what is known for a request from servers and from earlier requests.

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

    def of_text_alone(self, measurements: Measurements, *, is_predicted: bool) -> Measurements:
        """Return measurements with the text itself as the drafter."""
        return replace(
            measurements,
            drafter_step_ns=_TEXT_STEP_NS,
            acceptance_rate=_PREDICTED_RATE if is_predicted else self._text_rate.value,
            drafter_count=1,
            # Of a round's two calls there is one.
            call_ns=measurements.call_ns // 2,
        )

    def rest(self) -> None:
        """Leave out the CPU time so far: no request ran, so it was not spent on dispatching."""
        self._cpu_seen_ns = self._cpu_clock()

    def doubt_text(self) -> None:
        """Pull what is known of drafts from the text a little back to what is assumed."""
        self._text_rate.add(_ASSUMED_TEXT_RATE, count=1)

    def guess_evidence(self) -> GuessEvidence:
        """Return where a request begins with what a target's own guesses are worth."""
        return GuessEvidence(
            guess_count=self._guess_count.value, accepted=self._guesses_accepted.value
        )

    def doubt_guesses(self) -> None:
        """Pull what is known of targets' own guesses a little back to what is assumed."""
        self._guesses_accepted.add(_DOUBT * _ASSUMED_GUESSES_ACCEPTED, count=_DOUBT)

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
            self.rates_of(plan.pair).learn(drafts, width=plan.shape.width)
        now_ns = self._cpu_clock()
        if verification_count:
            self._dispatch_ns.add(now_ns - self._cpu_seen_ns, count=verification_count)
        self._cpu_seen_ns = now_ns


def trial_cost_tokens(target: ModelServer, drafter: ModelServer, *, length: int) -> float:
    """Return what it costs a request to find out that a drafter is still wrong.

    Its blocks are of one token: after three that are rejected it decodes plainly again. And the
    drafter works through the text, while what the target has begun by itself is lost.

    Args:
        target: Where it is verified.
        drafter: Where it would be drafted.
        length: Tokens of its text.

    Returns:
        The time of so many tokens of plain decoding.
    """
    call_ns = _ASSUMED_CALL_NS if target.latency.call_ns is None else target.latency.call_ns
    round_ns = (drafter.latency.step_ns or _ASSUMED_DRAFTER_NS) + 2 * call_ns
    trial_ns = _TRIAL_ROUNDS * round_ns + drafter.latency.expected_ns(length)
    return 1 + trial_ns / (target.latency.step_ns or _ASSUMED_TARGET_NS)


def _runs_on(server: ModelServer) -> bool:
    """Whether a server has said that a withdrawn forward may run to its end."""
    return server.facts is not None and not server.facts.cancels_forwards


def _tree_tokens(target: ModelServer, drafter: ModelServer | None) -> int:
    """Return the most tokens of a tree that both know what to do with."""
    if drafter is None or drafter.facts is None or target.facts is None:
        return 0
    return target.facts.tree_token_limit if drafter.facts.tree_token_limit else 0


def _self_draft(targets: Sequence[ModelServer]) -> bool:
    """Whether one of these drafts for itself: a request that wants that works there."""
    return any(it.facts is not None and it.facts.self_draft_depth > 0 for it in targets)


def _others(servers: Sequence[ModelServer], *, own: int) -> int:
    """Return how many other requests share servers: our own, or more if the answers say so.

    There is at least one request for each call that one of ours meets.
    """
    met = (max(0.0, it.latency.other_calls - _IGNORED_CALLS) for it in servers)
    return max(own, math.ceil(sum(met)))
