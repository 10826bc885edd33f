"""What `paceline bench pair` prints and keeps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from paceline_bench.pair.acceptance import accepted_shares, run_rate, verdict_rate
from paceline_bench.pair.contest import Group, Method, times_as_fast
from paceline_bench.report import markdown_table, spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline_bench.pair.acceptance import Block
    from paceline_bench.pair.contest import Entry
    from paceline_bench.pair.engine import Latency
    from paceline_bench.pair.sharing import Shared
    from paceline_engine.calls import ModelDescription

__all__ = ["Acceptance", "ModelResult", "PairResult", "json_more", "json_rows", "report"]


@dataclass(frozen=True, slots=True)
class ModelResult:
    """A model and what its forwards take.

    Attributes:
        description: What it is.
        latency: By the DSI paper's method.
        rows_ms: The median of a forward, by its rows.
        context: Tokens before those rows.
    """

    description: ModelDescription
    latency: Latency
    rows_ms: dict[int, float]
    context: int

    @property
    def ttft_ms(self) -> float:
        """To the first token, median."""
        return median(self.latency.first_ms)

    @property
    def tpot_ms(self) -> float:
        """For each token after the first, median."""
        return median(self.latency.later_ms)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the drafter was right.

    Attributes:
        runs: For each prompt the tokens that drafter and target have in common from the start.
        tokens: How many there were to compare.
        blocks: What the target judged in texts of the same length.
        lookahead: Draft tokens of those blocks.
    """

    runs: list[int]
    tokens: int
    blocks: list[Block]
    lookahead: int


@dataclass(slots=True)
class PairResult:
    """Everything that was measured; parts may be missing."""

    target: ModelResult
    drafter: ModelResult
    acceptance: Acceptance | None = None
    entries: list[Entry] = field(default_factory=list)
    sharing: list[Shared] = field(default_factory=list)
    sharing_entries: list[Entry] = field(default_factory=list)

    @property
    def all_identical(self) -> bool:
        """Whether every text was plain decoding's."""
        return all(entry.is_identical for entry in (*self.entries, *self.sharing_entries))


def report(result: PairResult) -> str:
    """Lay everything out in Markdown."""
    sections = [_latencies(result), _rows(result)]
    if result.acceptance is not None:
        sections.append(_acceptance(result.acceptance))
    if result.entries:
        sections += [_contest(result.entries), _split(result.entries)]
        sections.append("\n".join(_findings(result.entries)) + "\n")
    if result.sharing:
        sections.append(_sharing(result.sharing))
    if result.sharing_entries:
        sections.append(_sharing_strategies(result.sharing_entries))
    return "\n".join(sections)


def json_rows(result: PairResult) -> list[dict[str, Any]]:
    """Describe every way to decode; a speed-up only stands where texts were identical."""
    return [_entry_json(entry, result.entries[0]) for entry in result.entries]


def json_more(result: PairResult) -> dict[str, Any]:
    """Describe everything else."""
    more: dict[str, Any] = {
        "models": {
            role: _model_json(model)
            for role, model in (("target", result.target), ("drafter", result.drafter))
        },
        "sharing": [asdict(shared) for shared in result.sharing],
        "sharing_strategies": [
            _entry_json(entry, result.sharing_entries[0]) for entry in result.sharing_entries
        ],
    }
    if (acceptance := result.acceptance) is not None:
        more["acceptance"] = {
            "common_runs": acceptance.runs,
            "tokens": acceptance.tokens,
            "rate_by_common_runs": run_rate(acceptance.runs),
            "rate_by_verdicts": verdict_rate(acceptance.blocks),
            "lookahead": acceptance.lookahead,
            "blocks": len(acceptance.blocks),
            "accepted_shares": accepted_shares(acceptance.blocks),
        }
    return more


def _model_json(model: ModelResult) -> dict[str, Any]:
    return {
        "name": model.description.name,
        "fingerprint": model.description.fingerprint,
        "dtype": model.description.dtype,
        "device": model.description.device,
        "layers": model.description.layer_count,
        "ttft_ms": asdict(spread(model.latency.first_ms)),
        "ttft_mean_ms": mean(model.latency.first_ms),
        "tpot_ms": asdict(spread(model.latency.later_ms)),
        "tpot_mean_ms": mean(model.latency.later_ms),
        "context": model.context,
        "rows_ms": model.rows_ms,
    }


