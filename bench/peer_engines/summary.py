"""What a contest found: rows of medians, ratios of each repeat, and which texts differ."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from paceline_bench.table import UNKNOWN, Column, markdown
from peer_engines.contestants import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline_bench.report import Results
    from peer_engines.contest import Contest
    from peer_engines.contestants import Contestant

_RATE = "decode_tokens_per_second"
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class _Entry:
    """A contestant's way, and its turns with one number of threads, one for each repeat."""

    contestant: Contestant
    way: str
    turns: Sequence[dict[str, Any]]

    @property
    def rates(self) -> list[float]:
        return [turn["ways"][self.way][_RATE] for turn in self.turns]

    @property
    def texts(self) -> list[Sequence[Sequence[int]]]:
        return [turn["ways"][self.way]["texts"] for turn in self.turns]


def summarise(contest: Contest, contestants: Sequence[Contestant]) -> dict[str, Any]:
    """Return rows for each number of threads, and how our exact services compare to peers.

    *Exact* is a way of the services whose texts are, in every repeat, those of plain decoding by
    the services in the same form.
    """
    rows: list[dict[str, Any]] = []
    compared: dict[str, float | None] = {}
    counts = sorted({turn["threads"] for turn in contest.turns})
    for threads in counts:
        entries = _entries(contest, contestants, threads)
        peers = [each for each in entries if each.contestant.group is Group.PEER]
        fastest = max(peers, key=lambda it: median(it.rates), default=None)
        own = [_row(each, entries, fastest) for each in entries]
        exact = [row for row in own if row["group"] == Group.SERVICES.value and not row["differs"]]
        best = max(exact, key=lambda row: row[_RATE], default=None)
        compared[str(threads)] = best["over_fastest_peer"] if best else None
        rows += own
    return {
        "exact_over_fastest_peer": compared[str(counts[-1])] if counts else None,
        "exact_over_fastest_peer_by_threads": compared,
        "rows": rows,
    }


def tables(content: dict[str, Any]) -> str:
    """Lay out the rows in Markdown: a table for each number of threads, and what to know of it."""
    counts = sorted({row["threads"] for row in content["rows"]}, reverse=True)
    parts = [_table(content, threads) for threads in counts]
    left_out = [f"- {name} is left out: {why}" for name, why in content["left_out"].items()]
    return "\n".join([*parts, *left_out])


def published(results: Results) -> str:
    """Return what docs/performance.md has of the results: nothing before there are any."""
    content = results.get("peers")
    if content is None:
        return ""
    found = content["circumstances"]
    loads = [step["load_average"] for step in content["steps"]]
    told = (
        f"`{found['command']}`, {found['date']}, {found['machine']}; load average"
        f" {min(loads):g} to {max(loads):g}."
    )
    return f"{told}\n\n{tables(content)}"


def _table(content: dict[str, Any], threads: int) -> str:
    rows = [row for row in content["rows"] if row["threads"] == threads]
    lengths = sorted({key for row in rows for key in row["first_token_ms"]}, key=int)
    streams = sorted({key for row in rows for key in row["streams"]}, key=int)
    columns = (
        Column(f"{threads} thread{'s' if threads > 1 else ''}", "name"),
        Column("tokens/s", lambda row: _spread(row["rates"])),
        Column("over the fastest peer", "over_fastest_peer", "{:.2f}x"),
        Column("with prompts", "with_prompts_tokens_per_second", "{:.1f}"),
        *(Column(f"first of {it}, ms", _under("first_token_ms", it), "{:.0f}") for it in lengths),
        *(Column(f"{it} streams", _under("streams", it), "{:.0f}") for it in streams),
        Column("GiB", "memory_gib", "{:.2f}"),
        Column("texts", _difference),
    )
    ratio = content["exact_over_fastest_peer_by_threads"][str(threads)]
    told = UNKNOWN if ratio is None else f"{ratio:.2f}"
    return f"{markdown(rows, columns)}\nServices, exact, over the fastest peer: {told}.\n"


