"""In which order processes get tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from xdist.remote import Producer

from support.spreading import ScheduledByServers

SERVERS = [
    f"tests/{ring}/test_{n}.py::test_it" for ring in ("contract", "fault") for n in range(16)
]
UNITS = [f"tests/unit/part/test_{n}.py::test_it" for n in range(30)]
SHARING = [f"tests/e2e/test_{n}.py::test_it" for n in range(2)]


class Process:
    """Stands for one that runs tests."""

    shutting_down = False

    def __init__(self) -> None:
        self.given: list[str] = []
        self.gateway = SimpleNamespace(id="gw")

    def send_runtest_some(self, indices) -> None:
        self.given += [COLLECTED[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


COLLECTED = [*SERVERS[:9], *SHARING, *SERVERS[9:], *UNITS]


@pytest.fixture
def scheduled(tmp_path):
    """A run in six processes, whose end-to-end tests share their servers."""
    folder = tmp_path / "tests/e2e"
    folder.mkdir(parents=True)
    for n in range(2):
        (folder / f"test_{n}.py").write_text("def test_it(bundled): ...")
    option = SimpleNamespace(tx=["6*popen"], loadscopereorder=False)
    config = SimpleNamespace(
        option=option, rootpath=tmp_path, getvalue=lambda name: getattr(option, name)
    )
    run = ScheduledByServers(config, Producer("test", enabled=False))
    processes = [Process() for _ in range(6)]
    for process in processes:
        run.add_node(process)
    for process in processes:
        run.add_node_collection(process, COLLECTED)
    run.schedule()
    return run, processes


def rounds(run, processes):
    """Let each process end one test after the other, in turns, until all tests are done."""
    done = 0
    while done < max(len(it.given) for it in processes):
        for process in processes:
            if done < len(process.given):
                run.mark_test_complete(process, COLLECTED.index(process.given[done]))
        done += 1
        yield [process.given[done] for process in processes if done < len(process.given)]


def test_all_tests_run_once_and_those_that_share_servers_come_first_in_one_process(scheduled):
    run, processes = scheduled
    assert processes[0].given[:2] == SHARING
    for _ in rounds(run, processes):
        pass
    assert sorted(test for process in processes for test in process.given) == sorted(COLLECTED)


def test_while_there_are_tests_of_both_kinds_a_third_of_the_processes_compute(scheduled):
    run, processes = scheduled
    looked = 0
    for now in rounds(run, processes):
        if len({it.startswith("tests/unit/") for it in run.workqueue}) == 2:
            looked += 1
            assert sum(it in UNITS for it in now) == 2, now
    assert looked > 3
