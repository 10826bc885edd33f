"""What DSI does that takes too many tokens for a trace; all else is in traces/distributed."""

from __future__ import annotations

from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.messages import CapacityChanged, StartDraft
from paceline_protocol.task import DecodingTask
from support.chains import drafted


def test_drafts_run_at_most_512_tokens_ahead():
    task = DecodingTask((1,), 4000, draft_window=256)
    method = DistributedDecoding(task, CapacityChanged((0,), (0,)))
    windows = [command for command in method.start() if isinstance(command, StartDraft)]
    for draft_id in (1, 2):
        commands = method.handle(drafted(draft_id, range(256)))
        windows += [command for command in commands if isinstance(command, StartDraft)]
    assert [len(window.prefix) for window in windows] == [1, 257]
