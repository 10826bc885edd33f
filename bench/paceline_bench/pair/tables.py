"""What is printed and published of a pair, from what was kept of it (results.py)."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from statistics import mean
from typing import TYPE_CHECKING

from paceline_bench.gpus import per_gpu
from paceline_bench.pair.contest import Group, Method, times_as_fast
from paceline_bench.report import circumstances_line
from paceline_bench.table import Column, markdown, speed, times
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from paceline_bench.report import Results, Row

    Content = Mapping[str, Any]

_PLAIN = Method.PLAIN.value


def report(content: Content, *, per_gpu_targets: int | None = None) -> str:
    """Lay everything out in Markdown; parts may be missing.

    Args:
        content: See results.py.
        per_gpu_targets: To say also what each device would make of it: the targets of DSI where
            the request names no smaller number.
    """
    gpu_columns = () if per_gpu_targets is None else _per_gpu(per_gpu_targets)
    sections = [_conditions(content["models"]), _forwards(content["models"], with_ratios=True)]
    if "acceptance" in content:
        sections.append(_acceptance(content["acceptance"]))
    if rows := content["rows"]:
        sections += [contest_tables(rows, gpu_columns), _split(rows)]
    if content["sharing"]:
        alone_ms = content["sharing"][0]["forward_ms"]
        over_alone = Column("÷ alone", lambda row: row["forward_ms"] / alone_ms, "{:.2f}")
        sections += [
            "Model processes on the same hardware, plain decoding:\n",
            markdown(content["sharing"], (*_SHARING, over_alone)),
        ]
    if strategies := content["sharing_strategies"]:
        sections += [
            "One text at a time, drafter and targets on that hardware:\n",
            _shared_strategies(strategies, (*gpu_columns, _TEXT)),
        ]
    return "\n".join(sections)


def _conditions(models: Content) -> str:
    target, drafter = models["target"], models["drafter"]
    texts = target["ttft_ms"]["count"]
    tokens = 1 + target["tpot_ms"]["count"] // texts
    return (
        f"{target['name']} and {drafter['name']}, {target['dtype']} on {target['device']}: latency"
        f" by the paper's method, {texts} texts of {tokens} tokens; forwards after"
        f" {target['context']} tokens\n"
    )


def _forwards(models: Mapping[str, Row], *, with_ratios: bool = False) -> str:
    """Lay out what forwards of both models take.

    Args:
        models: By role.
        with_ratios: Whether to say also how the models compare, and the numbers of rows.
    """
    counts = list(models["target"]["rows_ms"])
    lines = [
        {
            "name": role,
            **{kind: _median_and_spread(model[kind]) for kind in ("ttft_ms", "tpot_ms")},
            **{count: f"{model['rows_ms'][count]:.2f}" for count in counts},
        }
        for role, model in models.items()
    ]
    if with_ratios:
        medians = {
            role: {kind: model[kind]["median"] for kind in ("ttft_ms", "tpot_ms")}
            | model["rows_ms"]
            for role, model in models.items()
        }
        target = medians["target"]
        lines += [_quotients("drafter ÷ target", medians["drafter"], target)]
        lines += [
            _quotients(f"{role}, ÷ TPOT", own, dict.fromkeys(own, own["tpot_ms"]))
            for role, own in medians.items()
        ]
    rows = (Column(counted(int(count), "row"), count) for count in counts)
    columns = (Column("ms", "name"), Column("TTFT", "ttft_ms"), Column("TPOT", "tpot_ms"), *rows)
    return markdown(lines, columns)


def _quotients(name: str, own: Mapping[str, float], other: Mapping[str, float]) -> Row:
    return {"name": name} | {key: f"{value / other[key]:.3f}" for key, value in own.items()}


def _median_and_spread(found: Row) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _acceptance(found: Row) -> str:
    shares = {str(n): share for n, share in enumerate(found["accepted_shares"], 1)}
    columns = [Column("first n draft tokens", lambda _: "all right, share of blocks")]
    columns += [Column(n, n, "{:.2f}") for n in shares]
    return (
        f"Acceptance, greedy: {found['rate_by_common_runs']:.3f} by the paper's estimator from"
        f" {len(found['common_runs'])} prompts of {found['tokens']} tokens,"
        f" {found['rate_by_verdicts']:.3f} by {found['blocks']} verdicts on blocks of up to"
        f" {found['lookahead']}.\n\n{markdown([shares], columns)}"
    )


_TOKENS_PER_FORWARD = Column("tokens per forward", "tokens_per_forward", "{:.2f}")


def _speed_range(row: Row) -> str:
    every = row["repeats_ms_per_token"]
    return f"{1e3 / max(every):.0f} to {1e3 / min(every):.0f}"


_SPEED = (Column("tokens/s", speed), Column("repeats", _speed_range))


def _verdict(row: Row) -> str:
    """Say how equal the texts were."""
    if row["different"]:
        return f"{row['different']} DIFFERENT"
    if row["near_ties"]:
        return f"identical but for {counted(row['near_ties'], 'near-tie')}"
    return "identical"


_TEXT = Column("text", _verdict)


def contest_tables(every: Sequence[Row], more: Sequence[Column] = ()) -> str:
    """Lay out variants (`results.variant_rows`), a table for each group, beside the first one.

    Args:
        every: Rows, each group's together.
        more: Columns that the page does not have.
    """
    plain = {row["group"]: row for row in every if row["method"] == _PLAIN}
    columns = (
        Column("ms/token", lambda row: row["ms_per_token"] if row["identical"] else None, "{:.2f}"),
        Column("acceptance", "acceptance_rate", "{:.3f}"),
        Column("to own plain", lambda row: _times_as_fast(row, plain[row["group"]]), "{:.2f}x"),
        *more,
        _TEXT,
    )
    return _contest(every, columns)


def _contest(every: Sequence[Row], more: Sequence[Column] = ()) -> str:
    columns = (
        *_SPEED,
        Column("TTFT ms", "ttft_ms", "{:.0f}"),
        _TOKENS_PER_FORWARD,
        *_comparisons(every),
        *more,
    )
    groups = groupby(every, itemgetter("group"))
    return "\n".join(markdown(rows, (Column(group, "name"), *columns)) for group, rows in groups)


def _comparisons(every: Sequence[Row]) -> Iterator[Column]:
    """Yield the columns beside transformers' ways, as far as these were measured."""
    if (first := every[0])["group"] == Group.LIBRARY.value:
        yield Column("to the bare loop", lambda row: _times_as_fast(row, first), "{:.2f}x")
    if any(_peer(row, every) for row in every):
        yield Column(
            "to transformers, same method",
            lambda row: _times_as_fast(row, _peer(row, every)),
            "{:.2f}x",
        )


