"""Answers of simulations: a case is simulated once, and those asked for last are kept."""

from __future__ import annotations

import threading

import pytest

from paceline_orchestrator.planning.simulation_cache import SimulationCache


def test_a_case_is_simulated_once_also_if_it_is_asked_for_meanwhile():
    simulated = []

    def simulate(case, **_):
        simulated.append(case)
        assert known.get(case) is None, "as a request does meanwhile, on another thread"
        return str(case)

    known = SimulationCache(simulate)
    for _ in range(3):
        known.get(7)
        known.simulate_missing()
    assert (known.get(7), simulated) == ("7", [7])


def test_a_case_whose_simulation_failed_is_forgotten_until_it_is_asked_for_again():
    outcomes = [MemoryError("once"), "an answer"]

    def simulate(_case, **_):
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    known = SimulationCache(simulate)
    known.simulate_later(7)
    with pytest.raises(MemoryError):
        known.simulate_missing()
    assert not known.is_missing_some
    assert known.get(7) is None
    known.simulate_missing()
    assert known.get(7) == "an answer"


def test_the_cases_asked_for_last_are_simulated_and_the_answers_used_last_are_kept():
    simulated = []
    known = SimulationCache(
        lambda case, **_: simulated.append(case) or case, most_missing=3, most_known=4
    )
    for case in range(5):
        known.simulate_later(case)
    known.simulate_missing()
    assert simulated == [4, 3, 2]
    known.get(4)  # used, so 3 is the oldest now
    for case in (5, 6):
        known.simulate_later(case)
        known.simulate_missing()
    assert [known.known(case) for case in (2, 3, 4, 5, 6)] == [2, None, 4, 5, 6]


def test_so_many_new_cases_that_they_push_out_the_one_that_is_simulated_end_nothing():
    asked = [[*range(1, 9)]]  # during the first simulation

    def simulate(case, **_):
        for other in asked.pop() if asked else ():
            known.simulate_later(other)
        return str(case)

    known = SimulationCache(simulate, most_missing=8)
    known.simulate_later(0)
    assert known.simulate_missing()
    assert [known.known(case) for case in range(9)] == [str(case) for case in range(9)]


def test_a_simulation_that_ends_while_cases_are_compared_changes_nothing_for_who_compares():
    begun, goes_on = threading.Event(), threading.Event()

    def simulate(_case, **_):
        begun.set()
        goes_on.wait(60)
        return "an answer"

    class Case:
        __hash__ = object.__hash__

        def __eq__(self, other):
            goes_on.set()
            worker.join(0.1)  # the end would be here; it has to wait until all are compared
            return self is other

    known, case = SimulationCache(simulate), Case()
    known.simulate_later(case)
    worker = threading.Thread(target=known.simulate_missing)
    worker.start()
    begun.wait(60)
    assert known.get(object()) is None
    worker.join()
    assert known.known(case) == "an answer"
