"""What each strategy takes for a token, in closed form, from measured latencies, costs and load.

Load. A request counts on its part of the targets, in which DSI can speculate. What a strategy is
worth is the time for each token if all requests decode so: then the best for one is the best for
all of them together. With E tokens for each verification:

                request's own                            all requests, at the targets
    non-SI      target                                   turn
    SI          (lookahead * drafter + target) / E       turn / E
    SI ahead    the same, or with probability a^(lookahead + 1) the larger of target and
                (lookahead + 1) * drafter, if nobody else has work for the drafter
    DSI         simulated, with a slower drafter         turn / target * its own: it never rests
    self-SI     target / E                               turn / E

The larger of the two counts. In a turn the targets verify once for every request. What that takes
is all there is to load, and depends on whether forwards are shared; r requests there are for each
target, and F(n) is what a forward of n rows takes, as the target has measured it:

- Each call has its own forward: a turn takes r of them, whatever else is done.
- Forwards are shared, plain decoding: F(r). The target goes on by itself, so all streams are in
  each of its forwards.
- Forwards are shared, blocks of n rows: 2 F(r n / 2). Who drafts in between finds the others'
  forward running, and is in the next one: streams part into two groups that take turns. A single
  request's wait is half a forward on average, so SI's own round is longer by that, too.

So speculation is free as long as F hardly grows, and given up where its rows cost the others more
than its tokens are worth. Where each call has its own forward the strategy with the fewest of them
wins: SI. Its lookahead is such that the drafter keeps up with all requests; when it is full for all
that, further requests leave it to the others and decode plainly: they would gain what those lose,
and leave targets idle. So each request gets at least what plain decoding would give it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

from paceline_contract.limits import MOST_LOOKAHEAD
from paceline_orchestrator.planning.equation import LOOKAHEADS
from paceline_orchestrator.planning.measurements import EQUAL_ROWS
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.methods import METHODS, Method, Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_orchestrator.planning.measurements import Measurements

# Dispatching may take this part of the time of the event loop, which has one core: one of so many.
# Beyond, answers begin to wait for one another, and a rejection for its restart.
_DISPATCH_PARTS = 2
# What a forward may take with rows that count as free: less than this is noise.
_FREE_PRICE = 1.05

BLOCK_ROWS = 2
"""Rows of a block of DSI at first: a draft token, and the row that decides what follows it."""


@dataclass(frozen=True, slots=True)
class Option:
    """A way to decode, and what is expected of it.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification; 0 for plain decoding.
        target_count: Targets to use.
        token_ns: Expected time for each token after the first.
        keeps_up: Whether the drafter has its drafts ready when they are wanted.
        note: What else went into it, for the plan's explanation.
        shape: How wide drafts are.
        drafts_ahead: Whether SI's drafter goes on while the target verifies.
    """

    strategy: Strategy
    _: KW_ONLY
    lookahead: int
    target_count: int
    token_ns: int
    keeps_up: bool = True
    note: str = ""
    shape: Shape = CHAIN
    drafts_ahead: bool = False

    @property
    def method(self) -> Method:
        """Its row in the table of methods."""
        return METHODS[self.strategy]

    def __str__(self) -> str:
        method = self.method
        lookahead = f" with lookahead {self.lookahead}" if method.drafts else ""
        targets = f" on {self.target_count} target(s)" if method.overlaps else ""
        trees = f" and {self.shape}" if self.shape != CHAIN else ""
        ahead = ", drafting ahead" if self.drafts_ahead else ""
        ms = self.token_ns / 1e6
        return f"{method.label}{lookahead}{targets}{trees}{ahead}: {ms:.1f} ms per token"


def plain(measurements: Measurements) -> Option:
    """Return plain decoding: a target goes on by itself, and no call is between two tokens."""
    if measurements.target_prices.shares_forwards:
        calls = measurements.request_count / measurements.target_count
        turn_ns = measurements.forward_ns(1, calls=calls)
    else:
        turn_ns = measurements.turn_ns(1)
    token_ns = max(measurements.target_step_ns, turn_ns)
    return Option(Strategy.AUTOREGRESSIVE, lookahead=0, target_count=1, token_ns=round(token_ns))


def own_guesses_are_free(option: Option, measurements: Measurements) -> bool:
    """Whether targets' own guesses in SI's and DSI's verifications can only gain.

    Their rows must cost nothing, and for DSI a block be drafted while a target decides one token: a
    slower drafter that begins anew where guesses have led may lose a part of a step that was nearly
    done (tests/unit/protocol/test_riding_guesses.py).
    """
    method = option.method
    if not method.drafts or not measurements.guess_count:
        return False
    prices = measurements.target_prices
    calls = max(1.0, measurements.request_count / measurements.target_count)
    rows = calls * (1 + option.lookahead + measurements.guess_count)
    block_ns = option.lookahead * measurements.drafter_step_ns
    is_quick = not method.overlaps or block_ns <= measurements.target_step_ns
    return is_quick and prices.are_measured and prices.of(rows) <= _FREE_PRICE


def self_speculative(measurements: Measurements) -> Option:
    """Return self-speculation: each call judges what the target proposed with its last verdict."""
    rows = 1 + measurements.guess_count
    round_ns = measurements.call_ns + _judging_ns(measurements, rows)
    round_ns = max(round_ns, measurements.turn_ns(rows))
    token_ns = round(round_ns / (1 + measurements.guesses_accepted))
    return Option(Strategy.SELF_SPECULATIVE, lookahead=0, target_count=1, token_ns=token_ns)


def speculative(
    measurements: Measurements, lookahead: int | None, *, may_draft_ahead: bool = False
) -> Option:
    """Return SI, with its best lookahead where none is asked for.

    It drafts ahead where it may, and nobody else has work for the drafter.
    """
    if may_draft_ahead and measurements.everybody == 1:
        return _speculative_ahead(measurements, lookahead)
    token_ns, best = min(
        (_speculative_token_ns(measurements, candidate), candidate)
        for candidate in ([lookahead] if lookahead else _sustainable_lookaheads(measurements))
    )
    keeps_up = _keeps_up(measurements, best, drafting=measurements.drafting_count)
    return Option(
        Strategy.SPECULATIVE, lookahead=best, target_count=1, token_ns=token_ns, keeps_up=keeps_up
    )


def _speculative_ahead(measurements: Measurements, lookahead: int | None) -> Option:
    token_ns, best = min(
        (_ahead_token_ns(measurements, candidate), candidate)
        for candidate in ([lookahead] if lookahead else range(1, MOST_LOOKAHEAD + 1))
    )
    return Option(
        Strategy.SPECULATIVE, lookahead=best, target_count=1, token_ns=token_ns, drafts_ahead=True
    )


def _ahead_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round over its expected tokens, if SI drafts ahead.

    A round after a block that was accepted whole, with a next token that the drafter had found
    meanwhile, began with the verification before it: it drafts this token and its own. It waits for
    the later of the two.
    """
    anew_ns = _round_ns(measurements, lookahead)
    verification_ns = measurements.call_ns + _judging_ns(measurements, lookahead + 1)
    drafting_ns = (lookahead + 1) * measurements.drafter_step_ns
    was_ahead = measurements.acceptance_rate ** (lookahead + 1)
    if measurements.drafter_step_ns > verification_ns:
        was_ahead = 0.0
    round_ns = (1 - was_ahead) * anew_ns
    round_ns += was_ahead * min(anew_ns, max(verification_ns, drafting_ns))
    round_ns = max(round_ns, measurements.turn_ns(lookahead + 1))
    return round(round_ns / _round_tokens(measurements, lookahead))


