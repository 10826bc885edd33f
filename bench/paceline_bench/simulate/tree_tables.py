"""What is said of trees: tables of rows, and what a grid shows."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from paceline_bench.simulate.trees import Gain
from paceline_bench.table import Column, markdown, times
from paceline_contract.words import counted
from paceline_protocol.methods import METHODS, Strategy, label_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paceline_bench.report import Results

_SELF = METHODS[Strategy.SELF_SPECULATIVE].label
_DSI = METHODS[Strategy.DISTRIBUTED].label
_AHEAD = label_of(Strategy.SPECULATIVE, drafts_ahead=True)
_NOISE = 2.0  # standard errors
_SLOWER = 1.01
_NOTABLE_ERROR = 0.005
_OVER_SI: Callable[[Gain], float] = attrgetter("over_si")
_OVER_CHAIN: Callable[[Gain], float] = attrgetter("over_chain")


def _with_error(name: str) -> Callable[[Gain], str]:
    """Return the writer of a ratio, with its standard error where that shows."""

    def words(gain: Gain) -> str:
        value, error = getattr(gain, name), getattr(gain, f"{name}_error")
        return f"{value:.2f}" + (f" ± {error:.2f}" if error >= _NOTABLE_ERROR else "")

    return words


_COLUMNS = (
    Column("", "name"),
    Column("method", "strategy"),
    Column("targets", "target_count"),
    Column(
        "width, branches",
        lambda gain: f"{gain.width}, {gain.branches}" if gain.width > 1 else None,
    ),
    Column("lookahead", lambda gain: gain.lookahead or None),
    Column("tokens/forward", "tokens_per_forward", "{:.2f}"),
    Column("target forwards' time", "time", "{:.2f}"),
    Column("over SI", _with_error("over_si")),
    Column(
        "over chains",
        lambda gain: _with_error("over_chain")(gain) if gain.width > 1 else None,
    ),
)
_PER_GPU = (
    Column("GPUs", "gpu_count"),
    Column("tokens a forward's time", "over_plain", "{:.2f}"),
    Column("per GPU", "per_gpu", "{:.2f}"),
)
_SUMMARY = (
    Column("", lambda gains: _setting(gains[0])),
    Column("over chains, at most", lambda gains: _at(max(gains, key=_OVER_CHAIN), _OVER_CHAIN)),
    Column("at least", lambda gains: _at(min(gains, key=_OVER_CHAIN), _OVER_CHAIN)),
    Column("slower cells", lambda gains: len(_slower(gains))),
    Column("over SI, at most", lambda gains: _at(max(gains, key=_OVER_SI), _OVER_SI)),
)


def gains_table(gains: Iterable[Gain], *, per_gpu: bool) -> str:
    """Lay them out in Markdown."""
    return markdown(gains, _COLUMNS + (_PER_GPU if per_gpu else ()))


def _at(gain: Gain, ratio: Callable[[Gain], float]) -> str:
    return f"{times(ratio(gain))} ({gain.name})"


def _with_trees(gains: Iterable[Gain]) -> list[list[Gain]]:
    """Return the gains of trees, by method, number of targets and shape."""
    own: dict[str, list[Gain]] = {}
    for gain in gains:
        if gain.width > 1:
            own.setdefault(_setting(gain), []).append(gain)
    return list(own.values())


def grid_findings(gains: Sequence[Gain]) -> Iterator[str]:
    """Say of each method, number of targets and shape where trees gain the most, and lose."""
    chains = [gain for gain in gains if gain.strategy == _AHEAD and gain.width == 1]
    if chains:
        best = max(chains, key=_OVER_SI)
        yield f"{_AHEAD}: up to {times(best.over_si)} of SI ({best.name})"
    for own in _with_trees(gains):
        setting, best, best_si = _setting(own[0]), max(own, key=_OVER_CHAIN), max(own, key=_OVER_SI)
        yield (
            f"{setting}: up to {times(best.over_chain)} of chains ({best.name}), up to"
            f" {times(best_si.over_si)} of SI ({best_si.name})"
        )
        if slower := _slower(own):
            worst = min(slower, key=_OVER_CHAIN)
            yield (
                f"{setting}: slower than chains by more than 1 % in {len(slower)} of {len(own)}"
                f" cells, at worst {times(worst.over_chain)} ({worst.name})"
            )


def _slower(gains: Iterable[Gain]) -> list[Gain]:
    """Return those that are behind chains by more than 1 %, beyond the noise."""
    return [
        gain for gain in gains if gain.over_chain * _SLOWER + _NOISE * gain.over_chain_error < 1
    ]


def simulate_trees(results: Results) -> str:
    """Say for a page what trees gain on the grid, by method, targets and shape."""
    if "simulate-trees" not in results:
        return ""
    content = results["simulate-trees"]
    gains = [Gain(**row) for row in content["rows"]]
    cell_count = len({gain.name for gain in gains})
    circumstances = content["circumstances"]
    words = f"`{circumstances['command']}`, {circumstances['date']}; {cell_count} cells.\n\n"
    return words + markdown(_with_trees(gains), _SUMMARY)


def self_finding(gains: Sequence[Gain]) -> str:
    """Say what a target's own guesses give it, and in how many cells it is ahead of chains."""
    own = [gain for gain in gains if gain.strategy == _SELF]
    first = own[0]
    words = (
        f"{_SELF}: {first.tokens_per_forward:.2f} tokens for each forward,"
        f" {times(first.over_plain)} of plain decoding"
    )
    cells = {gain.name: gain.over_si for gain in own}
    for rival in dict.fromkeys(_setting(gain) for gain in gains if gain.strategy != _SELF):
        others = [gain for gain in gains if _setting(gain) == rival]
        ahead = sum(cells[gain.name] > gain.over_si for gain in others)
        words += f"; ahead of {rival} in {ahead} of {len(others)}"
    return words


def _setting(gain: Gain) -> str:
    targets = f", {counted(gain.target_count, 'target')}" if gain.strategy == _DSI else ""
    shape = f", width {gain.width}, {gain.branches} branches" if gain.width > 1 else ""
    return f"{gain.strategy}{targets}{shape}"
