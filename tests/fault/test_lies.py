"""Model servers that lie: no orchestrator is ended, hung, stalled, or made to blame itself.

Each field of each answer is wrong in each way that its comment forbids, while a request meets it.
tests/support/lies has the list, and README.md says what must hold and how to add to the list.
"""

from __future__ import annotations

import tracemalloc

import pytest

from support.lies.rounds import about_each_way, about_fields, about_long_lists
from support.lies.trials import Arrangement, findings

# The lie itself, with the copies that are made of its bytes on the way, has 16 MB. As a tuple of
# numbers it would have 72 MB.
MOST_BYTES = 40_000_000


@pytest.mark.parametrize("arrangement", Arrangement)
def test_a_field_that_is_wrong_harms_no_request_and_no_orchestrator(arrangement):
    assert not findings(about_fields()[arrangement], arrangement)


@pytest.mark.parametrize("arrangement", Arrangement)
def test_nothing_is_made_of_a_list_that_is_longer_than_any_may_be(arrangement):
    lies = about_long_lists()[arrangement]
    assert lies
    tracemalloc.start()
    try:
        assert not findings(lies, arrangement)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.long
@pytest.mark.parametrize("arrangement", Arrangement)
def test_a_field_that_is_wrong_harms_no_request_however_it_is_decoded(arrangement):
    assert not findings(about_each_way()[arrangement], arrangement)
