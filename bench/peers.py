"""One real model in Paceline and in other engines, on the same cores: `python bench/peers.py`.

SmolLM2-135M-Instruct is decoded by Paceline's services, by Paceline's engine alone, by llama.cpp,
OpenVINO GenAI and transformers, and by vLLM where `make install-vllm` has been run. What the others
need is installed into build/peers first, each engine in an environment of its own. Then all take
turns, each in a process of its own, pinned to as many cores as it has threads. Nobody keeps
anything of earlier prompts. Everybody gets the same token ids; texts are compared.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_bench.report import json_text
from peer_engines.contest import compete
from peer_engines.contestants import Contestant, known_contestants
from peer_engines.environments import Peers
from peer_engines.prompts import QUICK, Plan, prompts_for
from peer_engines.summary import summarise, tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROOT = Path(__file__).resolve().parents[1]
_MODEL = "build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Any text will do, as long as it has some 2,500 tokens.
_TEXT = "docs/architecture.md"


def main(
    arguments: Sequence[str] | None = None,
    *,
    contestants: Sequence[Contestant] | None = None,
    prompts: Mapping[str, Any] | None = None,
) -> int:
    """Run the command line; return 1 if nobody was measured, or our own texts differ.

    Args:
        arguments: In place of the command line's.
        contestants: In place of those that are known.
        prompts: In place of the model's own.
    """
    known = known_contestants() if contestants is None else contestants
    options = _options(arguments, known)
    plan = QUICK if options.quick else Plan()
    peers = Peers(options.folder, options.model, shlex.split(options.pip_args))
    if options.install:
        return _install(options.only, peers)
    load_at_start = os.getloadavg()[0]
    if prompts is None:
        prompts = prompts_for(plan, options.model, (_ROOT / _TEXT).read_text(encoding="utf-8"))
    contest = compete(
        options.only,
        peers,
        plan=plan,
        prompts=prompts,
        threads=options.threads,
        repeats=options.repeats,
    )
    content = {
        "circumstances": _circumstances(load_at_start),
        **summarise(contest, options.only),
        "left_out": contest.left_out,
        "steps": contest.steps,
        "turns": contest.turns,
    }
    print(f"\n{tables(content)}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json_text(content))
    wrong = [row["name"] for row in content["rows"] if row["group"] != "peer" and row["differs"]]
    if wrong:
        print("These differ from plain decoding in the same form:", *wrong, sep="\n  ")
    return 0 if content["rows"] and not wrong else 1


def _install(contestants: Sequence[Contestant], peers: Peers) -> int:
    """Make what contestants need, measure nothing; a contest of no repeats says what fails."""
    contest = compete(contestants, peers, plan=QUICK, prompts={}, threads=(), repeats=0)
    print(f"{len(contestants) - len(contest.left_out)} of {len(contestants)} contestants are ready")
    return 0


def _options(arguments: Sequence[str] | None, known: Sequence[Contestant]) -> argparse.Namespace:
    names = [each.name for each in known]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help=f"some of {','.join(names)}")
    most = len(os.sched_getaffinity(0))
    threads = str(min(2, most))
    parser.add_argument("--threads", default=threads, help="one number or more, as 1,2")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short texts: a rehearsal")
    parser.add_argument("--install", action="store_true", help="only make what is needed")
    parser.add_argument("--json", type=Path, help="where all that was measured is written")
    parser.add_argument("--model", type=Path, default=_ROOT / _MODEL, help="the GGUF file")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "peers")
    parser.add_argument("--pip-args", default="", help="passed on to pip, such as another index")
    options = parser.parse_args(arguments)
    wanted = [name for name in options.only.split(",") if name] or names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only: there is no {unknown[0]!r}; there are {', '.join(names)}")
    options.only = [each for each in known if each.name in wanted]
    try:
        options.threads = sorted({int(word) for word in options.threads.split(",")})
    except ValueError:
        parser.error(f"--threads: {options.threads!r} is no list of numbers")
    if not 1 <= min(options.threads) <= max(options.threads) <= most:
        parser.error(f"--threads: each must be from 1 to {most}, the cores there are")
    if options.repeats < 1:
        parser.error("--repeats: at least 1")
    return options


def _circumstances(load_at_start: float) -> dict[str, Any]:
    return {
        "command": shlex.join(["python", "bench/peers.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} x {_processor()}, {platform.system()}",
        "python": platform.python_version(),
        "load_average_at_start": round(load_at_start, 2),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    """Return the processor's name, and what its vectors can do."""
    told = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in told if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    wanted = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
    has = [each for each in fields.get("flags", "").split() if each in wanted]
    return f"{fields.get('model name', platform.machine())} ({', '.join(has)})"


if __name__ == "__main__":
    sys.exit(main())
