"""What every runner does with its engine: it reads a job, decodes, and tells what came when.

A runner is one process of one contestant. It runs in the contestant's own environment, so this
file needs the standard library alone. The job comes as JSON on standard input; the last line of
standard output is the result.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
RESULT = "peers-result: "
"""Begins the line with the result."""


@dataclass
class Text:
    """A continued prompt.

    Attributes:
        token_ids: The new tokens.
        arrivals: For each message: seconds after the request, and the number of its tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def take(self, token_ids: Iterable[int], *, since: float) -> None:
        """Add tokens that have come now."""
        if came := [int(each) for each in token_ids]:
            self.token_ids += came
            self.arrivals.append((time.perf_counter() - since, len(came)))


class Engine:
    """Continues prompts greedily, all at once; no token ends a text.

    Attributes:
        version: Of the engine, for the table.
    """

    version: str

    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Continue each prompt by so many tokens."""
        raise NotImplementedError

    def pids(self) -> list[int]:
        """Return the processes whose memory is the engine's."""
        return [os.getpid()]

    def close(self) -> None:
        """End what it started."""


def run(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Do the job: load the engine on the job's cores, measure, and print the result."""
    job = json.load(sys.stdin)
    # Nobody computes on beside others when the contest is ended.
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    os.sched_setaffinity(0, job["cores"])
    started = time.perf_counter()
    engine = load(job)
    loaded = time.perf_counter() - started
    try:
        result = measure(engine, job)
    finally:
        engine.close()
    print(f"\n{RESULT}{json.dumps({'load_seconds': loaded, **result})}", flush=True)


def measure(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """Let the engine do what the job says; ways of decoding take turns at each chat."""
    ways, tokens, chats = job["ways"], job["tokens"], job["chats"]
    for way in ways:
        for _ in range(2):
            engine.decode([job["warm_up"]], count=tokens, way=way)
    texts: dict[str, list[Text]] = {way: [] for way in ways}
    for turn, chat in enumerate(chats):
        first = (turn + job["repeat"]) % len(ways)
        for way in (*ways[first:], *ways[:first]):
            texts[way] += engine.decode([chat], count=tokens, way=way)
    for way, found in texts.items():
        if any(len(text.token_ids) != tokens for text in found):
            raise ValueError(f"{way}: a text has not {tokens} tokens")
    return {
        "version": engine.version,
        "ways": {
            way: {
                "texts": [text.token_ids for text in found],
                "decode_tokens_per_second": decode_rate(found),
                "tokens_per_second": rate(found),
            }
            for way, found in texts.items()
        },
        "first_token_ms": {
            length: 1e3 * min(_first_token(engine, prompt, ways[0]) for prompt in prompts)
            for length, prompts in job["first_token"].items()
        },
        "streams": {
            way: {
                count: streams_rate(
                    engine.decode(prompts, count=job["stream_tokens"], way=way), len(prompts)
                )
                for count, prompts in job["streams"].items()
            }
            for way in ways
            if way in job["stream_ways"]
        },
        "memory_bytes": sum(_memory(pid) for pid in engine.pids()),
    }


def decode_rate(texts: Sequence[Text]) -> float:
    """Return tokens per second after each text's first message: of all of its texts together."""
    tokens = sum(len(text.token_ids) - text.arrivals[0][1] for text in texts)
    return tokens / sum(text.arrivals[-1][0] - text.arrivals[0][0] for text in texts)


def rate(texts: Sequence[Text]) -> float:
    """Return tokens per second, prompts included, of texts that followed one another."""
    tokens = sum(len(text.token_ids) for text in texts)
    return tokens / sum(text.arrivals[-1][0] for text in texts)


def streams_rate(texts: Sequence[Text], count: int) -> float:
    """Return tokens per second, prompts included, of texts that began together."""
    if len(texts) != count or not all(text.token_ids for text in texts):
        raise ValueError(f"{count} streams gave {len(texts)} texts")
    tokens = sum(len(text.token_ids) for text in texts)
    return tokens / max(text.arrivals[-1][0] for text in texts)


def _first_token(engine: Engine, prompt: Sequence[int], way: str) -> float:
    (text,) = engine.decode([prompt], count=1, way=way)
    return text.arrivals[0][0]


def _memory(pid: int) -> int:
    """Return the memory that a process has in use now."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return 1024 * int(line.split()[1])
    raise ValueError(f"process {pid} has no VmRSS")
