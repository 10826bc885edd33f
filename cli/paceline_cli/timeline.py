"""The picture of a request: one lane per process, one bar per forward, as in Figure 1 of the paper.

The SVG is written by hand: no library, and legible on light and dark pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from paceline import TimelineEventKind
from paceline.errors import InvalidFieldError
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from paceline import Completion, TimelineEvent

_BARS = {TimelineEventKind.DRAFTED: "draft", TimelineEventKind.VERIFYING: "verify"}
_MARKS = {TimelineEventKind.ACCEPTED: "accepted", TimelineEventKind.CORRECTED: "corrected"}

# Pixels.
_GUTTER, _MARGIN, _HEAD, _FOOT = 96, 24, 64, 84
_ROW, _LANE_GAP, _BAR, _STRIPE = 24, 14, 18, 4
_NARROWEST, _WIDEST, _PER_BAR = 960, 3200, 16
_BRANCH_ENTRY = 100  # the entry in the legend
_GLYPH = 7  # one digit of a bar's label

_STYLE = """
svg { color-scheme: light dark; font: 12px system-ui, sans-serif; }
.page { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; }
.grid { stroke: #d1d9e0; } .lane { fill: #f6f8fa; }
.draft { fill: #e69f00; } .verify { fill: #3b82c4; } .accepted { fill: #1a7f4b; }
.corrected { fill: #d1420f; } .branch { fill: #8250a8; }
.lost { fill-opacity: .22; } .hatch { fill: url(#hatch); }
.hatching { stroke: #59636e; } .on-bar { fill: #ffffff; font-size: 11px; text-anchor: middle; }
.on-draft { fill: #1f2328; } .title { font-size: 16px; font-weight: 600; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; } text { fill: #e6edf3; } .quiet { fill: #9198a1; }
.grid { stroke: #2f353d; } .lane { fill: #151b23; } .verify { fill: #4493f8; }
.accepted { fill: #3fb950; } .corrected { fill: #f0632f; } .branch { fill: #b98ae0; }
.hatching { stroke: #b7bdc8; }
.on-bar { fill: #0d1117; }
}
"""

_HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><line class="hatching" x1="0" y1="0" x2="0" y2="5" '
    'stroke-width="1.6"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True)
class _Bar:
    event: TimelineEvent
    lost: bool  # the result was not used
    row: int  # within the lane: overlapping spans are stacked


@dataclass(frozen=True, slots=True)
class _Scale:
    width: int
    end_ns: int

    def x(self, time_ns: int) -> float:
        plot = self.width - _GUTTER - 2 * _MARGIN
        return round(_MARGIN + _GUTTER + plot * time_ns / self.end_ns, 2)


def write_timeline(path: Path, completion: Completion, *, note: str = "") -> None:
    """Write the picture of a generation with `include_timeline`.

    Raises:
        InvalidFieldError: The file cannot be written.
    """
    try:
        path.write_text(_draw_completion(completion, note=note))
    except OSError as error:
        raise InvalidFieldError.of("timeline", f"cannot write {path}: {error.strerror}") from error


def _draw_completion(completion: Completion, *, note: str) -> str:
    finished = completion.finished
    strategy = completion.started.strategy.abbreviation
    milliseconds = finished.statistics.total_ns / 1e6
    title = f"{strategy}: {counted(len(completion.token_ids), 'token')} in {milliseconds:.0f} ms"
    facts = [note, counted(finished.statistics.target_forward_count, "target forward")]
    if finished.lookahead:
        facts.append(f"lookahead {finished.lookahead}")
        facts.append(f"acceptance {finished.statistics.acceptance_rate:.0%}")
    return draw_timeline(finished.timeline, title=title, subtitle=" · ".join(filter(None, facts)))


def draw_timeline(events: Sequence[TimelineEvent], *, title: str, subtitle: str = "") -> str:
    """Draw a request's timeline as an SVG document.

    Bars are the spans of drafts and verifications; a hatched bar's result was not used.
    Branches have a colour of their own: a stripe at the foot of a bar with tokens beside its chain,
    and the whole bar of a verification that continues such a token.
    Marks on the `output` lane show when tokens became final.
    """
    lanes = _lanes(events)
    bars = sum(map(len, lanes.values()))
    has_branches = any(event.is_branch or event.branch_token_count for event in events)
    narrowest = _NARROWEST + (_BRANCH_ENTRY if has_branches else 0)
    width = min(_WIDEST, max(narrowest, _GUTTER + bars * _PER_BAR))
    scale = _Scale(width, max((event.end_ns for event in events), default=0) or 1)
    body: list[str] = []
    y = _HEAD
    for name, lane in lanes.items():
        rows = 1 + max(bar.row for bar in lane)
        body += _lane(name, y=y, height=rows * _ROW, width=width)
        body += [_bar(bar, scale, y + bar.row * _ROW) for bar in lane]
        y += rows * _ROW + _LANE_GAP
    body += _lane("output", y=y, height=_ROW, width=width)
    body += [_mark(event, scale, y + _ROW / 2) for event in events if event.kind in _MARKS]
    y += _ROW + _LANE_GAP
    frame = [
        _text(title, x=_MARGIN, y=28, style="title"),
        _text(subtitle, x=_MARGIN, y=48, style="quiet"),
    ]
    legend = _legend(y + 52, has_branches=has_branches)
    return _document(width, y + _FOOT, [*frame, *_axis(scale, y), *body, *legend])


def _lanes(events: Iterable[TimelineEvent]) -> dict[str, list[_Bar]]:
    """Find the bars of each process: drafters first, then targets, each by name."""
    events = list(events)
    cancelled = {
        (event.server, event.call_id)
        for event in events
        if event.kind is TimelineEventKind.CANCELLED
    }
    used = _used_draft_tokens(events)
    spans = [event for event in events if event.kind in _BARS]
    lanes: dict[str, list[_Bar]] = {}
    for event in sorted(
        spans, key=lambda it: (it.kind is not TimelineEventKind.DRAFTED, it.server)
    ):
        lanes.setdefault(event.server, [])
    free: dict[str, list[int]] = {name: [] for name in lanes}
    for event in sorted(spans, key=lambda it: it.start_ns):
        if event.kind is TimelineEventKind.DRAFTED:
            lost = (event.call_id, event.position) not in used
        else:
            lost = (event.server, event.call_id) in cancelled
        row = _take_row(free[event.server], event)
        lanes[event.server].append(_Bar(event, lost, row))
    return lanes


def _used_draft_tokens(events: Iterable[TimelineEvent]) -> set[tuple[int, int]]:
    """Find the draft tokens, as call and position, that are part of the output."""
    used: set[tuple[int, int]] = set()
    discarded: set[tuple[int, int]] = set()
    end = 0
    for event in events:
        positions = range(event.position, event.position + len(event.token_ids))
        if event.kind is TimelineEventKind.DRAFTED:
            used.update((event.call_id, position) for position in positions)
        elif event.kind is TimelineEventKind.DISCARDED:
            discarded.update((event.call_id, position) for position in positions)
        elif event.kind in _MARKS:
            end = max(end, positions.stop)
    return {(call, position) for call, position in used - discarded if position < end}


def _take_row(ends_ns: list[int], event: TimelineEvent) -> int:
    """Find the first row that is free when the event starts; `ends_ns` has each row's end."""
    for row, end_ns in enumerate(ends_ns):
        if end_ns <= event.start_ns:
            ends_ns[row] = event.end_ns
            return row
    ends_ns.append(event.end_ns)
    return len(ends_ns) - 1


def _lane(name: str, *, y: float, height: float, width: int) -> list[str]:
    shade = (
        f'<rect class="lane" x="{_MARGIN + _GUTTER}" y="{y}" '
        f'width="{width - _GUTTER - 2 * _MARGIN}" height="{height}" rx="3"/>'
    )
    return [shade, _text(name, x=_MARGIN + _GUTTER - 10, y=y + height / 2 + 4, style="end")]


def _bar(bar: _Bar, scale: _Scale, y: float) -> str:
    event = bar.event
    kind = "branch" if event.is_branch else _BARS[event.kind]
    x = scale.x(event.start_ns)
    width = max(1.5, round(scale.x(event.end_ns) - x - 0.8, 2))
    top = y + (_ROW - _BAR) / 2
    place = f'x="{x}" y="{top}" width="{width}" height="{_BAR}" rx="2"'
    parts = [f"<title>{escape(_tooltip(event, lost=bar.lost))}</title>"]
    parts.append(f'<rect class="{kind}{" lost" if bar.lost else ""}" {place}/>')
    if bar.lost:
        parts.append(f'<rect class="hatch" {place}/>')
    if event.branch_token_count:
        foot = f'x="{x}" y="{top + _BAR - _STRIPE}" width="{width}" height="{_STRIPE}"'
        parts.append(f'<rect class="branch" {foot}/>')
    count = str(len(event.token_ids))
    if not bar.lost and event.token_ids and width > _GLYPH * len(count) + 4:
        style = "on-bar on-draft" if kind == "draft" else "on-bar"
        parts.append(_text(count, x=x + width / 2, y=y + _ROW / 2 + 4, style=style))
    return f"<g>{''.join(parts)}</g>"


def _mark(event: TimelineEvent, scale: _Scale, y: float) -> str:
    title = f"<title>{escape(_tooltip(event, lost=False))}</title>"
    kind = _MARKS[event.kind]
    # Both often happen at the same moment, so one mark is above the other.
    y += -5 if kind == "accepted" else 6
    return f"<g>{title}{_symbol(kind, scale.x(event.start_ns), y)}</g>"


def _symbol(kind: str, x: float, y: float) -> str:
    if kind == "accepted":
        return f'<circle class="accepted" cx="{x}" cy="{y}" r="4"/>'
    return f'<path class="corrected" d="M{x} {y - 5:g}l5 9h-10z"/>'


def _tooltip(event: TimelineEvent, *, lost: bool) -> str:
    start, end = event.start_ns / 1e6, event.end_ns / 1e6
    time = f"{start:.1f} ms" if start == end else f"{start:.1f} to {end:.1f} ms"
    parts = [event.server, f"{event.kind}{', not used' if lost else ''}", time]
    if event.token_ids:
        parts.append(f"{counted(len(event.token_ids), 'token')} from position {event.position}")
    if event.branch_token_count:
        parts.append(f"{event.branch_token_count} beside the chain")
    if event.is_branch:
        parts.append("of a branch")
    if event.kind is TimelineEventKind.VERIFYING:
        parts.append(f"depth {event.speculation_depth}")
    return " · ".join(parts)


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    step_ms = _step(scale.end_ns / 1e6, (scale.width - _GUTTER) / 90)
    for index in range(int(scale.end_ns / 1e6 / step_ms) + 1):
        x = scale.x(round(index * step_ms * 1e6))
        yield f'<line class="grid" x1="{x}" y1="{_HEAD - 4}" x2="{x}" y2="{bottom}"/>'
        yield _text(f"{index * step_ms:g}", x=x, y=bottom + 14, style="quiet middle")
    yield _text("ms", x=_MARGIN + _GUTTER - 10, y=bottom + 14, style="quiet end")


def _step(span: float, most: float) -> float:
    """Find the smallest step of 1, 2 or 5 times a power of ten with at most so many steps."""
    step, factors = 0.01, (2.0, 2.5, 2.0)
    index = 0
    while span / step > most:
        step *= factors[index % 3]
        index += 1
    return round(step, 6)


def _legend(y: float, *, has_branches: bool) -> Iterator[str]:
    x: float = _MARGIN
    entries = (
        ("draft", "draft forward"),
        ("verify", "verification, with its draft tokens"),
        *([("branch", "branches")] if has_branches else []),
        ("lost", "cancelled or not used"),
        ("accepted", "draft token accepted"),
        ("corrected", "target's own token"),
    )
    for kind, words in entries:
        yield _swatch(kind, x, y)
        yield _text(words, x=x + 26, y=y + 4)
        x += 44 + 6.4 * len(words)


def _swatch(kind: str, x: float, y: float) -> str:
    if kind in {"accepted", "corrected"}:
        return _symbol(kind, x + 12, y)
    place = f'x="{x}" y="{y - 6}" width="20" height="12" rx="2"'
    if kind == "lost":
        return f'<rect class="verify lost" {place}/><rect class="hatch" {place}/>'
    return f'<rect class="{kind}" {place}/>'


def _text(words: str, *, x: float, y: float, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>'


def _document(width: int, height: float, body: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" role="img">'
    )
    page = f'<rect class="page" width="{width}" height="{height:g}"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", _HATCH, page, *body, "</svg>", ""])