def _under(field: str, key: str) -> Callable[[dict[str, Any]], object]:
    return lambda row: row[field].get(key)


def _entries(contest: Contest, contestants: Sequence[Contestant], threads: int) -> list[_Entry]:
    found = []
    for each in contestants:
        turns = [
            turn
            for turn in contest.turns
            if turn["name"] == each.name and turn["threads"] == threads
        ]
        turns.sort(key=lambda turn: turn["repeat"])
        found += [_Entry(each, way, turns) for way in each.ways if turns]
    return found


def _row(entry: _Entry, entries: Iterable[_Entry], fastest: _Entry | None) -> dict[str, Any]:
    contestant, way, turns = entry.contestant, entry.way, entry.turns
    ratios = None
    if fastest is not None:
        ratios = [own / peer for own, peer in zip(entry.rates, fastest.rates, strict=True)]
    reference = _reference(entry, entries)
    return {
        "threads": turns[0]["threads"],
        "name": f"{contestant.name}, {way}",
        "group": contestant.group.value,
        "form": contestant.form,
        "version": turns[0]["version"],
        "rates": entry.rates,
        _RATE: median(entry.rates),
        "with_prompts_tokens_per_second": median(
            turn["ways"][way]["tokens_per_second"] for turn in turns
        ),
        "over_fastest_peer": None if ratios is None else median(ratios),
        "repeats_over_fastest_peer": ratios,
        "first_token_ms": {} if way != contestant.ways[0] else _medians(turns, "first_token_ms"),
        "streams": _medians([turn["streams"].get(way, {}) for turn in turns]),
        "memory_gib": median(turn["memory_bytes"] for turn in turns) / _GIB,
        "load_seconds": median(turn["load_seconds"] for turn in turns),
        "compared_to": None if reference is None else f"{reference.contestant.name}, plain",
        "differs": [] if reference is None else _differences(entry, reference),
    }


def _reference(entry: _Entry, entries: Iterable[_Entry]) -> _Entry | None:
    """Return whose texts an entry's should be: ours in the same form, else our float32."""
    plain = [
        each for each in entries if each.way == "plain" and each.contestant.group is not Group.PEER
    ]
    ours = entry.contestant.group is not Group.PEER
    wanted = entry.contestant.form if ours else "float32"
    plain = [each for each in plain if each.contestant.form == wanted]
    same_group = [each for each in plain if each.contestant.group is entry.contestant.group]
    return next(iter(same_group or plain), None)


def _differences(entry: _Entry, reference: _Entry) -> list[list[int]]:
    """Return [chat, token] of each text's first difference in any repeat, each chat once."""
    found: dict[int, int] = {}
    expected = reference.texts[0]
    for texts in (*entry.texts, *reference.texts[1:]):
        for chat, (text, other) in enumerate(zip(texts, expected, strict=False)):
            pairs = enumerate(zip(text, other, strict=True))
            at = next((index for index, (own, theirs) in pairs if own != theirs), None)
            if at is not None:
                found[chat] = min(at, found.get(chat, at))
    return [list(each) for each in sorted(found.items())]


def _medians(turns: Sequence[dict[str, Any]], key: str | None = None) -> dict[str, float]:
    found = [turn[key] if key else turn for turn in turns]
    return {each: median(it[each] for it in found) for each in found[0]}


def _spread(rates: Sequence[float]) -> str:
    low, high = min(rates), max(rates)
    return f"{median(rates):.1f}" + (f" ({low:.1f} to {high:.1f})" if len(rates) > 1 else "")


def _difference(row: dict[str, Any]) -> str:
    """Say which texts are not the reference's, and from which token."""
    if row["compared_to"] is None:
        return UNKNOWN
    if not row["differs"]:
        return "same"
    first = min(token for _, token in row["differs"])
    return f"{len(row['differs'])} differ, the first from token {first + 1}"
