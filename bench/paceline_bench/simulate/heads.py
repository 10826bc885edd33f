"""What a head on the target's hidden states (EAGLE-3) gains, at the target and as a service.

As an adapter it guesses beside each verdict, on the target's own device. As a service it is told
hidden states with each verdict, and drafts on while targets verify: then SI drafts ahead, and DSI
runs with it. Nothing is charged but forwards: no hidden states on the wire, and none computed again
at the head. So what is said of the service is the most that it can gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from paceline_bench.protocol_runs import Batch, Setup, Timed, own_guesses, time_batch
from paceline_orchestrator.planning.equation import LOOKAHEADS
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.methods import Strategy, label_of

_TARGET = 10_000  # a target forward, so that parts of it are integers
_MOST_AHEAD = 12
_NO_SHARES = (0.0,)  # chains only: runners-up are not asked for


@dataclass(frozen=True, slots=True)
class PublishedHead:
    """A head, and how many of its draft tokens verdicts accept, as its users report.

    Attributes:
        accepted_up_to: The share of verdicts that accept the first draft token, the first two, and
            so on.
    """

    name: str
    accepted_up_to: tuple[float, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """How often each draft token is right if those before it are."""
        reached = pairwise((1.0, *self.accepted_up_to))
        return tuple(further / before for before, further in reached)


PUBLISHED = (
    PublishedHead("Llama 3.3 70B (vLLM issue 50170)", (0.751, 0.567, 0.453)),
    PublishedHead("Llama 4 Maverick (vLLM issue 25961)", (0.71, 0.48, 0.34)),
    PublishedHead("gpt-oss-20b (vLLM issue 42764)", (0.62, 0.36, 0.20, 0.12, 0.06)),
    PublishedHead("MiniCPM (vLLM issue 24243)", (0.58, 0.34, 0.22, 0.15, 0.11)),
    PublishedHead(
        "multi-token prediction, GSM8K (vLLM issue 48892)",
        (0.762, 0.616, 0.513, 0.424, 0.364, 0.309, 0.272, 0.237),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadJob:
    """What is to be compared.

    Attributes:
        head: Who drafts.
        latency: A forward of the head, in target forwards.
        target_counts: Targets of DSI.
        decay: By what the rate is multiplied with each token beyond the published ones.
        token_count: Tokens of a generation.
        repeats: Generations.
    """

    head: PublishedHead
    latency: float
    target_counts: tuple[int, ...]
    decay: float
    token_count: int
    repeats: int

    @property
    def rates(self) -> tuple[float, ...]:
        """Those of the head, and beyond them ever smaller ones."""
        own = self.head.rates
        return own + tuple(own[-1] * self.decay**n for n in range(1, max(LOOKAHEADS)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGain:
    """What a method makes of a head, at its best lookahead.

    Attributes:
        place: Where the head is: at the target, or in a service of its own.
        tokens_per_forward: Tokens for each target forward that was answered.
        over_plain: How many times as fast as plain decoding.
        over_self: As the same head at the target.
        gpu_count: Devices in use.
    """

    name: str
    place: str
    strategy: str
    target_count: int
    gpu_count: int
    lookahead: int
    tokens_per_forward: float
    over_plain: float
    over_self: float

    @property
    def per_gpu(self) -> float:
        """Tokens for each target forward's time, over the devices in use."""
        return self.over_plain / self.gpu_count


def compare_places(job: HeadJob) -> list[HeadGain]:
    """Simulate the head at its target, and as a service with SI and DSI: seconds."""
    few, many = range(1, _MOST_AHEAD + 1), [each for each in LOOKAHEADS if each <= 2 * _MOST_AHEAD]
    own = _best(job, [_at_target(job, guess_count) for guess_count in few])
    served = [
        _best(job, [_served(job, Strategy.SPECULATIVE, lookahead=n) for n in few]),
        _best(job, [_served(job, Strategy.SPECULATIVE, lookahead=n, ahead=True) for n in few]),
    ]
    for count in job.target_counts:
        setups = [_served(job, Strategy.DISTRIBUTED, lookahead=n, target_count=count) for n in many]
        served.append(_best(job, setups))
    return [
        _gain(job, own, own=own, place="at the target"),
        *(_gain(job, timed, own=own, place="a service") for timed in served),
    ]


def _at_target(job: HeadJob, guess_count: int) -> Setup:
    step = round(job.latency * _TARGET)
    chain = own_guesses(job.rates[:guess_count], node_count=guess_count, shares=_NO_SHARES)
    target = ServerLatency(_TARGET, _TARGET, guess=guess_count * step)
    return Setup(Strategy.SELF_SPECULATIVE, target, target, lookahead=guess_count, guesses=chain)


def _served(
    job: HeadJob, strategy: Strategy, *, lookahead: int, ahead: bool = False, target_count: int = 1
) -> Setup:
    step = round(job.latency * _TARGET)
    return Setup(
        strategy,
        ServerLatency(_TARGET, _TARGET),
        ServerLatency(step, step),
        lookahead=lookahead,
        target_count=target_count,
        drafts_ahead=ahead,
        head_rates=job.rates,
    )


def _best(job: HeadJob, setups: list[Setup]) -> Timed:
    return min((_simulated(job, setup) for setup in setups), key=lambda it: it.mean)


def _simulated(job: HeadJob, setup: Setup) -> Timed:
    return time_batch(
        Batch(setup, job.rates[0], max_tokens=job.token_count, seeds=range(job.repeats))
    )


def _gain(job: HeadJob, timed: Timed, *, own: Timed, place: str) -> HeadGain:
    setup = timed.setup
    return HeadGain(
        name=job.head.name,
        place=place,
        strategy=label_of(setup.strategy, drafts_ahead=setup.drafts_ahead),
        target_count=setup.target_count,
        gpu_count=setup.gpu_count,
        lookahead=setup.lookahead,
        tokens_per_forward=job.repeats * job.token_count / timed.target_forwards,
        over_plain=job.token_count * _TARGET / timed.mean,
        over_self=own.mean / timed.mean,
    )
