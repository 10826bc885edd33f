"""What each strategy takes for a token, in closed form, from measured latencies, costs and load.

Equation 1 of the DSI paper says when verifications never wait for a target:

    ceil(target latency / (lookahead * drafter latency)) <= targets

Load. A request counts on its part of the targets, in which DSI can speculate. What a strategy is
worth is the larger of two times for each token: the request's own, on servers that nobody else
uses, and what all requests take at the targets they share, if all of them decode so:

                request's own                            all requests, at the targets
    non-SI      target                                   turn
    SI          (lookahead * drafter + target) / E       turn / E
    DSI         simulated, with a slower drafter         turn / target * its own: it never rests

with E tokens for each verification, and a turn in which the targets verify once for every request.
So DSI retreats as targets fill up. Where they are full, the strategy with the fewest target
forwards for each token wins: SI. Its lookahead is such that the drafter keeps up with all requests;
when it is full for all that, further requests leave it to the others and decode plainly: they
would gain what those lose, and leave targets idle. So each request gets at least what plain
decoding would give it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.limits import MOST_LOOKAHEAD
from paceline_protocol.methods import METHODS, Strategy

__all__ = [
    "LOOKAHEADS",
    "Measurements",
    "Option",
    "affordable_lookahead",
    "distributed_token_ns",
    "needed_target_count",
    "on_its_part",
    "pays_to_broadcast",
    "plain",
    "smallest_lookahead",
    "speculative",
]

LOOKAHEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_LOOKAHEAD)
"""What DSI is simulated with; a finer choice changes little."""

# From here on the prompt goes to all targets at once: waiting for a cold target in the middle of a
# generation costs its whole prefill, having it prefill at the start costs a busy target.
_BROADCAST_STEPS = 2

# Dispatching may take this part of the time of the event loop, which has one core: one of so many.
# Beyond, answers begin to wait for one another, and a rejection for its restart.
_DISPATCH_PARTS = 2


@dataclass(frozen=True, slots=True)
class Measurements:
    """What the planner knows.

    Attributes:
        target_step_ns: One decoding step of a target.
        target_first_ns: A target's first forward on the prompt.
        drafter_step_ns: One decoding step of the drafter, as its tokens arrive.
        acceptance_rate: Probability that the target accepts a draft token, in [0, 1].
        target_count: Targets there are, 1 or more.
        drafter_count: Drafters there are; without one the drafter's latency means nothing.
        call_ns: What a call takes before its first answer, besides its forward and its wait.
        dispatch_ns: What a verification costs this process, in CPU time.
        request_count: Requests that share the targets, this one included.
        drafting_count: Requests that share this one's drafter, this one included.
    """

    target_step_ns: int
    target_first_ns: int
    drafter_step_ns: int
    acceptance_rate: float
    target_count: int
    drafter_count: int = 1
    call_ns: int = 0
    dispatch_ns: int = 0
    request_count: int = 1
    drafting_count: int = 1

    @property
    def verification_ns(self) -> int:
        """A verification as its caller sees it, at an idle target."""
        return self.target_step_ns + self.call_ns

    @property
    def part(self) -> int:
        """This request's part of the targets, rounded; at least one, which it may have to share."""
        return max(1, (2 * self.target_count + self.request_count) // (2 * self.request_count))

    @property
    def crowding(self) -> float:
        """How many requests there are for each target."""
        return self.request_count / self.target_count


@dataclass(frozen=True, slots=True)
class Option:
    """A way to decode, and what is expected of it.

    Attributes:
        strategy: The method.
        lookahead: Draft tokens in a verification; 0 for plain decoding.
        target_count: Targets to use.
        token_ns: Expected time for each token after the first.
        keeps_up: Whether the drafter has its drafts ready when they are wanted.
        note: What else went into it, for whoever asks why.
    """

    strategy: Strategy
    lookahead: int
    target_count: int
    token_ns: int
    keeps_up: bool = True
    note: str = ""

    def __str__(self) -> str:
        method = METHODS[self.strategy]
        lookahead = f" with lookahead {self.lookahead}" if method.drafts else ""
        targets = f" on {self.target_count} target(s)" if method.overlaps else ""
        return f"{method.label}{lookahead}{targets}: {self.token_ns / 1e6:.1f} ms per token"


def needed_target_count(target_ns: int, drafter_ns: int, *, lookahead: int) -> int:
    """Return how many targets keep verifications from waiting (Equation 1)."""
    return _ceil_div(target_ns, lookahead * drafter_ns)


def smallest_lookahead(target_ns: int, drafter_ns: int, *, target_count: int) -> int:
    """Return the smallest lookahead with which Equation 1 holds."""
    return max(1, _ceil_div(target_ns, target_count * drafter_ns))


def pays_to_broadcast(*, first: float, step: float, target_count: int) -> bool:
    """Whether all targets should prefill the prompt at the start.

    Args:
        first: A target's first forward on the prompt.
        step: One decoding step of a target, in the same unit.
        target_count: Targets in use.
    """
    return target_count > 1 and first > _BROADCAST_STEPS * step


def plain(measurements: Measurements) -> Option:
    """Return plain decoding."""
    token_ns = max(measurements.verification_ns, _turn_ns(measurements))
    return Option(Strategy.AUTOREGRESSIVE, 0, 1, round(token_ns))


def speculative(measurements: Measurements, lookahead: int | None) -> Option:
    """Return SI, with its best lookahead where none is asked for."""
    token_ns, best = min(
        (_speculative_token_ns(measurements, candidate), candidate)
        for candidate in ([lookahead] if lookahead else _sustainable_lookaheads(measurements))
    )
    keeps_up = _keeps_up(measurements, best, drafting=measurements.drafting_count)
    return Option(Strategy.SPECULATIVE, best, 1, token_ns, keeps_up)


def _sustainable_lookaheads(measurements: Measurements) -> list[int]:
    """Return the lookaheads of SI with which the drafters keep up with everybody's rounds.

    The first draft token of a block is worth the most, so where they cannot keep up, each request
    that drafts at all drafts one.
    """
    everybody = measurements.request_count / measurements.drafter_count
    return [1] + [
        lookahead
        for lookahead in range(2, MOST_LOOKAHEAD + 1)
        if _keeps_up(measurements, lookahead, drafting=everybody)
    ]


def _keeps_up(measurements: Measurements, lookahead: int, *, drafting: float) -> bool:
    """Whether a drafter that so many requests draft at has their drafts ready when they want them.

    Each wants one in a round of SI, or in a turn of the targets if that takes longer.
    """
    round_ns = max(_round_ns(measurements, lookahead), _turn_ns(measurements))
    return drafting * lookahead * measurements.drafter_step_ns <= round_ns


def _speculative_token_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round over its expected tokens, 1 + a + ... + a^lookahead.

    A round takes its own time, or where servers are shared, what all rounds take at one of them.
    """
    drafting_ns = measurements.drafting_count * lookahead * measurements.drafter_step_ns
    round_ns = max(_round_ns(measurements, lookahead), _turn_ns(measurements), drafting_ns)
    tokens = sum(measurements.acceptance_rate**accepted for accepted in range(lookahead + 1))
    return round(round_ns / tokens)


def _round_ns(measurements: Measurements, lookahead: int) -> int:
    """Return the time of a round of SI where nobody else is: a draft, then a verification."""
    drafting_ns = measurements.call_ns + lookahead * measurements.drafter_step_ns
    return drafting_ns + measurements.verification_ns


def _turn_ns(measurements: Measurements) -> float:
    """Return how long the targets take to serve every request once."""
    return measurements.crowding * measurements.target_step_ns


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
    everybody = _ceil_div(measurements.request_count, max(1, measurements.drafter_count))
    sharing = max(measurements.drafting_count, everybody)
    return replace(
        measurements,
        drafter_step_ns=measurements.drafter_step_ns * sharing,
        request_count=1,
        drafting_count=1,
    )


def affordable_lookahead(measurements: Measurements) -> int:
    """Return the smallest lookahead of DSI whose verifications this process can dispatch.

    However many requests there are, they verify what the drafters draft: one block of lookahead
    tokens after the other.
    """
    drafters = min(measurements.drafter_count, measurements.request_count)
    dispatching_ns = _DISPATCH_PARTS * drafters * measurements.dispatch_ns
    return min(max(1, _ceil_div(dispatching_ns, measurements.drafter_step_ns)), MOST_LOOKAHEAD)


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
