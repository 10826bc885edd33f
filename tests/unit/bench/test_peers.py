"""One model in many engines: who takes turns, what is compared, and who is left out."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest

import peers as command
from peer_engines.contest import Contest
from peer_engines.contestants import Contestant, Group, known_contestants
from peer_engines.environments import NotMadeError
from peer_engines.runners.measuring import Text, decode_rate, rate, streams_rate
from peer_engines.summary import summarise, tables

# An engine that says token 7 on and on; a token takes as long as its job says.
FAKE = """
import os
from peer_engines.runners.measuring import Engine, Text, run

class Fake(Engine):
    def __init__(self, job):
        if job["fault"] == "fails":
            raise RuntimeError("there is no such processor")
        self.version, self.job = "1.0", job
        assert len(os.sched_getaffinity(0)) == job["threads"] == int(os.environ["OMP_NUM_THREADS"])

    def decode(self, prompts, *, count, way):
        count -= self.job["fault"] == "short"
        seconds = self.job["seconds"][way]
        ids = [7] * count
        if self.job["fault"] == way and count > 3:
            ids[3] = 8
        return [Text(list(ids), [(1 + n * seconds, 1) for n in range(count)]) for _ in prompts]

run(Fake)
"""
PROMPTS = {
    "warm_up": [1],
    "chats": [[1, 2], [1, 3], [1, 4]],
    "first_token": {"50": [[1] * 50] * 2},
    "streams": {"4": [[1]] * 4},
}


@pytest.fixture
def fake(tmp_path):
    """Make contestants that need no engine."""
    runner = tmp_path / "fake.py"
    runner.write_text(FAKE)

    def make(name, group=Group.PEER, *, fault="", form="float32", **seconds):
        def prepare(_):
            if fault == "missing":
                raise NotMadeError("no registry has it")
            return Path(sys.executable), {"fault": fault, "seconds": seconds}

        return Contestant(
            name=name, group=group, form=form, runner=runner, prepare=prepare, ways=tuple(seconds)
        )

    return make


@pytest.fixture
def contest(tmp_path):
    """Run the command with contestants; return its exit code and what it wrote."""

    def run(*contestants, arguments=()):
        found = tmp_path / "found" / "peers.json"
        words = ["--quick", "--threads=1", f"--json={found}", f"--folder={tmp_path}", *arguments]
        code = command.main(words, contestants=contestants, prompts=PROMPTS)
        return code, json.loads(found.read_text())

    return run


def rows_of(content):
    return {row["name"]: row for row in content["rows"]}


def test_exact_services_are_compared_with_the_fastest_peer_of_any_form(fake, contest, capsys):
    code, content = contest(
        fake("services", Group.SERVICES, plain=0.02, si=0.01),
        fake("slow", plain=0.05),
        fake("fast", form="q4", plain=0.005),
        arguments=["--repeats", "2"],
    )
    assert code == 0
    assert content["exact_over_fastest_peer"] == pytest.approx(0.5)
    assert content["exact_over_fastest_peer_by_threads"] == {"1": pytest.approx(0.5)}
    rows = rows_of(content)
    assert rows["fast, plain"]["repeats_over_fastest_peer"] == [1, 1]
    assert rows["services, si"]["rates"] == pytest.approx([100, 100])
    assert rows["services, si"]["streams"] == {}
    assert rows["services, plain"]["streams"] == {"4": pytest.approx(4 * 8 / (1 + 7 * 0.02))}
    assert rows["services, plain"]["first_token_ms"] == {"50": 1000}
    assert "| services, si | 100.0 (100.0 to 100.0) | 0.50x |" in capsys.readouterr().out


def test_services_that_change_a_token_are_not_exact_and_fail_the_run(fake, contest, capsys):
    code, content = contest(
        fake("services", Group.SERVICES, fault="si", plain=0.02, si=0.01),
        fake("fast", plain=0.01),
    )
    assert code == 1
    assert content["exact_over_fastest_peer"] == pytest.approx(0.5)
    assert rows_of(content)["services, si"]["differs"] == [[0, 3], [1, 3], [2, 3]]
    told = capsys.readouterr().out
    assert "3 differ, the first from token 4" in told
    assert told.endswith("in the same form:\n  services, si\n")


def test_a_peer_that_says_something_else_is_told_and_no_fault(fake, contest):
    code, content = contest(
        fake("engine", Group.ENGINE, plain=0.02), fake("other", fault="plain", plain=0.01)
    )
    assert code == 0
    assert rows_of(content)["other, plain"]["compared_to"] == "engine, plain"
    assert len(rows_of(content)["other, plain"]["differs"]) == len(PROMPTS["chats"])


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("missing", "no registry has it"),
        ("fails", "its process ended with 1: RuntimeError: there is no such processor"),
        ("short", "its process ended with 1: ValueError: plain: a text has not 16 tokens"),
    ],
)
def test_who_cannot_take_part_is_named_with_the_reason_and_left_out(fake, contest, fault, why):
    code, content = contest(fake("broken", fault=fault, plain=1), fake("whole", plain=0.02))
    assert code == 0
    assert content["left_out"] == {"broken": why}
    assert [*rows_of(content)] == ["whole, plain"]
    assert f"- broken is left out: {why}" in tables(content)


def test_with_nobody_left_the_run_fails(fake, contest):
    code, content = contest(fake("broken", fault="missing", plain=1))
    assert code == 1
    assert content["exact_over_fastest_peer"] is None


def test_who_comes_first_changes_and_each_number_of_threads_has_its_own_rows(fake, contest):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores")
    contestants = [fake(name, plain=0.02) for name in ("a", "b")]
    _, content = contest(*contestants, arguments=["--threads", "1,2", "--repeats", "2"])
    turns = [(step["threads"], step["repeat"], step["name"]) for step in content["steps"]]
    one = [(1, 0, "a"), (1, 0, "b"), (1, 1, "b"), (1, 1, "a")]
    assert turns == [*one, *((2, repeat, name) for _, repeat, name in one)]
    assert all(step["load_average"] >= 0 for step in content["steps"])
    assert [row["threads"] for row in content["rows"]] == [1, 1, 2, 2]


def test_only_names_those_that_take_part(fake, contest, capsys):
    contestants = [fake(name, plain=0.02) for name in ("a", "b")]
    _, content = contest(*contestants, arguments=["--only", "b"])
    assert [*rows_of(content)] == ["b, plain"]
    with pytest.raises(SystemExit):
        contest(*contestants, arguments=["--only", "c"])
    assert "there is no 'c'; there are a, b" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--threads", "0"], ["--threads", "x"], ["--repeats", "0"]])
def test_impossible_numbers_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        command.main(words)
    assert f"{words[0]}:" in capsys.readouterr().err


def test_a_ratio_is_that_of_each_repeat_against_the_one_fastest_peer():
    def turn(name, repeat, speed):
        way = {"texts": [[1]], "decode_tokens_per_second": speed, "tokens_per_second": speed}
        more = {"version": "", "streams": {}, "first_token_ms": {}, "load_seconds": 1}
        of = {"name": name, "repeat": repeat, "threads": 1, "memory_bytes": 1 << 30}
        return of | more | {"ways": {"plain": way}}

    speeds = {"services": (10, 40, 30), "steady": (20, 20, 20), "jumpy": (5, 50, 10)}
    contest = Contest(
        turns=[turn(k, n, v) for k, all_ in speeds.items() for n, v in enumerate(all_)]
    )
    one = partial(Contestant, form="float32", runner=Path(), prepare=lambda _: (Path(), {}))
    group = {"services": Group.SERVICES}
    contestants = [one(name=name, group=group.get(name, Group.PEER)) for name in speeds]
    found = summarise(contest, contestants)
    assert found["exact_over_fastest_peer"] == 1.5
    assert found["rows"][0]["repeats_over_fastest_peer"] == [0.5, 2, 1.5]


def test_rates_leave_out_what_came_with_the_first_message():
    text = Text([1, 2, 3, 4], [(2.0, 2), (3.0, 1), (4.0, 1)])
    assert decode_rate([text, text]) == 1
    assert rate([text, text]) == 1
    assert streams_rate([text, Text([1], [(8.0, 1)])], 2) == 5 / 8


def test_a_token_is_taken_when_it_has_come():
    text = Text()
    text.take([], since=0)
    text.take([1, 2], since=0)
    assert (text.token_ids, [count for _, count in text.arrivals]) == ([1, 2], [2])


def test_names_are_unique_and_runners_exist():
    known = known_contestants()
    assert len({each.name for each in known}) == len(known)
    assert all(each.runner.is_file() for each in known)
    assert {each.group for each in known} == set(Group)
