"""`paceline bench NAME`: finds the benchmark's module."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BENCHMARKS = {
    "table2": "Table 2 of the DSI paper, online, beside the theory's limits",
    "pair": "your own drafter and target: latencies, acceptance, every strategy end to end",
    "load": "many streams at once on a fixed set of targets",
    "gateway": "the cost of HTTP through a gateway, compared with gRPC",
    "cascade": "drafters alone and stacked, and Max-Gram: Table 2 of the paper on cascades",
    "self": "targets that draft for themselves, beside plain decoding and SI",
    "rounds": "what a round and a token cost beyond forwards, by RPCs and by messages",
    "shaping": "the cost of biases, penalties and grammars",
    "soak": "very many requests, and the memory that processes keep",
}

_FOLDERS = {"self": "self_drafting"}

_HELP = """\
usage: paceline bench NAME [options]

Measure Paceline on this machine. Outputs are compared with plain decoding in every run.

benchmarks:
{benchmarks}

  paceline bench NAME --help has the options of one, with examples.
"""
_USAGE_ERROR = 2


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    name, *rest = [*arguments] or ["--help"]
    if name in {"-h", "--help"}:
        width = max(map(len, _BENCHMARKS)) + 2
        lines = [f"  {benchmark:{width}}{words}" for benchmark, words in _BENCHMARKS.items()]
        print(_HELP.format(benchmarks="\n".join(lines)), end="")
        return 0
    if name not in _BENCHMARKS:
        known = ", ".join(_BENCHMARKS)
        print(f"paceline bench: there is no benchmark {name!r}; there are {known}", file=sys.stderr)
        return _USAGE_ERROR
    folder = _FOLDERS.get(name, name)
    code: int = import_module(f"paceline_bench.{folder}.command").main(rest)
    return code
