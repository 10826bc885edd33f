"""Write what README.md and docs/performance.md say of measurements, or check that it is fresh.

Whatever is between the marks `<!-- measured: NAME -->` and `<!-- /measured -->` comes from
results/*.json, which the benchmarks write (`make bench`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline_bench.pair import Group, Method
from paceline_bench.report import markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Row: TypeAlias = "dict[str, Any]"
Results: TypeAlias = "Mapping[str, Row]"
"""The content of each results file, by its name without suffix."""

_FOLDER = Path(__file__).parent
PAGES = (_FOLDER.parent / "README.md", _FOLDER.parent / "docs" / "performance.md")
_BLOCK = re.compile(r"(<!-- measured: (\S+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
_STRATEGIES = ("non-SI", "SI", "DSI")
_PLAIN_COLUMN = "plain"


def table2_summary(results: Results) -> str:
    """Table 2 for those in a hurry."""
    rows = list(_table2_rows(results["table2"]))
    headings = (
        "",
        *(f"{name}, ms" for name in _STRATEGIES),
        *("DSI over SI", "ideal", "DSI over non-SI"),
    )
    lines = [
        [
            name,
            *(f"{by_strategy[strategy]['median_ms']:.0f}" for strategy in _STRATEGIES),
            _times(by_strategy["DSI"].get("speed_up_over_si")),
            _times(by_strategy["DSI"].get("ideal_speed_up_over_si")),
            _times(by_strategy["DSI"].get("speed_up_over_non_si")),
        ]
        for name, by_strategy in rows
    ]
    return markdown_table(headings, lines)


def table2(results: Results) -> str:
    """Table 2 with floors and ideals."""
    content = results["table2"]
    headings = ("row", *(part for name in _STRATEGIES for part in (f"{name} ms", "÷ floor")))
    lines = [
        [
            name,
            *_over_floors(by_strategy),
            f"{by_strategy['DSI']['online_over_ideal']:.3f}",
            _times(by_strategy["DSI"].get("speed_up_over_si")),
            _times(by_strategy["DSI"].get("ideal_speed_up_over_si")),
            _times(by_strategy["DSI"]["paper_speed_up_over_si"]),
        ]
        for name, by_strategy in _table2_rows(content)
    ]
    more = ("DSI ÷ ideal", "DSI over SI", "ideal", "paper")
    return f"{_circumstances(content)}\n\n{markdown_table((*headings, *more), lines)}"


def _table2_rows(content: Row) -> Iterator[tuple[str, dict[str, Row]]]:
    for name, rows in groupby(content["rows"], itemgetter("name")):
        yield name, {row["strategy"]: row for row in rows}


def _over_floors(by_strategy: Mapping[str, Row]) -> Iterator[str]:
    for strategy in _STRATEGIES:
        yield f"{by_strategy[strategy]['median_ms']:.0f}"
        yield f"{by_strategy[strategy]['online_over_floor']:.3f}"


def load(results: Results) -> str:
    """The throughput of every strategy, by streams and orchestrators."""
    content = results["load"]
    names = list(dict.fromkeys(row["strategy"] for row in content["rows"]))
    lines = []
    for (orchestrators, streams), rows in groupby(
        content["rows"], itemgetter("orchestrator_count", "stream_count")
    ):
        by_strategy = {row["strategy"]: row for row in rows}
        speeds = [_tokens_per_second(by_strategy[name]) for name in names]
        chosen = by_strategy["AUTO"]["chosen"] if "AUTO" in by_strategy else {}
        words = ", ".join(f"{count} {name}" for name, count in sorted(chosen.items()))
        lines.append([str(streams), str(orchestrators), *speeds, words])
    headings = ("streams", "orchestrators", *names, "AUTO decoded with")
    return f"{_circumstances(content)}. Tokens/s:\n\n{markdown_table(headings, lines)}"


def pair_summary(results: Results) -> str:
    """What the bundled pair does in different hands, for those in a hurry."""
    rows = results["pair"]["rows"]
    lookaheads = sorted({row["lookahead"] for row in rows if row["lookahead"]})
    columns = ["bare", "plain", *(f"lookahead {count}" for count in lookaheads), "other"]
    lines = []
    for group, own in groupby(rows, itemgetter("group")):
        cells = dict.fromkeys(columns, "-")
        for row in own:
            speed = _tokens_per_second(row)
            match Method(row["method"]):
                case Method.SPECULATIVE:
                    cells[f"lookahead {row['lookahead']}"] = speed
                case Method.BARE | Method.PLAIN as method:
                    cells[method.value] = speed
                case _:
                    cells["other"] = f"{row['name'].removeprefix('generate, ')}: {speed}"
        lines.append([group, *cells.values()])
    return markdown_table(("", "bare loop", *columns[1:]), lines)


def pair_contest(results: Results) -> str:
    """Every way to decode with the bundled pair."""
    content = results["pair"]
    bare = content["rows"][0]
    sections = [_circumstances(content) + "\n"]
    for group, rows in groupby(content["rows"], itemgetter("group")):
        headings = (
            group,
            "tokens/s",
            "repeats",
            "TTFT ms",
            "tokens per forward",
            "to the bare loop",
        )
        lines = [
            [
                row["name"],
                _tokens_per_second(row),
                _repeats(row),
                "-" if row["ttft_ms"] is None else f"{row['ttft_ms']:.0f}",
                f"{row['tokens_per_forward']:.2f}",
                _ratio(row, bare),
                _ratio(row, _peer(row, content["rows"])),
            ]
            for row in rows
        ]
        sections.append(markdown_table((*headings, "to transformers, same method"), lines))
    return "\n".join(sections)


def _peer(row: Row, rows: Iterable[Row]) -> Row | None:
    """Find what the library takes for the same; for plain decoding its fastest way, bare."""
    if row["group"] == Group.LIBRARY.value:
        return None
    method = Method.BARE.value if row["method"] == Method.PLAIN.value else row["method"]
    wanted = (Group.LIBRARY.value, method, row["lookahead"])
    return next((it for it in rows if (it["group"], it["method"], it["lookahead"]) == wanted), None)


def pair_forwards(results: Results) -> str:
    """What forwards of the bundled pair take."""
    models: dict[str, Row] = results["pair"]["models"]
    counts = list(models["target"]["rows_ms"])
    lines = [
        [
            role,
            f"{model['ttft_ms']['median']:.1f}",
            f"{model['tpot_ms']['median']:.2f}",
            *(f"{model['rows_ms'][count]:.2f}" for count in counts),
        ]
        for role, model in models.items()
    ]
    rows = [f"{count} row{'s' if count != '1' else ''}" for count in counts]
    return markdown_table(("ms", "TTFT", "TPOT", *rows), lines)


def pair_acceptance(results: Results) -> str:
    """How often the bundled drafter is right."""
    found = results["pair"]["acceptance"]
    shares = found["accepted_shares"]
    rates = (
        f"Acceptance, greedy: {found['rate_by_common_runs']:.3f} by the paper's estimator from"
        f" {len(found['common_runs'])} prompts of {found['tokens']} tokens,"
        f" {found['rate_by_verdicts']:.3f} by {found['blocks']} verdicts on blocks of up to"
        f" {found['lookahead']}.\n\n"
    )
    headings = ("first n draft tokens", *map(str, range(1, len(shares) + 1)))
    line = ["all right, share of blocks", *(f"{share:.2f}" for share in shares)]
    return rates + markdown_table(headings, [line])


def pair_sharing(results: Results) -> str:
    """What a forward takes while others compute on the same cores."""
    lines = [
        [str(each["texts"]), f"{each['forward_ms']:.2f}", f"{each['tokens_per_second']:.0f}"]
        for each in results["pair"]["sharing"]
    ]
    return markdown_table(("targets that compute at once", "forward, ms", "tokens/s, all"), lines)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "table2-summary": table2_summary,
    "table2": table2,
    "load": load,
    "pair-summary": pair_summary,
    "pair-contest": pair_contest,
    "pair-forwards": pair_forwards,
    "pair-acceptance": pair_acceptance,
    "pair-sharing": pair_sharing,
}


def _circumstances(content: Row) -> str:
    found = content["circumstances"]
    return (
        f"`{found['command']}`, {found['date']}, {found['machine']}, Python {found['python']};"
        f" load average at the end {found['load_average']:g}"
    )


def _tokens_per_second(row: Row) -> str:
    """A speed; without equality there is none. With a star if the machine was short of CPU."""
    mark = "*" if row.get("limit") else ""
    return f"{row['tokens_per_second']:.0f}{mark}" if row["identical"] else "text differs"


def _repeats(row: Row) -> str:
    times = row["repeats_ms_per_token"]
    return f"{1e3 / max(times):.0f} to {1e3 / min(times):.0f}"


def _ratio(row: Row, reference: Row | None) -> str:
    if reference is None or not (row["identical"] and reference["identical"]):
        return "-"
    return _times(row["tokens_per_second"] / reference["tokens_per_second"])


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def page(text: str, results: Results) -> str:
    """Return a page with what is between its marks as the results have it.

    Raises:
        KeyError: A mark names what is not known.
    """
    return _BLOCK.sub(
        lambda found: f"{found[1]}\n{BLOCKS[found[2]](results).strip()}\n\n{found[3]}", text
    )


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
