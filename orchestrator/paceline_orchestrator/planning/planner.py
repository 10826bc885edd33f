"""Chooses strategy, lookahead and number of targets from measured latencies, costs and load.

Each method brings a forecast (`forecasts`); the fastest wins. The lookahead of DSI is picked by
simulating the protocol itself, calls and their cost included, since with work-conserving dispatch
shorter blocks than Equation 1 allows are often better. Two things hold it up: a verification costs
this process CPU time, and under load the servers are shared. Where a request has a target to
itself, what drafts is then simulated as it would run (`simulated_shapes`), ahead or not, with each
shape of trees; then the fastest shapes are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_orchestrator.planning.background_computation import let_others_run
from paceline_orchestrator.planning.estimates import (
    Option,
    affordable_targets,
    own_guesses_are_free,
    plain,
    speculative,
)
from paceline_orchestrator.planning.forecasts import FORECASTS, Case
from paceline_orchestrator.planning.prefill_broadcast import PrefillBroadcasts, PrefillCase
from paceline_orchestrator.planning.simulated_lookaheads import (
    SimulatedLookaheads,
    rounded,
    setting_of,
)
from paceline_orchestrator.planning.simulated_shapes import SimulatedShapes
from paceline_orchestrator.planning.target_scaling import TEXT_LOOKAHEAD, TEXT_TARGETS
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.task import ASSUMED_RATES, DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_orchestrator.planning.hit_rates import Pair
    from paceline_orchestrator.planning.measurements import Measurements
    from paceline_protocol.methods import Method

# Another method is taken only where it is faster by more than the estimates are good for.
_WORTHWHILE_GAIN = 1.02


class DrafterKind(Enum):
    """Who drafts; see orchestrator_service.proto, which has the same names."""

    SERVER = "server"
    MAX_GRAM = "max_gram"
    SERVER_AND_MAX_GRAM = "server_and_max_gram"

    @property
    def has_servers(self) -> bool:
        """Whether drafter servers draft."""
        return self is not DrafterKind.MAX_GRAM

    @property
    def has_text(self) -> bool:
        """Whether the text itself drafts, without a server."""
        return self is not DrafterKind.SERVER


@dataclass(frozen=True, slots=True)
class Plan:
    """How to decode a request.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification; 0 for plain decoding.
        target_count: Targets to use.
        broadcast_prefill: Whether they should all prefill the prompt at the start.
        keep_prefill: Whether each should finish its first verification for the prompt's sake.
        token_ns: Expected time for each token after the first.
        plain_token_ns: The same, had it been decoded plainly.
        is_crowded: Whether there are more requests than targets.
        note: What was chosen and why, in one line.
        drafter: Who drafts; None: servers, and the text itself while there is none.
        shape: How wide drafts are.
        pair: The models that it is made for; None where no server drafts.
        hit_rates: What is known of their draft tokens; see DecodingTask.
        own_guesses: Whether targets' own guesses ride along; see DecodingTask.
        drafts_ahead: Whether SI's drafter goes on while the target verifies.
        target_limit: Targets that it could use if there were as many: 1 where nothing runs ahead.
    """

    strategy: Strategy
    lookahead: int
    target_count: int
    broadcast_prefill: bool
    keep_prefill: bool
    token_ns: int
    plain_token_ns: int
    note: str
    drafter: DrafterKind | None = None
    shape: Shape = CHAIN
    pair: Pair | None = None
    hit_rates: tuple[float, ...] = ASSUMED_RATES
    own_guesses: bool = False
    drafts_ahead: bool = False
    is_crowded: bool = False
    target_limit: int = 1

    @property
    def method(self) -> Method:
        """Its row in the table of methods."""
        return METHODS[self.strategy]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request says of how it is to be decoded. None leaves it to the planner.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification.
        target_count: The most targets to use.
        rule: How draft tokens are judged; only the request chooses it.
        dispatch: When verifications are sent; only the request chooses it.
        drafter: Who drafts.
        shape: How wide drafts are. The planner chooses it only where it chooses the method, too;
            otherwise None is a chain.
        may_draft_ahead: Whether SI's drafter may go on while the target verifies.
        has_prediction: Whether the text can be drafted from what the client predicts.
        sampling_used: The sampling parameters that may change something.
    """

    strategy: Strategy | None = None
    lookahead: int | None = None
    target_count: int | None = None
    rule: VerificationRule = VerificationRule.EXACT
    dispatch: DispatchPolicy = DispatchPolicy.WORK_CONSERVING
    drafter: DrafterKind | None = None
    shape: Shape | None = None
    may_draft_ahead: bool = True
    has_prediction: bool = False
    sampling_used: frozenset[str] = frozenset()

    @property
    def has_grammar(self) -> bool:
        """Whether the text follows a grammar, which can force tokens."""
        return "grammar" in self.sampling_used

    @property
    def leaves_trees_open(self) -> bool:
        """Whether the planner may have token trees used."""
        is_exact = self.rule is VerificationRule.EXACT
        return is_exact and self.strategy is None and self.shape is None