def _sustainable_lookaheads(measurements: Measurements) -> Sequence[int]:
    """Return the lookaheads of SI with which the drafters keep up with everybody's rounds.

    The first draft token of a block is worth the most, so where they cannot keep up, each request
    that drafts at all drafts one. Where their forwards are shared they draft for all at once.
    """
    if measurements.drafter_prices.shares_forwards:
        return range(1, MOST_LOOKAHEAD + 1) if measurements.request_count == 1 else LOOKAHEADS
    everybody = measurements.request_count / max(1, measurements.drafter_count)
    return [1] + [
        lookahead
        for lookahead in range(2, MOST_LOOKAHEAD + 1)
        if _keeps_up(measurements, lookahead, drafting=everybody)
    ]


def _keeps_up(measurements: Measurements, lookahead: int, *, drafting: float) -> bool:
    """Whether a drafter that so many requests share has their drafts ready when they want them.

    Each wants one in a round of SI, or in a turn of the targets if that takes longer.
    """
    if measurements.drafter_prices.shares_forwards:
        return True
    round_ns = max(_round_ns(measurements, lookahead), measurements.turn_ns(lookahead + 1))
    return drafting * lookahead * measurements.drafter_step_ns <= round_ns


def _speculative_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round over its expected tokens, 1 + a + ... + a^lookahead.

    A round takes its own time, or where servers are shared, what all rounds take at one of them.
    """
    round_ns = max(_round_ns(measurements, lookahead), measurements.turn_ns(lookahead + 1))
    if not measurements.drafter_prices.shares_forwards:
        drafting_ns = measurements.drafting_count * lookahead * measurements.drafter_step_ns
        round_ns = max(round_ns, drafting_ns)
    return round(round_ns / _round_tokens(measurements, lookahead))


def _round_tokens(measurements: Measurements, lookahead: int) -> float:
    return sum(measurements.acceptance_rate**accepted for accepted in range(lookahead + 1))


def _round_ns(measurements: Measurements, lookahead: int) -> float:
    """Return a request's own time for a round of SI: a draft, then a verification.

    Both wait for half a forward where others share forwards, and then have half of the others
    beside them at the target, at the drafter at worst all.
    """
    draft_step_ns: float = measurements.drafter_step_ns
    draft_forwards = float(lookahead)
    if measurements.drafter_prices.shares_forwards and measurements.everybody > 1:
        draft_step_ns *= measurements.drafter_prices.of(measurements.everybody)
        draft_forwards += 0.5
    forward_ns = _judging_ns(measurements, lookahead + 1)
    return 2 * measurements.call_ns + draft_forwards * draft_step_ns + forward_ns


def _judging_ns(measurements: Measurements, row_count: float) -> float:
    """Return what a target takes to judge so many rows, from the moment that they have come."""
    calls = measurements.request_count / measurements.target_count
    if measurements.target_prices.shares_forwards and calls > 1:
        return 1.5 * measurements.forward_ns(row_count, calls=calls / 2)
    return measurements.forward_ns(row_count)


def distributed_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time between two corrections over the expected tokens, if no verification waits.

    With run length G before a correction, which is 1 / (1 - a) tokens in all, the verdict on it
    comes target + ceil(G / lookahead) blocks' drafting after the last one; the expectation of that
    ceil is a / (1 - a^lookahead). For lookahead 1 it is the paper's Proposition 1. A draft's call
    is paid once in a run, if there is a draft token in it.
    """
    rate, target_ns = measurements.acceptance_rate, measurements.verification_ns
    if rate >= 1:
        return min(measurements.drafter_step_ns, target_ns)
    drafting_ns = rate * measurements.call_ns
    drafting_ns += lookahead * measurements.drafter_step_ns * rate / (1 - rate**lookahead)
    return min(round((1 - rate) * (target_ns + drafting_ns)), target_ns)