def _split(rows: Sequence[Row]) -> str:
    """Lay out where the time of a token goes, for the methods of two groups or more."""
    compared = dict.fromkeys(
        (row["method"], row["lookahead"])
        for row in rows
        if row["method"] in {_PLAIN, Method.SPECULATIVE.value}
    )
    lines = [
        {"lookahead": lookahead}
        | {
            group: found
            for group in Group
            if (found := _find(rows, group, method=method, lookahead=lookahead))
        }
        for method, lookahead in compared
    ]
    method = Column(
        "ms for each token",
        lambda line: f"SI, lookahead {it}" if (it := line["lookahead"]) else "non-SI",
    )
    forwards = itemgetter("forward_ms_per_token")
    parts: Mapping[Group, Mapping[str, Callable[[Row], float | None]]] = {
        Group.LIBRARY: {"transformers": itemgetter("ms_per_token")},
        Group.ENGINE: {"our engine: forwards": forwards, "around them": _rest},
        Group.SERVICES: {
            "the services: forwards": forwards,
            "around them": _rest,
            "around each verification": _rest_of_verification,
        },
    }
    columns = (
        _part(group, heading, part)
        for group, own in parts.items()
        if any(group in line for line in lines)
        for heading, part in own.items()
    )
    return markdown(lines, (method, *columns))