_NO_WISH = Wish()


class Planner:
    """Plans requests; remembers what it lately simulated.

    Concurrency:
        `choose` is cheap: it simulates nothing, and makes do with closed forms. `refine` takes 100
        ms or more for each setting that `choose` would have liked to have simulated: call it on a
        worker thread. Both can run at the same time.

    Args:
        shapes: What is known of tree shapes; None: nothing yet.
    """

    def __init__(self, *, shapes: SimulatedShapes | None = None) -> None:
        self._lookaheads = SimulatedLookaheads()
        self._broadcasts = PrefillBroadcasts()
        self._shapes = shapes or SimulatedShapes()

    def choose(
        self,
        measurements: Measurements,
        wish: Wish = _NO_WISH,
    ) -> Plan:
        """Plan a request by what is known, and what it wishes."""
        case = self._case(measurements, wish)
        options = [FORECASTS[strategy](case) for strategy in _candidates(measurements, wish)]
        has_target = not measurements.is_crowded
        if wish.strategy is None and has_target:
            asked = None if wish.leaves_trees_open else wish.shape or CHAIN
            options = self._shapes.of(options, measurements, asked=asked)
        wanted = [option for option in options if wish.strategy in (None, option.strategy)]
        if not wanted:  # speculation asked for, and no drafter: it will find one or decode plainly
            assert wish.strategy is not None
            option = Option(
                wish.strategy,
                lookahead=wish.lookahead or 1,
                target_count=1,
                token_ns=measurements.verification_ns,
                drafts_ahead=case.may_draft_ahead and wish.strategy is Strategy.SPECULATIVE,
            )
            return self._plan(option, measurements, others=())
        best = _fastest(wanted)
        may_overlap = any(option.method.overlaps for option in options)
        if best.method.drafts and has_target and may_overlap:
            self._lookaheads.ask_for(measurements, case.target_count)
        others = [each for each in options if each is not best]
        if wish.drafter is DrafterKind.SERVER_AND_MAX_GRAM and best.method.overlaps:
            best = _with_room_for_text(
                best, wish, measurements=measurements, available=case.target_count
            )
        return self._plan(best, measurements, others=others)

    def choose_for_text(
        self, measurements: Measurements, wish: Wish = _NO_WISH, *, by_text: Measurements
    ) -> Plan:
        """Plan a request for which the text itself drafts.

        Its drafts cost nothing, so a round of SI is a verification, and a method that overlaps has
        as many rounds at once as there are targets. That is not promised to be faster, so it is for
        who asks for it.

        Args:
            measurements: What is known.
            wish: What the request says.
            by_text: The same, with what is known of the text as of a drafter.
        """
        case = Case(
            measurements,
            lookahead=wish.lookahead,
            target_count=1,
            lookaheads=self._lookaheads,
            may_draft_ahead=False,
        )
        ranked = [
            FORECASTS[strategy](replace(case, measurements=by_text) if method.drafts else case)
            for strategy, method in METHODS.items()
            if not method.overlaps and _has_what_it_needs(method, by_text)
        ]
        if wish.strategy is None:
            best = _fastest(ranked)
        elif METHODS[wish.strategy].overlaps:
            best = replace(
                speculative(by_text, wish.lookahead),
                strategy=wish.strategy,
                target_count=min(wish.target_count or measurements.part, measurements.target_count),
            )
        else:
            best = next(it for it in ranked if it.strategy is wish.strategy)
        others = [it for it in ranked if it.strategy is not best.strategy]
        plan = self._plan(best, measurements, others=others)
        drafts = best.method.drafts
        note = f"{best}, drafted from the text itself" if drafts else str(best)
        return replace(
            plan,
            broadcast_prefill=False,
            note=f"{note} ({_why(best, measurements, others=others)})",
            drafter=(wish.drafter or DrafterKind.MAX_GRAM) if drafts else None,
        )

    @property
    def is_missing_some(self) -> bool:
        """Whether there is something to `refine`."""
        kinds = (self._lookaheads, self._broadcasts, self._shapes)
        return any(each.is_missing_some for each in kinds)

    def refine(self, after_event: Callable[[], None] = let_others_run) -> None:
        """Simulate what `choose` wanted to know: DSI's lookahead and prefill, and tree shapes.

        Nothing is simulated where drafts come slower than verdicts, nor where a request has no
        target to itself.

        What fails is forgotten, and simulated again when it is next asked for.

        Args:
            after_event: Called every millisecond or more often; may end it with an exception.
        """
        if self._lookaheads.simulate_missing(after_event):
            self._shapes.forget_missing()  # the next request asks for them with a better lookahead
        self._broadcasts.simulate_missing(after_event)
        self._shapes.simulate_missing(after_event)

    def _case(self, measurements: Measurements, wish: Wish) -> Case:
        """Say what forecasts are for.

        AUTO counts targets that compute side by side. Who names a method has what that asks for.
        """
        available = min(wish.target_count or measurements.part, measurements.target_count)
        if wish.strategy is None:
            available = max(1, min(available, measurements.side_by_side))
        may_draft_ahead = wish.may_draft_ahead and measurements.side_by_side > 0
        return Case(
            measurements,
            lookahead=wish.lookahead,
            target_count=available,
            lookaheads=self._lookaheads,
            may_draft_ahead=may_draft_ahead,
        )

    def _plan(
        self, option: Option, measurements: Measurements, *, others: Sequence[Option]
    ) -> Plan:
        return Plan(
            strategy=option.strategy,
            lookahead=option.lookahead,
            target_count=option.target_count,
            broadcast_prefill=self._broadcasts_prefill(option, measurements),
            keep_prefill=option.target_count > 1
            and measurements.target_first_ns > measurements.target_step_ns,
            token_ns=option.token_ns,
            plain_token_ns=plain(measurements).token_ns,
            note=f"{option} ({_why(option, measurements, others=others)})",
            shape=option.shape,
            own_guesses=own_guesses_are_free(option, measurements),
            drafts_ahead=option.drafts_ahead,
            is_crowded=measurements.is_crowded,
        )

    def _broadcasts_prefill(self, option: Option, measurements: Measurements) -> bool:
        if option.target_count == 1:
            return False
        ratio = measurements.target_first_ns / measurements.verification_ns
        case = PrefillCase(
            setting=setting_of(measurements, option.target_count),
            first=rounded(ratio, 4),
            lookahead=option.lookahead,
            acceptance_percent=5 * round(20 * measurements.acceptance_rate),
        )
        return self._broadcasts.is_better(case)


