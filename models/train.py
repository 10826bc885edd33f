"""Train the bundled models: `make models`, or `python models/train.py --help`.

    base (2 layers) -> grow to 6 -> middle -> grow to 16 -> target -> distil -> drafter, tiny

Depth costs latency, which is what a target is for here, while a small model learns faster: so most
of the learning happens before the last growth, which changes no output. The drafter is the base
again, taught by the target; so is the tiny one, a single narrow layer. After each stage what there
is so far is written to the output folder, so there is something to run from the first stage on. An
interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from recipe import STAGES, Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

# By glibc's malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX.
_MALLOC_PARAMETERS = {-1: 2**31 - 1, -2: 64 << 20, -4: 0}

_FOLDER = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and train."""
    options = _parse(arguments)
    Recipe(
        output=options.output,
        work=options.work,
        minutes=options.minutes,
        stage_minutes=dict(options.stage_minutes),
        threads=tuple(options.threads),
        trained=options.go_on_from,
    ).run()


def keep_freed_memory() -> None:
    """Make glibc keep large freed blocks, instead of asking the kernel for them at every step.

    Worth 15 % of the speed on a CPU, measured. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for parameter, value in _MALLOC_PARAMETERS.items():
            mallopt(parameter, value)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=sum(stage.minutes for stage in STAGES),
        help="wall clock of all stages",
    )
    parser.add_argument(
        "--stage-minutes",
        type=_stage_minutes,
        nargs="+",
        default=[],
        metavar="STAGE=MINUTES",
        help="budgets of single stages, in place of their share of --minutes; 0: not trained",
    )
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=sorted({1, os.cpu_count() or 1}),
        help="numbers of CPU threads to choose from; the faster is looked for during the run",
    )
    parser.add_argument("--output", type=Path, default=_FOLDER, help="where the models go")
    parser.add_argument(
        "--work",
        type=Path,
        default=_FOLDER.parent / ".cache" / "models",
        help="checkpoints; remove it to start afresh",
    )
    parser.add_argument(
        "--go-on-from",
        type=Path,
        metavar="FOLDER",
        help="train the models in this folder further, instead of new ones",
    )
    return parser.parse_args(arguments)


def _stage_minutes(text: str) -> tuple[str, float]:
    name, _, minutes = text.partition("=")
    return name, float(minutes)


if __name__ == "__main__":
    keep_freed_memory()
    main()
