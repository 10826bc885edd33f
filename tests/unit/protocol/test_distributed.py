"""What DSI does that takes too many tokens for a trace; all else is in traces/distributed."""

from __future__ import annotations

from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.messages import CapacityChanged, StartDraft, StartVerify
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


def test_the_servers_there_at_the_start_may_ask_for_another_lookahead():
    task = DecodingTask((1,), 40, lookahead=4)
    method = DistributedDecoding(task, CapacityChanged((0, 1), (0,), lookahead=2))
    method.start()
    commands = method.handle(drafted(1, [2, 3]))
    blocks = [it.proposal.token_ids for it in commands if isinstance(it, StartVerify)]
    assert blocks == [(2, 3)]