def _entry_json(entry: Entry, plain: Entry) -> dict[str, Any]:
    contestant = entry.contestant
    described = {
        "group": contestant.group.value,
        "name": contestant.name,
        "method": contestant.method.value,
        "lookahead": contestant.lookahead,
        "targets": contestant.targets,
        "tokens_per_second": entry.tokens_per_second,
        "ms_per_token": entry.ms_per_token,
        "repeats_ms_per_token": entry.repeats_ms_per_token,
        "forward_ms_per_token": entry.forward_ms_per_token,
        "ttft_ms": entry.first_token_ms,
        "tokens_per_forward": entry.tokens_per_forward,
        "acceptance_rate": entry.acceptance_rate,
        "identical": entry.is_identical,
        "near_ties": entry.near_ties,
        "different": entry.wrong,
    }
    if entry.is_identical:
        described["speed_up"] = _times_as_fast(entry, plain)
    return described


def _latencies(result: PairResult) -> str:
    target, drafter = result.target, result.drafter
    rows = [
        [
            "first token (TTFT), ms",
            str(spread(target.latency.first_ms)),
            str(spread(drafter.latency.first_ms)),
            f"{drafter.ttft_ms / target.ttft_ms:.3f}",
        ],
        [
            "each later one (TPOT), ms",
            str(spread(target.latency.later_ms)),
            str(spread(drafter.latency.later_ms)),
            f"{drafter.tpot_ms / target.tpot_ms:.3f}",
        ],
        [
            "TTFT ÷ TPOT",
            f"{target.ttft_ms / target.tpot_ms:.2f}",
            f"{drafter.ttft_ms / drafter.tpot_ms:.2f}",
            "",
        ],
    ]
    texts = len(target.latency.first_ms)
    tokens = 1 + len(target.latency.later_ms) // texts
    headings = (_title(target), target.description.name, drafter.description.name, "ratio")
    return f"Latency by the paper's method, {texts} texts of {tokens} tokens:\n\n" + markdown_table(
        headings, rows
    )


def _title(model: ModelResult) -> str:
    return f"{model.description.dtype} on {model.description.device}"


def _rows(result: PairResult) -> str:
    counts = list(result.target.rows_ms)
    rows = []
    for role, model in (("target", result.target), ("drafter", result.drafter)):
        one = model.rows_ms[counts[0]]
        rows.append([f"{role}, ms", *(f"{model.rows_ms[count]:.2f}" for count in counts)])
        rows.append(["÷ one row", *(f"{model.rows_ms[count] / one:.2f}" for count in counts)])
    heading = f"A forward by its rows, after {result.target.context} tokens:\n\n"
    return heading + markdown_table(["rows", *map(str, counts)], rows)


def _acceptance(acceptance: Acceptance) -> str:
    runs, blocks = acceptance.runs, acceptance.blocks
    accepted = mean(block.accepted for block in blocks)
    estimates = markdown_table(
        ("acceptance, greedy", "rate", "from"),
        [
            [
                "common runs (the paper's estimator)",
                f"{run_rate(runs):.3f}",
                f"{len(runs)} prompts, {mean(runs):.1f} of {acceptance.tokens} tokens in common",
            ],
            [
                "verdicts",
                f"{verdict_rate(blocks):.3f}",
                f"{len(blocks)} blocks of up to {acceptance.lookahead}, {accepted:.2f} accepted",
            ],
        ],
    )
    shares = accepted_shares(blocks)
    positions = markdown_table(
        ["first n draft tokens", *(str(n) for n in range(1, len(shares) + 1))],
        [["all right, share of blocks", *(f"{share:.3f}" for share in shares)]],
    )
    return f"{estimates}\n{positions}"


def _contest(entries: Sequence[Entry]) -> str:
    # Plain decoding with the least around it.
    bare = entries[0]
    headings = (
        *("", "tokens/s", "ms/token", "repeats", "TTFT ms", "tokens/forward", "acceptance"),
        *(f"÷ {bare.contestant.name}", "÷ own plain", "text"),
    )
    sections = []
    for group in dict.fromkeys(entry.contestant.group for entry in entries):
        own = [entry for entry in entries if entry.contestant.group is group]
        plain = next(entry for entry in own if entry.contestant.method is Method.PLAIN)
        rows = [_contest_row(entry, bare=bare, plain=plain) for entry in own]
        sections.append(markdown_table((group.value, *headings[1:]), rows))
    return "\n".join(sections)


def _contest_row(entry: Entry, *, bare: Entry, plain: Entry) -> list[str]:
    return [
        entry.contestant.name,
        *_speed(entry),
        _cell(entry.first_token_ms, ".0f"),
        f"{entry.tokens_per_forward:.2f}",
        _cell(entry.acceptance_rate, ".3f"),
        _speed_up(entry, bare),
        _speed_up(entry, plain),
        entry.verdict,
    ]


