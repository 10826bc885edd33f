"""The protocol's behaviour, as texts: traces/README.md says how to read and to write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.protocol.trace import played

TRACES = Path(__file__).parent / "traces"
PATHS = sorted(TRACES.rglob("*.txt"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_method_does_what_its_trace_says(path, request):
    told = path.read_text()
    done = played(told)
    if request.config.getoption("--rewrite-traces"):
        path.write_text(done)
    else:
        assert done == told, "if it shall be so: pytest --rewrite-traces, and read the diff"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_trace_begins_with_a_comment_that_says_what_to_look_at(path):
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    "line", ["drafted 1", "verified 1: 3", "given DSI, 2 turrets", "servers: targets 1", "promote"]
)
def test_what_the_language_does_not_have_is_refused(line):
    begin = "" if line.startswith("given") else "given DSI\nstart\n"
    with pytest.raises(AssertionError, match="not a word"):
        played(f"{begin}{line}\n")


def test_a_trace_that_no_longer_holds_is_seen():
    text = (
        TRACES / "autoregressive" / "it_asks_for_a_window_and_then_for_the_next.txt"
    ).read_text()
    assert played(text.replace("-> decode 2 at target 0", "-> decode 2 at target 1")) == text
