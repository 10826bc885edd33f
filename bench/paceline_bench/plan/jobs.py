"""What is worth a forecast of some servers: each method, on so many targets, with these trees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_orchestrator.planning.equation import needed_target_count
from paceline_protocol.draft_shape import CHAIN, Shape
from paceline_protocol.methods import METHODS, Strategy

if TYPE_CHECKING:
    from paceline_bench.simulated_servers import SimulatedServers
    from paceline_protocol.laboratory.guesses import OwnGuesses

_TARGET_COUNTS = (*range(1, 9), 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True)
class ForecastJob:
    """A forecast to be made.

    Attributes:
        servers: Latencies in whole ns, and the acceptance rate.
        strategy: The method.
        target_count: Targets at work.
        token_count: Tokens of a generation.
        repeats: Simulated generations.
        shape: How wide drafts are.
        shares: How likely each runner-up is right where the first token is wrong; see ranks.py.
        guesses: What a target guesses by itself, or None.
        drafts_ahead: Whether SI's drafter goes on while the target verifies.
    """

    servers: SimulatedServers
    strategy: Strategy
    target_count: int
    token_count: int
    repeats: int
    shape: Shape = CHAIN
    shares: tuple[float, ...] = ()
    guesses: OwnGuesses | None = None
    drafts_ahead: bool = False


def forecast_jobs(
    servers: SimulatedServers,
    *,
    token_count: int,
    repeats: int,
    shape: Shape = CHAIN,
    shares: tuple[float, ...] = (),
    guesses: OwnGuesses | None = None,
) -> list[ForecastJob]:
    """List what is worth a forecast: every method that such servers suffice for.

    Those that overlap come on 1, 2, ... targets. SI comes twice, if the drafter has a device of its
    own: resting while the target verifies, and drafting ahead.

    With a shape of trees all methods that draft come once more, with these; and with guesses of its
    own a target that drafts for itself.

    Beyond target latency / drafter latency targets Equation 1 holds with lookahead 1, and one more
    has nothing to do.
    """
    useful = needed_target_count(servers.verification_ns, int(servers.drafter.step), lookahead=1)
    most = min(servers.target_count, useful)
    counts = sorted({most, *(each for each in _TARGET_COUNTS if each < most)} - {0})
    chains = [
        ForecastJob(
            servers,
            strategy,
            target_count=count,
            token_count=token_count,
            repeats=repeats,
            drafts_ahead=drafts_ahead,
        )
        for strategy, method in METHODS.items()
        if not method.self_drafts
        for count in (counts if method.overlaps else (1,))
        for drafts_ahead in (False, True)
        if not drafts_ahead or (strategy is Strategy.SPECULATIVE and servers.target_count)
    ]
    alone = [
        ForecastJob(
            servers,
            strategy,
            target_count=1,
            token_count=token_count,
            repeats=repeats,
            shares=shares,
            guesses=guesses,
        )
        for strategy, method in METHODS.items()
        if method.self_drafts and guesses is not None
    ]
    drafting = (job for job in chains if METHODS[job.strategy].drafts)
    trees = (replace(job, shape=shape, shares=shares) for job in drafting)
    return [*chains, *(trees if shape.width > 1 else ()), *alone]