def on_its_part(measurements: Measurements) -> Measurements:
    """Return the same for DSI on its own part: it never rests, and so has a slower drafter.

    All requests might draft so, and at least those do that draft now.
    """
    sharing, prices = measurements.everybody, measurements.drafter_prices
    slowdown = prices.of(sharing) if prices.shares_forwards else sharing
    return replace(
        measurements,
        target_step_ns=round(measurements.forward_ns(BLOCK_ROWS)),
        drafter_step_ns=round(measurements.drafter_step_ns * slowdown),
        request_count=1,
        drafting_count=1,
        target_prices=EQUAL_ROWS,
        drafter_prices=EQUAL_ROWS,
    )


def stretch(measurements: Measurements, lookahead: int) -> float:
    """Return how many times as long DSI takes as on its own part, for others and for its rows."""
    return measurements.turn_ns(lookahead + 1) / measurements.forward_ns(BLOCK_ROWS)


def affordable_lookahead(measurements: Measurements) -> int:
    """Return the smallest lookahead of DSI whose verifications this process can dispatch.

    However many requests there are, they verify what the drafters draft: one block of lookahead
    tokens after the other. A drafter that shares forwards drafts for all of them at the same time.
    """
    drafters = measurements.request_count
    if not measurements.drafter_prices.shares_forwards:
        drafters = min(measurements.drafter_count, drafters)
    dispatching_ns = _DISPATCH_PARTS * drafters * measurements.dispatch_ns
    return min(max(1, -(-dispatching_ns // measurements.drafter_step_ns)), MOST_LOOKAHEAD)


def affordable_targets(measurements: Measurements) -> int:
    """Return how many targets of each request this process can give one verification after another.

    It is what `affordable_lookahead` is where drafts are there at once.
    """
    dispatching_ns = _DISPATCH_PARTS * measurements.request_count * measurements.dispatch_ns
    return measurements.verification_ns // max(1, dispatching_ns)
