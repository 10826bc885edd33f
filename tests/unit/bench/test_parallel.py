import pytest

from paceline_bench.parallel import compute_all


def test_results_come_in_the_order_of_the_jobs_from_other_processes_too():
    done = []
    assert compute_all(abs, [-3, 2, -1], on_done=done.append, processes=2) == [3, 2, 1]
    assert sorted(done) == [-3, -1, 2]


def test_a_single_job_needs_no_other_process():
    done = []
    assert compute_all(lambda number: number + 1, [1], on_done=done.append) == [2]
    assert done == [1]


def test_an_error_of_a_job_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        compute_all(divmod_by_zero, [1, 2], processes=1)


def divmod_by_zero(number):
    return divmod(number, 0)
