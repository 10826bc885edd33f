from __future__ import annotations

import pytest

from paceline_bench.least_squares import fitted_slope


def test_points_on_a_line_have_its_slope_and_no_error():
    assert fitted_slope([(1, 5), (2, 7), (4, 11)]) == pytest.approx((2, 0))


def test_the_error_of_a_slope_is_that_of_least_squares():
    # The line is 1 + x; it misses by 1, 2 and 1, so the variance of a point is 6 / (3 - 2).
    slope, error = fitted_slope([(0, 0), (1, 4), (2, 2)])
    assert (slope, error) == pytest.approx((1, 3**0.5))


def test_the_more_points_say_the_same_the_smaller_is_the_error():
    points = [(0, 0), (1, 4), (2, 2)]
    _, once = fitted_slope(points)
    _, four_times = fitted_slope(points * 4)
    assert four_times == pytest.approx(once * ((3 - 2) / (12 - 2)) ** 0.5)
