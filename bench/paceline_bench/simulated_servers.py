"""Simulated nodes: what a drafter and its targets take, and the rows of the DSI paper's Table 2."""

from __future__ import annotations

from dataclasses import dataclass

from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.ranks import DEFAULT_RANK_DECAY

_NS_PER_MS = 1_000_000
DEFAULT_VOCABULARY_SIZE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedServers:
    """A drafter and targets whose forwards are waited for instead of computed.

    Attributes:
        target: What a target's forwards take, in whole ns.
        drafter: What the drafter's take, in whole ns.
        acceptance_rate: How often the drafter agrees with the target, in [0, 1].
        target_count: How many targets there are.
        rank_decay: q: how likely the drafter's next runner-up is right where it is wrong.
        vocabulary_size: Tokens there are. Of two, a guess from the text is right half of the time.
    """

    target: ServerLatency
    drafter: ServerLatency
    acceptance_rate: float
    target_count: int = 7
    rank_decay: float = DEFAULT_RANK_DECAY
    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE

    @property
    def verification_ns(self) -> int:
        """A target's call and its forward over one row."""
        return int(self.target.call + self.target.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTimes:
    """What the paper's own code takes for a row, in ms.

    That is the online simulation of keyboardAnt/distributed-speculative-inference (2024-10-18) on 2
    cores: 7 targets, 10 repeats (repaired: 8), at the best lookahead of 1, 5 and 10 that Equation 1
    allows (repaired: of 1, 3 and 5). It forks a process for every draft, sleeps instead of
    computing, and has no network.

    Attributes:
        si: SI as published: with one more target forward at every rejection.
        dsi: DSI as published: a rejection yields no token.
        repaired_si: SI with both put right.
        repaired_dsi: DSI with both put right.
    """

    si: int
    dsi: int
    repaired_si: int
    repaired_dsi: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table2Row:
    """One row of Table 2 (Timor et al. 2024, arXiv 2405.14105), or of what is measured like it.

    Attributes:
        name: Target and data set.
        servers: What it was measured on, as far as that matters here.
        paper_speed_up: DSI over SI, as the paper reports it; None of a row that it does not have.
        reference: What the paper's own code takes, likewise.
    """

    name: str
    servers: SimulatedServers
    paper_speed_up: float | None = None
    reference: ReferenceTimes | None = None


def _row(
    name: str,
    target: tuple[float, float],
    drafter: tuple[float, float],
    results: tuple[int, float],
    reference: tuple[int, int, int, int],
) -> Table2Row:
    acceptance_percent, paper_speed_up = results
    si, dsi, repaired_si, repaired_dsi = reference
    return Table2Row(
        name=name,
        servers=SimulatedServers(
            target=_latency(*target),
            drafter=_latency(*drafter),
            acceptance_rate=acceptance_percent / 100,
        ),
        paper_speed_up=paper_speed_up,
        reference=ReferenceTimes(
            si=si, dsi=dsi, repaired_si=repaired_si, repaired_dsi=repaired_dsi
        ),
    )


def _latency(step_ms: float, first_ratio: float) -> ServerLatency:
    return ServerLatency(
        first=round(step_ms * first_ratio * _NS_PER_MS), step=round(step_ms * _NS_PER_MS)
    )


# Of the target and of the drafter, TPOT in ms and TTFT / TPOT; acceptance in percent, and DSI over
# SI as reported; then the reference's times.
# The paper has no TTFT for Phi3 on Alpaca. Its prompts are about as short as HumanEval's, so that
# row's ratios stand in.
# fmt: off
TABLE2 = (
    _row("vicuna-13b/cnn-dm", (37.7, 5.36), (2.5, 1.04), (63, 1.47), (3607, 2430, 1427, 1285)),
    _row("vicuna-13b/alpaca", (33.3, 1.15), (2.5, 1.05), (58, 1.41), (3747, 2462, 1329, 1192)),
    _row("vicuna-7b/cnn-dm", (29.4, 4.53), (2.5, 1.06), (67, 1.29), (2504, 1735, 1168, 1056)),
    _row("vicuna-7b/alpaca", (26.0, 1.19), (2.5, 1.06), (59, 1.70), (3080, 2175, 1076, 1029)),
    _row("starcoder-15b/humaneval", (20.6, 1.35), (6.8, 1.19), (93, 1.92), (915, 573, 675, 530)),
    _row("starcoder-15b/mbpp", (21.0, 1.54), (6.8, 1.20), (90, 1.66), (1056, 657, 709, 517)),
    _row("phi3-14b/humaneval", (52.1, 1.29), (34.0, 1.23), (95, 1.41), (3062, 2100, 2219, 1851)),
    _row("phi3-14b/mbpp", (52.2, 1.43), (34.3, 1.27), (94, 1.37), (2995, 1987, 2190, 1883)),
    _row("phi3-14b/cnn-dm", (52.4, 4.77), (34.6, 3.88), (93, 1.39), (3521, 2247, 2641, 2069)),
    _row("phi3-14b/alpaca", (49.6, 1.29), (33.4, 1.23), (87, 1.60), (3841, 2381, 2386, 1952)),
)
# fmt: on

FASTER = (
    Table2Row(
        name="8b-on-h100",
        servers=SimulatedServers(
            target=_latency(7.0, 2.0), drafter=_latency(0.5, 2.0), acceptance_rate=0.8
        ),
    ),
)
"""Faster than the paper's: estimated latencies of an 8B in bf16 and of a small model on H100s."""
