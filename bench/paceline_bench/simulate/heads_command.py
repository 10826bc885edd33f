"""`paceline simulate heads`: published EAGLE-3 heads at the target and as drafter services."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline_bench.parallel import compute_all
from paceline_bench.report import write_json
from paceline_bench.simulate.heads import PUBLISHED, HeadJob, compare_places
from paceline_bench.table import Column, markdown
from paceline_local.screen import progress

if TYPE_CHECKING:
    from pathlib import Path

_COLUMNS = (
    Column("", "name"),
    Column("the head is", "place"),
    Column("method", "strategy"),
    Column("targets", "target_count"),
    Column("lookahead", "lookahead"),
    Column("tokens/forward", "tokens_per_forward", "{:.2f}"),
    Column("over plain", "over_plain", "{:.2f}"),
    Column("over the head at the target", "over_self", "{:.2f}"),
    Column("per GPU", "per_gpu", "{:.2f}"),
)


def show_heads(
    *,
    latency: float,
    decay: float,
    target_counts: tuple[int, ...],
    token_count: int,
    repeats: int,
    json_file: Path | None,
) -> None:
    """Simulate every published head, and tell; see HeadJob for what is assumed."""
    jobs = [
        HeadJob(
            head=head,
            latency=latency,
            target_counts=target_counts,
            decay=decay,
            token_count=token_count,
            repeats=repeats,
        )
        for head in PUBLISHED
    ]
    with progress("simulating", total=len(jobs)) as step:
        found = compute_all(compare_places, jobs, on_done=lambda job: step(job.head.name))
    gains = [gain for own in found for gain in own]
    print(
        f"{repeats} generations of {token_count} tokens, decoding alone; a forward of the head"
        f" takes {latency:g} of the target's; beyond the published ones each rate is {decay:g} of"
        " the one before"
    )
    print(markdown(gains, _COLUMNS))
    if json_file is not None:
        write_json(json_file, [asdict(gain) for gain in gains])
        print(f"{json_file} has them as JSON.")