def _with_room_for_text(
    option: Option, wish: Wish, *, measurements: Measurements, available: int
) -> Option:
    """Plan for what the text drafts beyond a drafter, at once and for nothing.

    It fills targets that the drafter is too slow for, so there are more of them, as far as this
    process can dispatch to them; and a block of one token has no room for it, so blocks are longer.
    """
    affordable = max(option.target_count, affordable_targets(measurements))
    words = "the text drafts beyond the drafter"
    return replace(
        option,
        target_count=min(option.target_count + TEXT_TARGETS, available, affordable),
        lookahead=wish.lookahead or max(option.lookahead, TEXT_LOOKAHEAD),
        note="; ".join(filter(None, (option.note, words))),
    )


def _fastest(options: Sequence[Option]) -> Option:
    """Return the fastest option; of about equally fast ones the first, which is the simplest."""
    best = options[0]
    for option in options[1:]:
        if option.keeps_up and option.token_ns * _WORTHWHILE_GAIN < best.token_ns:
            best = option
    return best


def _candidates(measurements: Measurements, wish: Wish) -> list[Strategy]:
    """Return the methods that can run; for AUTO without those that overlap, where nothing does."""
    may_overlap = wish.strategy is not None or measurements.side_by_side > 0
    return [
        strategy
        for strategy, method in METHODS.items()
        if _has_what_it_needs(method, measurements) and (may_overlap or not method.overlaps)
    ]


def _has_what_it_needs(method: Method, measurements: Measurements) -> bool:
    return bool(
        (measurements.drafter_count or not method.drafts)
        and (measurements.guess_count or not method.self_drafts)
    )


def _why(best: Option, measurements: Measurements, *, others: Sequence[Option]) -> str:
    reasons = [str(option) for option in others] or ["no drafter"]
    if measurements.request_count > 1:
        reasons.append(
            f"{measurements.request_count} requests on {measurements.target_count} target(s), "
            f"{measurements.drafting_count} at the drafter"
        )
    if measurements.side_by_side < measurements.target_count:
        reasons.append(
            f"of {measurements.target_count} target(s) {measurements.side_by_side} can compute"
            " beside the drafter and each other: the hardware is shared"
        )
    reasons += [option.note for option in (best, *others) if option.note]
    return "; ".join(reasons)
