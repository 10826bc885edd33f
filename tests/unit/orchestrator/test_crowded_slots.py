"""When a request's primary is called crowded: by more than what its own move would change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline_orchestrator.decoding.slots import PrimaryTarget


def with_primary(*, others):
    """Return a request at primary at a target, where so many others are besides."""
    server = SimpleNamespace(primary_count=others)
    session = SimpleNamespace(server=server)
    slots = SimpleNamespace(all_sessions=[session], taken=[0], opening={}, sessions=[session])

    def move(_origin, goal):
        goal.primary_count += 1

    primary = PrimaryTarget(SimpleNamespace(move_primary=move), slots)
    primary.relocate()
    return primary


@pytest.mark.parametrize(("others", "elsewhere", "slot"), [(1, 1, None), (1, 0, 0), (3, 1, 0)])
def test_a_request_moves_only_to_where_it_has_fewer_beside_it(others, elsewhere, slot):
    primary = with_primary(others=others)
    assert primary.crowded_slot(SimpleNamespace(primary_count=elsewhere)) == slot