def _part(group: Group, heading: str, part: Callable[[Row], float | None]) -> Column:
    return Column(heading, lambda line: part(line[group]) if group in line else None, "{:.2f}")


def _rest_of_verification(row: Row) -> float | None:
    return None if (it := _rest(row)) is None else it * row["tokens_per_forward"]


def _rest(row: Row) -> float | None:
    if row["forward_ms_per_token"] is None:
        return None
    rest_ms: float = mean(row["repeats_ms_per_token"]) - row["forward_ms_per_token"]
    return rest_ms


_SHARING = (
    Column("targets that compute at once", "texts"),
    Column("forward, ms", "forward_ms", "{:.2f}"),
    Column("tokens/s, all", "tokens_per_second", "{:.0f}"),
)


def _shared_strategies(rows: Sequence[Row], more: Sequence[Column] = ()) -> str:
    columns = (
        Column("one text", "name"),
        *_SPEED,
        _TOKENS_PER_FORWARD,
        Column("to non-SI", lambda row: _times_as_fast(row, rows[0]), "{:.2f}x"),
    )
    return markdown(rows, (*columns, *more))


def _per_gpu(target_count: int) -> tuple[Column, ...]:
    """Return the columns of a variant's devices, one for each server, and of their speed."""

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
        return times(_times_as_fast(own, _fastest(rows, other, other_method))).rstrip("x")

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
    counts = sorted({row["lookahead"] for row in rows if row["lookahead"]})
    lookaheads = [f"lookahead {count}" for count in counts]
    lines = []
    for group, own in groupby(rows, itemgetter("group")):
        line: Row = {"group": group}
        for row in own:
            match Method(row["method"]):
                case Method.SPECULATIVE:
                    line[f"lookahead {row['lookahead']}"] = speed(row)
                case Method.BARE | Method.PLAIN as method:
                    line[method.value] = speed(row)
                case _:
                    line["other"] = f"{row['name'].removeprefix('generate, ')}: {speed(row)}"
        lines.append(line)
    columns = (
        Column("", "group"),
        Column("bare loop", Method.BARE.value),
        Column("plain", _PLAIN),
        *(Column(name, name) for name in lookaheads),
        Column("other", "other"),
    )
    return markdown(lines, columns)


def pair_contest(results: Results, name: str = "pair") -> str:
    """Every variant of decoding with a pair."""
    return f"{circumstances_line(results[name])}\n\n{_contest(results[name]['rows'])}"


def _times_as_fast(row: Row, reference: Row | None) -> float | None:
    if reference is None or not (row["identical"] and reference["identical"]):
        return None
    return times_as_fast(row["repeats_ms_per_token"], reference["repeats_ms_per_token"])


def _peer(row: Row, rows: Iterable[Row]) -> Row | None:
    """Find the library's row of the same method; for plain decoding its fastest variant, bare."""
    if row["group"] == Group.LIBRARY.value:
        return None
    method = Method.BARE.value if row["method"] == _PLAIN else row["method"]
    return _find(rows, Group.LIBRARY, method=method, lookahead=row["lookahead"])


def _find(rows: Iterable[Row], group: Group, *, method: str, lookahead: int | None) -> Row | None:
    wanted = (group.value, method, lookahead)
    return next((it for it in rows if (it["group"], it["method"], it["lookahead"]) == wanted), None)


def pair_forwards(results: Results, name: str = "pair") -> str:
    """What forwards of a pair take."""
    return _forwards(results[name]["models"])


def pair_acceptance(results: Results) -> str:
    """How often the bundled drafter is right."""
    return _acceptance(results["pair"]["acceptance"])


def pair_sharing(results: Results) -> str:
    """What processes on the same hardware take from each other."""
    content = results["pair"]
    tables = [markdown(content["sharing"], _SHARING)]
    if rows := content.get("sharing_strategies"):
        tables.append(_shared_strategies(rows))
    return "\n".join(tables)
