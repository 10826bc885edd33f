"""Model servers whose calls end as no server's do: never, at once, with any status, with garbage.

As test_lies.py, about how many messages there are, when they come, and how a call ends.
"""

from __future__ import annotations

import pytest

from support.lies.rounds import about_conversations, about_each_status
from support.lies.trials import Arrangement, findings


@pytest.mark.parametrize("arrangement", Arrangement)
def test_an_answer_that_is_none_harms_no_request_and_no_orchestrator(arrangement):
    assert not findings(about_conversations(is_brief=True)[arrangement], arrangement)


@pytest.mark.long
@pytest.mark.parametrize("arrangement", Arrangement)
def test_each_other_status_harms_no_request(arrangement):
    assert not findings(about_conversations(is_brief=False)[arrangement], arrangement)


@pytest.mark.full
@pytest.mark.parametrize("arrangement", Arrangement)
def test_every_status_harms_no_request_at_any_method(arrangement):
    assert not findings(about_each_status()[arrangement], arrangement)