def _speed(entry: Entry) -> tuple[str, str, str]:
    """Lay out tokens/s, ms/token and the repeats' range; a text that differs has no speed."""
    if not entry.is_identical:
        return "-", "-", "-"
    times = entry.repeats_ms_per_token
    return (
        f"{entry.tokens_per_second:.1f}",
        f"{entry.ms_per_token:.2f}",
        f"{min(times):.2f} to {max(times):.2f}",
    )


def _speed_up(entry: Entry, reference: Entry) -> str:
    if not (entry.is_identical and reference.is_identical):
        return "-"
    return f"{_times_as_fast(entry, reference):.2f}x"


def _times_as_fast(entry: Entry, other: Entry) -> float:
    return times_as_fast(entry.repeats_ms_per_token, other.repeats_ms_per_token)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _split(entries: Sequence[Entry]) -> str:
    """Lay out where the time of a token goes, for what two groups or more do."""
    headings = (
        *("ms for each token", Group.LIBRARY.value),
        *("our engine: forwards", "around them"),
        *("the services: forwards", "around them", "around each verification"),
    )
    rows = []
    for method, lookahead in dict.fromkeys(
        (entry.contestant.method, entry.contestant.lookahead) for entry in entries
    ):
        if method in {Method.PLAIN, Method.SPECULATIVE}:
            name = "non-SI" if method is Method.PLAIN else f"SI, lookahead {lookahead}"
            library, engine, services = (
                _find(entries, group, method, lookahead) for group in Group
            )
            rows.append(
                [
                    name,
                    "-" if library is None else f"{library.ms_per_token:.2f}",
                    *_forwards_and_rest(engine),
                    *_forwards_and_rest(services),
                    "-"
                    if services is None
                    else f"{_rest(services) * services.tokens_per_forward:.2f}",
                ]
            )
    return markdown_table(headings, rows)


def _forwards_and_rest(entry: Entry | None) -> tuple[str, str]:
    if entry is None or entry.forward_ms_per_token is None:
        return "-", "-"
    return f"{entry.forward_ms_per_token:.2f}", f"{_rest(entry):.2f}"


def _rest(entry: Entry) -> float:
    return mean(entry.repeats_ms_per_token) - (entry.forward_ms_per_token or 0.0)


def _findings(entries: Sequence[Entry]) -> Iterator[str]:
    """Say in a line each how the same method fares in different hands."""
    bare = _find(entries, Group.LIBRARY, Method.BARE, None)
    for group in (Group.ENGINE, Group.SERVICES):
        own = _find(entries, group, Method.PLAIN, None)
        if own is not None and bare is not None:
            yield _versus(f"{group.value}: non-SI", own, bare)
        for entry in entries:
            contestant = entry.contestant
            if contestant.group is group and contestant.method is Method.SPECULATIVE:
                peer = _find(entries, Group.LIBRARY, Method.SPECULATIVE, contestant.lookahead)
                if peer is not None:
                    yield _versus(f"{group.value}: {contestant.name}", entry, peer)


def _versus(name: str, own: Entry, peer: Entry) -> str:
    against = f"{peer.contestant.group.value}, {peer.contestant.name}"
    if not (own.is_identical and peer.is_identical):
        return f"- {name}, against {against}: texts differ, so no speeds are compared"
    ratio = _times_as_fast(own, peer)
    return f"- {name}, against {against}: {ratio:.2f}x{'' if ratio >= 1 else ', SLOWER'}"


def _sharing(sharing: Sequence[Shared]) -> str:
    alone = sharing[0]
    rows = [
        [
            str(each.texts),
            f"{each.forward_ms:.2f}",
            f"{each.forward_ms / alone.forward_ms:.2f}",
            f"{each.tokens_per_second:.1f}",
        ]
        for each in sharing
    ]
    headings = ("targets that compute at once", "forward ms", "÷ alone", "tokens/s, all")
    return "Model processes on the same hardware, plain decoding:\n\n" + markdown_table(
        headings, rows
    )


def _sharing_strategies(entries: Sequence[Entry]) -> str:
    plain = entries[0]
    rows = [
        [
            entry.contestant.name,
            *_speed(entry),
            f"{entry.tokens_per_forward:.2f}",
            _speed_up(entry, plain),
            entry.verdict,
        ]
        for entry in entries
    ]
    headings = ("", "tokens/s", "ms/token", "repeats", "tokens/forward", "÷ non-SI", "text")
    return "One text at a time, drafter and targets on that hardware:\n\n" + markdown_table(
        headings, rows
    )


def _find(
    entries: Iterable[Entry], group: Group, method: Method, lookahead: int | None
) -> Entry | None:
    wanted = (group, method, lookahead)
    return next(
        (
            entry
            for entry in entries
            if (entry.contestant.group, entry.contestant.method, entry.contestant.lookahead)
            == wanted
        ),
        None,
    )
