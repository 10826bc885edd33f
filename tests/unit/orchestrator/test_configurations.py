"""What differs between two configurations is told in words that every message and log can hold."""

from __future__ import annotations

import json

from paceline_orchestrator.fleet.configurations import tell_difference


def test_a_key_that_no_message_can_hold_is_shown_as_json_has_it():
    told = tell_difference('{"\\u0000\\ud800\\n":1}', '{"a":2}')
    assert told.encode("utf-8")
    assert told.isprintable()
    assert "\\u0000\\ud800\\n 1" in told


def test_a_key_inside_others_is_named_with_them():
    own, other = ({"rope": {"theta": theta}} for theta in (1, 2))
    assert "rope.theta 1, most targets' 2" in tell_difference(json.dumps(own), json.dumps(other))
