"""Write what README.md and docs/ say of measurements, or check that it is fresh.

Whatever is between the marks `<!-- measured: NAME -->` and `<!-- /measured -->` comes from
results/*.json, which the benchmarks write (`make bench`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paceline_bench.gpu_tables import gpu_forwards, gpu_texts
from paceline_bench.load.peer_tables import load_models
from paceline_bench.load.tables import load, load_scaling, load_streams
from paceline_bench.pair.tables import (
    pair_acceptance,
    pair_contest,
    pair_forwards,
    pair_headline,
    pair_sharing,
    pair_summary,
)
from paceline_bench.plan.tables import plan
from paceline_bench.simulate.tables import simulate
from paceline_bench.simulate.tree_tables import simulate_trees
from paceline_bench.table2.grid_tables import grid
from paceline_bench.table2.tables import (
    table2,
    table2_breakdown,
    table2_headline,
    table2_reference,
    table2_restarts,
    table2_summary,
)
from paceline_bench.table2.tree_tables import table2_trees, table2_trees_headline
from peer_engines.summary import published

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_bench.report import Results, Row

_FOLDER = Path(__file__).parent
PAGES = tuple(
    _FOLDER.parent / name
    for name in ("README.md", "docs/performance.md", "docs/performance-tables.md")
)
_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
BLOCKS: dict[str, Callable[[Results], str]] = {
    "simulate": simulate,
    "simulate-trees": simulate_trees,
    "plan": plan,
    "table2-headline": table2_headline,
    "table2-summary": table2_summary,
    "table2": table2,
    "table2-restarts": table2_restarts,
    "table2-breakdown": table2_breakdown,
    "table2-reference": table2_reference,
    "table2-trees": table2_trees,
    "table2-trees-headline": table2_trees_headline,
    "grid": grid,
    "load": load,
    "load-models": load_models,
    "load-streams": load_streams,
    "load-scaling": load_scaling,
    "pair-summary": pair_summary,
    "pair-contest": pair_contest,
    "pair-forwards": pair_forwards,
    "pair-acceptance": pair_acceptance,
    "pair-sharing": pair_sharing,
    "pair-gpu-contest": partial(pair_contest, name="pair-gpu"),
    "random-gpu-forwards": partial(pair_forwards, name="random-gpu"),
    "gpu-forwards": gpu_forwards,
    "gpu-texts": gpu_texts,
    "peers": published,
    "pair-wide-headline": partial(pair_headline, name="pair-wide"),
    "pair-wide-summary": partial(pair_summary, name="pair-wide"),
    "pair-wide-contest": partial(pair_contest, name="pair-wide"),
    "pair-wide-forwards": partial(pair_forwards, name="pair-wide"),
}


def page(text: str, results: Results) -> str:
    """Return a page with what is between its marks as the results have it.

    Raises:
        KeyError: A mark names what is not known.
    """

    def filled(found: re.Match[str]) -> str:
        content = BLOCKS[found[2]](results).strip()
        return f"{found[1]}\n{content}\n\n{found[3]}" if content else f"{found[1]}{found[3]}"

    return _BLOCK.sub(filled, text)


def read_results(folder: Path = _FOLDER / "results") -> dict[str, Row]:
    """Read what the benchmarks have written."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    results = read_results()
    fresh = {path: page(path.read_text(encoding="utf-8"), results) for path in PAGES}
    stale = [path for path, text in fresh.items() if path.read_text(encoding="utf-8") != text]
    if check and stale:
        print("These pages are stale; run `make figures`:", *stale, sep="\n  ")
        return 1
    for path in stale:
        path.write_text(fresh[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
