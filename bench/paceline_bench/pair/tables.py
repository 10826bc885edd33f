"""What is printed and published of a pair, from what was kept of it (results.py)."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from statistics import mean
from typing import TYPE_CHECKING

from paceline_bench.gpus import per_gpu
from paceline_bench.pair.contest import Group, Method, times_as_fast
from paceline_bench.report import Spread, circumstances_line, markdown_table, speed, table, times
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from paceline_bench.report import Results, Row

    Columns = dict[str, Callable[[Row], str]]
    Content = Mapping[str, Any]

_PLAIN = Method.PLAIN.value


def report(content: Content, *, per_gpu_targets: int | None = None) -> str:
    """Lay everything out in Markdown; parts may be missing.

    Args:
        content: See results.py.
        per_gpu_targets: To say also what each device would make of it: the targets of DSI where it
            was not asked for fewer.
    """
    gpu_columns = {} if per_gpu_targets is None else _per_gpu(per_gpu_targets)
    sections = [_latencies(content["models"]), _rows(content["models"])]
    if "acceptance" in content:
        sections.append(_acceptance(content["acceptance"]))
    if rows := content["rows"]:
        sections += [contest_tables(rows, gpu_columns), _split(rows)]
    if content["sharing"]:
        sections.append(_sharing(content["sharing"]))
    if strategies := content["sharing_strategies"]:
        words = "One text at a time, drafter and targets on that hardware:\n\n"
        over_plain: Columns = {"÷ non-SI": lambda row: _times_as_fast(row, strategies[0])}
        columns = {
            "": _NAME,
            **_SPEED,
            **gpu_columns,
            "tokens/forward": _tokens_per_forward,
            **over_plain,
        }
        sections.append(words + table(strategies, {**columns, "text": _verdict}))
    return "\n".join(sections)


def _latencies(models: Content) -> str:
    target, drafter = models["target"], models["drafter"]
    rows = [
        [
            words,
            *(str(Spread(**model[key])) for model in (target, drafter)),
            f"{drafter[key]['median'] / target[key]['median']:.3f}",
        ]
        for words, key in (
            ("first token (TTFT), ms", "ttft_ms"),
            ("each later one (TPOT), ms", "tpot_ms"),
        )
    ]
    ratios = (
        f"{model['ttft_ms']['median'] / model['tpot_ms']['median']:.2f}"
        for model in (target, drafter)
    )
    texts = target["ttft_ms"]["count"]
    tokens = 1 + target["tpot_ms"]["count"] // texts
    where = f"{target['dtype']} on {target['device']}"
    return f"Latency by the paper's method, {texts} texts of {tokens} tokens:\n\n" + markdown_table(
        (where, target["name"], drafter["name"], "ratio"), [*rows, ["TTFT ÷ TPOT", *ratios, ""]]
    )


def _rows(models: Content) -> str:
    rows = []
    for role, model in models.items():
        one, *_ = times_ms = list(model["rows_ms"].values())
        rows.append([f"{role}, ms", *(f"{time_ms:.2f}" for time_ms in times_ms)])
        rows.append(["÷ one row", *(f"{time_ms / one:.2f}" for time_ms in times_ms)])
    target = models["target"]
    heading = f"A forward by its rows, after {target['context']} tokens:\n\n"
    return heading + markdown_table(["rows", *map(str, target["rows_ms"])], rows)


def _acceptance(found: Row) -> str:
    runs, shares = found["common_runs"], found["accepted_shares"]
    accepted = found["accepted_per_block"]
    estimates = markdown_table(
        ("acceptance, greedy", "rate", "from"),
        [
            [
                "common runs (the paper's estimator)",
                f"{found['rate_by_common_runs']:.3f}",
                f"{len(runs)} prompts, {mean(runs):.1f} of {found['tokens']} tokens in common",
            ],
            [
                "verdicts",
                f"{found['rate_by_verdicts']:.3f}",
                f"{found['blocks']} blocks of up to {found['lookahead']}, {accepted:.2f} accepted",
            ],
        ],
    )
    positions = markdown_table(
        ["first n draft tokens", *(str(n) for n in range(1, len(shares) + 1))],
        [["all right, share of blocks", *(f"{share:.3f}" for share in shares)]],
    )
    return f"{estimates}\n{positions}"


def contest_tables(every: Sequence[Row], more: Columns | None = None) -> str:
    """Lay out ways to decode (`results.way_rows`), a table for each group, beside the first one.

    Args:
        more: Columns beside speeds.
    """
    bare, plain = every[0], {row["group"]: row for row in every if row["method"] == _PLAIN}
    columns: Columns = {
        **_SPEED,
        **(more or {}),
        "TTFT ms": _first_token,
        "tokens/forward": _tokens_per_forward,
        "acceptance": lambda row: _told(row["acceptance_rate"], ".3f"),
        f"÷ {bare['name']}": lambda row: _times_as_fast(row, bare),
        "÷ own plain": lambda row: _times_as_fast(row, plain[row["group"]]),
        "÷ transformers, same method": lambda row: _times_as_fast(row, _peer(row, every)),
        "text": _verdict,
    }
    groups = groupby(every, itemgetter("group"))
    return "\n".join(table(rows, {group: _NAME, **columns}) for group, rows in groups)


def _split(rows: Sequence[Row]) -> str:
    """Lay out where the time of a token goes, for what two groups or more do."""
    headings = (
        *("ms for each token", Group.LIBRARY.value),
        *("our engine: forwards", "around them"),
        *("the services: forwards", "around them", "around each verification"),
    )
    lines = []
    for method, lookahead in dict.fromkeys((row["method"], row["lookahead"]) for row in rows):
        if method in {_PLAIN, Method.SPECULATIVE.value}:
            name = "non-SI" if lookahead is None else f"SI, lookahead {lookahead}"
            library, engine, services = (_find(rows, each, method, lookahead) for each in Group)
            whole = None if library is None else library["ms_per_token"]
            around = None if services is None else _rest(services) * services["tokens_per_forward"]
            parts = (*_forwards_and_rest(engine), *_forwards_and_rest(services))
            lines.append([name, _told(whole, ".2f"), *parts, _told(around, ".2f")])
    return markdown_table(headings, lines)


def _forwards_and_rest(row: Row | None) -> tuple[str, str]:
    if row is None or row["forward_ms_per_token"] is None:
        return "-", "-"
    return f"{row['forward_ms_per_token']:.2f}", f"{_rest(row):.2f}"


def _rest(row: Row) -> float:
    rest_ms: float = mean(row["repeats_ms_per_token"]) - (row["forward_ms_per_token"] or 0.0)
    return rest_ms


def _sharing(sharing: Sequence[Row]) -> str:
    columns: Columns = {
        "targets that compute at once": lambda row: str(row["texts"]),
        "forward ms": lambda row: f"{row['forward_ms']:.2f}",
        "÷ alone": lambda row: f"{row['forward_ms'] / sharing[0]['forward_ms']:.2f}",
        "tokens/s, all": lambda row: f"{row['tokens_per_second']:.1f}",
    }
    words = "Model processes on the same hardware, plain decoding:\n\n"
    return words + table(sharing, columns)


def _verdict(row: Row) -> str:
    """Say how equal the texts were."""
    if row["different"]:
        return f"{row['different']} DIFFERENT"
    if row["near_ties"]:
        return f"identical but for {counted(row['near_ties'], 'near-tie')}"
    return "identical"


def _told(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _first_token(row: Row) -> str:
    return _told(row["ttft_ms"], ".0f")


def _tokens_per_forward(row: Row) -> str:
    return f"{row['tokens_per_forward']:.2f}"


def _if_identical(say: Callable[[Row], str]) -> Callable[[Row], str]:
    """Leave a speed out where a text differs."""
    return lambda row: say(row) if row["identical"] else "-"


def _range_ms(row: Row) -> str:
    every = row["repeats_ms_per_token"]
    return f"{min(every):.2f} to {max(every):.2f}"


_NAME: Callable[[Row], str] = itemgetter("name")
_SPEED: Columns = {
    "tokens/s": _if_identical(lambda row: f"{row['tokens_per_second']:.1f}"),
    "ms/token": _if_identical(lambda row: f"{row['ms_per_token']:.2f}"),
    "repeats": _if_identical(_range_ms),
}


def _per_gpu(target_count: int) -> Columns:
    """Say how many devices a way would have if each server had one, and what each makes."""

    def gpus(row: Row) -> int:
        if row["method"] != Method.DISTRIBUTED.value:
            return 1
        return (row["targets"] or target_count) + 1

    return per_gpu(gpus)


def pair_headline(results: Results, name: str) -> str:
    """What speculation gains with real forwards, in a sentence or two."""
    rows = results[name]["rows"]

    def ratio(method: Method, other: Group, other_method: Method) -> str:
        own = _fastest(rows, Group.SERVICES, method)
        return _times_as_fast(own, _fastest(rows, other, other_method)).rstrip("x")

    speculation, plain = Method.SPECULATIVE, Method.PLAIN
    return (
        f"SI is **{ratio(speculation, Group.SERVICES, plain)} times as fast as plain decoding**,"
        f" {ratio(speculation, Group.LIBRARY, plain)} times as fast as `generate` of"
        f" `transformers`, and {ratio(speculation, Group.LIBRARY, speculation)} times as fast as"
        " its speculation (assisted generation), each at its better lookahead. DSI, all of whose"
        f" model processes share the two cores: {ratio(Method.DISTRIBUTED, Group.SERVICES, plain)}"
        " times as fast as plain decoding."
    )


def _fastest(rows: Iterable[Row], group: Group, method: Method) -> Row:
    own = [row for row in rows if (row["group"], row["method"]) == (group.value, method.value)]
    return max(own, key=itemgetter("tokens_per_second"))


def pair_summary(results: Results, name: str = "pair") -> str:
    """What a pair does in different hands, for those in a hurry."""
    rows = results[name]["rows"]
    lookaheads = sorted({row["lookahead"] for row in rows if row["lookahead"]})
    columns = ["bare", "plain", *(f"lookahead {count}" for count in lookaheads), "other"]
    lines = []
    for group, own in groupby(rows, itemgetter("group")):
        cells = dict.fromkeys(columns, "-")
        for row in own:
            told = speed(row)
            match Method(row["method"]):
                case Method.SPECULATIVE:
                    cells[f"lookahead {row['lookahead']}"] = told
                case Method.BARE | Method.PLAIN as method:
                    cells[method.value] = told
                case _:
                    cells["other"] = f"{row['name'].removeprefix('generate, ')}: {told}"
        lines.append([group, *cells.values()])
    return markdown_table(("", "bare loop", *columns[1:]), lines)


def pair_contest(results: Results, name: str = "pair") -> str:
    """Every way to decode with a pair."""
    every = results[name]["rows"]
    columns: Columns = {
        "tokens/s": speed,
        "repeats": _speed_range,
        "TTFT ms": _first_token,
        "tokens per forward": _tokens_per_forward,
        "to the bare loop": lambda row: _times_as_fast(row, every[0]),
        "to transformers, same method": lambda row: _times_as_fast(row, _peer(row, every)),
    }
    sections = [circumstances_line(results[name]) + "\n"]
    for group, rows in groupby(every, itemgetter("group")):
        sections.append(table(rows, {group: _NAME, **columns}))
    return "\n".join(sections)


def _times_as_fast(row: Row, reference: Row | None) -> str:
    if reference is None or not (row["identical"] and reference["identical"]):
        return "-"
    own, other = row["repeats_ms_per_token"], reference["repeats_ms_per_token"]
    return times(times_as_fast(own, other))


def _speed_range(row: Row) -> str:
    every = row["repeats_ms_per_token"]
    return f"{1e3 / max(every):.0f} to {1e3 / min(every):.0f}"


def _peer(row: Row, rows: Iterable[Row]) -> Row | None:
    """Find what the library takes for the same; for plain decoding its fastest way, bare."""
    if row["group"] == Group.LIBRARY.value:
        return None
    method = Method.BARE.value if row["method"] == _PLAIN else row["method"]
    return _find(rows, Group.LIBRARY, method, row["lookahead"])


def _find(rows: Iterable[Row], group: Group, method: str, lookahead: int | None) -> Row | None:
    wanted = (group.value, method, lookahead)
    return next((it for it in rows if (it["group"], it["method"], it["lookahead"]) == wanted), None)


def pair_forwards(results: Results, name: str = "pair") -> str:
    """What forwards of a pair take."""
    models: dict[str, Row] = results[name]["models"]
    counts = list(models["target"]["rows_ms"])
    lines = [
        [
            role,
            _median_and_spread(model["ttft_ms"]),
            _median_and_spread(model["tpot_ms"]),
            *(f"{model['rows_ms'][count]:.2f}" for count in counts),
        ]
        for role, model in models.items()
    ]
    rows = [counted(int(count), "row") for count in counts]
    return markdown_table(("ms", "TTFT", "TPOT", *rows), lines)


def _median_and_spread(found: Row) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


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
    """What processes on the same hardware take from each other."""
    content = results["pair"]
    lines = [
        [str(each["texts"]), f"{each['forward_ms']:.2f}", f"{each['tokens_per_second']:.0f}"]
        for each in content["sharing"]
    ]
    headings = ("targets that compute at once", "forward, ms", "tokens/s, all")
    tables = [markdown_table(headings, lines)]
    if ways := content.get("sharing_strategies"):
        columns: Columns = {
            "one text": _NAME,
            "tokens/s": speed,
            "repeats": _speed_range,
            "tokens per forward": _tokens_per_forward,
            "to non-SI": lambda way: _times_as_fast(way, ways[0]),
        }
        tables.append(table(ways, columns))
    return "\n".join(tables)
