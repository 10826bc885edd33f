"""For how long a call may be unanswered at a server that says it has it; see docs/adr/0036."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.fitting import could_replace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.silence import Work

# A call that its server says it has is endured for so long at least; and for so many times what
# another target says that it would take there.
_LEAST_ENDURED_SECONDS = 10.0
_ENDURED_FACTOR = 4
# Another target counts if each of its own calls was answered in this part of the time.
_PROMPT_SHARE = 0.25


def endured_seconds(
    server: ModelServer, work: Work, *, waited: float, targets: Iterable[ModelServer]
) -> float:
    """Return for how many seconds a server may have a call in sight and not answer it.

    It is for ever where nobody else could do the work: the server may be busy. What it says of its
    own speed does not count, only what others say of theirs that answer in time.

    Args:
        server: Where the call waits.
        work: What it asks for.
        waited: For how many seconds it has waited.
        targets: All that are known.
    """

    def seconds(other: ModelServer) -> float:
        here_ns = _ENDURED_FACTOR * other.latency.expected_ns(work.row_count)
        anew_ns = other.latency.expected_ns(work.whole_count)
        return max(_LEAST_ENDURED_SECONDS, here_ns / 1e9, anew_ns / 1e9)

    others = (
        it for it in targets if it is not server and it.ready and could_replace(it, server, work)
    )
    prompt = (it for it in others if it.silence.longest_wait_seconds < waited * _PROMPT_SHARE)
    return min(map(seconds, prompt), default=math.inf)
