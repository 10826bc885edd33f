"""Lets contestants take turns, each in a process of its own, and keeps what they say."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from peer_engines.environments import NotMadeError, runner_environment
from peer_engines.runners.measuring import RESULT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from peer_engines.contestants import Contestant
    from peer_engines.environments import Peers
    from peer_engines.prompts import Plan

_TURN_SECONDS = 600


def _say(words: str) -> None:
    print(words, flush=True)  # a file is read while it is written


class TurnFailedError(Exception):
    """A contestant's process did not end well; the text is one line."""


@dataclass(slots=True)
class Contest:
    """What was done.

    Attributes:
        turns: What each contestant's process said, with who it was, the threads and the repeat.
        left_out: Why contestants are not in it, by their names.
        steps: When each turn began, and the load average of the machine then.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)


def compete(
    contestants: Sequence[Contestant],
    peers: Peers,
    *,
    plan: Plan,
    prompts: Mapping[str, Any],
    threads: Sequence[int],
    repeats: int,
    say: Callable[[str], None] = _say,
) -> Contest:
    """Prepare all contestants, and let them take turns; who comes first changes.

    One that cannot be prepared, or fails in a turn, is left out of the whole contest: what it did
    before has nothing to be compared with.
    """
    contest = Contest()
    ready: dict[str, tuple[Contestant, Path, dict[str, Any]]] = {}
    for each in contestants:
        try:
            ready[each.name] = (each, *each.prepare(peers))
        except NotMadeError as error:
            contest.left_out[each.name] = str(error)
            say(f"{each.name} is left out: {error}")
    cores = sorted(os.sched_getaffinity(0))
    for count in threads:
        for repeat in range(repeats):
            order = [name for name in ready if name not in contest.left_out]
            first = repeat * len(order) // repeats
            for name in (*order[first:], *order[:first]):
                contestant, python, own = ready[name]
                job = _job(contestant, plan, prompts) | own
                job |= {"threads": count, "cores": cores[:count], "repeat": repeat}
                contest.steps.append(_step(name, count, repeat))
                began = time.monotonic()
                try:
                    told = run_turn(python, contestant.runner, job)
                except TurnFailedError as error:
                    contest.left_out[name] = str(error)
                    say(f"{name} is left out: {error}")
                    continue
                seconds = time.monotonic() - began
                turn = {"name": name, "threads": count, "repeat": repeat, "seconds": seconds}
                contest.turns.append(turn | told)
                rates = ", ".join(
                    f"{way} {found['decode_tokens_per_second']:.1f}"
                    for way, found in told["ways"].items()
                )
                say(f"{count} threads, repeat {repeat}, {name}: {rates} tokens/s ({seconds:.0f} s)")
    contest.turns = [turn for turn in contest.turns if turn["name"] not in contest.left_out]
    return contest


def run_turn(python: Path, runner: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run one process with a job, and return its result.

    Raises:
        TurnFailedError: It could not start, failed, took too long, or gave no result.
    """
    threads = str(job["threads"])
    with TemporaryFile("w+") as errors:
        try:
            ran = subprocess.run(  # noqa: S603 - nothing from outside
                [str(python), str(runner)],
                check=False,
                input=json.dumps(job),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                timeout=_TURN_SECONDS,
                env=runner_environment() | {"OMP_NUM_THREADS": threads},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TurnFailedError(str(error)[:500]) from error
        errors.seek(0)
        said = [line.strip() for line in errors if line.strip()]
    results = [line for line in ran.stdout.splitlines() if line.startswith(RESULT)]
    if ran.returncode or not results:
        last = said[-1] if said else "it said nothing"
        raise TurnFailedError(f"its process ended with {ran.returncode}: {last}"[:500])
    told: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT))
    return told


def _job(contestant: Contestant, plan: Plan, prompts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **prompts,
        "chats": prompts["chats"][: contestant.most_chats],
        "tokens": plan.tokens,
        "stream_tokens": plan.stream_tokens,
        "ways": list(contestant.ways),
        "stream_ways": list(contestant.stream_ways),
    }


def _step(name: str, threads: int, repeat: int) -> dict[str, Any]:
    return {
        "name": name,
        "threads": threads,
        "repeat": repeat,
        "at": time.strftime("%H:%M:%S"),
        "load_average": round(os.getloadavg()[0], 2),
    }
