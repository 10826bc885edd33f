"""What is asked for while a simulation runs, on another thread, disturbs neither of the two."""

from __future__ import annotations

import threading

from paceline_orchestrator.planning.simulation_cache import SimulationCache


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
