"""What is said of trees: tables of rows, and what a grid shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_bench.report import markdown_table, table, times
from paceline_bench.simulate.trees import Gain
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


_COLUMNS: dict[str, Callable[[Gain], str]] = {
    "": lambda gain: gain.name,
    "method": lambda gain: gain.strategy,
    "targets": lambda gain: str(gain.target_count),
    "width, branches": lambda gain: f"{gain.width}, {gain.branches}" if gain.width > 1 else "-",
    "lookahead": lambda gain: str(gain.lookahead or "-"),
    "tokens/forward": lambda gain: f"{gain.tokens_per_forward:.2f}",
    "target forwards' time": lambda gain: f"{gain.time:.2f}",
    "over SI": lambda gain: _with_error(gain.over_si, gain.over_si_error),
    "over chains": lambda gain: (
        _with_error(gain.over_chain, gain.over_chain_error) if gain.width > 1 else "-"
    ),
}
_PER_GPU: dict[str, Callable[[Gain], str]] = {
    "GPUs": lambda gain: str(gain.gpu_count),
    "tokens a forward's time": lambda gain: f"{gain.over_plain:.2f}",
    "per GPU": lambda gain: f"{gain.per_gpu:.2f}",
}


def gains_table(gains: Iterable[Gain], *, per_gpu: bool) -> str:
    """Lay them out in Markdown."""
    return table(gains, _COLUMNS | (_PER_GPU if per_gpu else {}))


def grid_findings(gains: Sequence[Gain]) -> Iterator[str]:
    """Say of each method, number of targets and shape where trees gain the most, and lose."""
    chains = [gain for gain in gains if gain.strategy == _AHEAD and gain.width == 1]
    if chains:
        best = max(chains, key=lambda gain: gain.over_si)
        yield f"{_AHEAD}: up to {times(best.over_si)} of SI ({best.name})"
    ways = dict.fromkeys(_way(gain) for gain in gains if gain.width > 1)
    for way in ways:
        own = [gain for gain in gains if _way(gain) == way]
        best, best_si = (
            max(own, key=lambda gain: gain.over_chain),
            max(own, key=lambda gain: gain.over_si),
        )
        yield (
            f"{way}: up to {times(best.over_chain)} of chains ({best.name}), up to"
            f" {times(best_si.over_si)} of SI ({best_si.name})"
        )
        slower = _slower(own)
        if slower:
            worst = min(slower, key=lambda gain: gain.over_chain)
            yield (
                f"{way}: slower than chains by more than 1 % in {len(slower)} of {len(own)} cells,"
                f" at worst {times(worst.over_chain)} ({worst.name})"
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
    ways = dict.fromkeys(_way(gain) for gain in gains if gain.width > 1)
    lines = [_grid_line([gain for gain in gains if _way(gain) == way], name=way) for way in ways]
    cell_count = len({gain.name for gain in gains})
    circumstances = content["circumstances"]
    words = f"`{circumstances['command']}`, {circumstances['date']}; {cell_count} cells.\n\n"
    headings = ("", "over chains, at most", "at least", "slower cells", "over SI, at most")
    return words + markdown_table(headings, lines)


def _grid_line(gains: Sequence[Gain], *, name: str) -> list[str]:
    most = max(gains, key=lambda gain: gain.over_chain)
    least = min(gains, key=lambda gain: gain.over_chain)
    most_si = max(gains, key=lambda gain: gain.over_si)
    return [
        name,
        f"{times(most.over_chain)} ({most.name})",
        f"{times(least.over_chain)} ({least.name})",
        str(len(_slower(gains))),
        f"{times(most_si.over_si)} ({most_si.name})",
    ]


def self_finding(gains: Sequence[Gain]) -> str:
    """Say what a target's own guesses give it, and in how many cells it is ahead of chains."""
    own = [gain for gain in gains if gain.strategy == _SELF]
    first = own[0]
    words = (
        f"{_SELF}: {first.tokens_per_forward:.2f} tokens for each forward,"
        f" {times(first.over_plain)} of plain decoding"
    )
    cells = {gain.name: gain.over_si for gain in own}
    for rival in dict.fromkeys(_way(gain) for gain in gains if gain.strategy != _SELF):
        others = [gain for gain in gains if _way(gain) == rival]
        ahead = sum(cells[gain.name] > gain.over_si for gain in others)
        words += f"; ahead of {rival} in {ahead} of {len(others)}"
    return words


def _way(gain: Gain) -> str:
    targets = f", {counted(gain.target_count, 'target')}" if gain.strategy == _DSI else ""
    shape = f", width {gain.width}, {gain.branches} branches" if gain.width > 1 else ""
    return f"{gain.strategy}{targets}{shape}"


def _with_error(value: float, error: float) -> str:
    return f"{value:.2f}" + (f" ± {error:.2f}" if error >= 0.005 else "")
