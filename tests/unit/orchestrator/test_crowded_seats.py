"""When a request's home is called crowded: by more than what its own move would change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline_orchestrator.decoding.seats import Home


def at_home(*, others):
    """Return a request at home at a target, where so many others are besides."""
    server = SimpleNamespace(home_count=others)
    session = SimpleNamespace(server=server)
    seats = SimpleNamespace(everyone=[session], taken=[0], arriving={}, sessions=[session])

    def move(_origin, goal):
        goal.home_count += 1

    home = Home(SimpleNamespace(move_home=move), seats)
    home.settle()
    return home


@pytest.mark.parametrize(("others", "elsewhere", "seat"), [(1, 1, None), (1, 0, 0), (3, 1, 0)])
def test_a_request_moves_only_to_where_it_has_fewer_beside_it(others, elsewhere, seat):
    home = at_home(others=others)
    assert home.crowded_seat(SimpleNamespace(home_count=elsewhere)) == seat
