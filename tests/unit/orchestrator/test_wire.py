"""What a failed RPC of a model server means to the orchestrator."""

from __future__ import annotations

import grpc
import pytest

from paceline import errors
from paceline_orchestrator.fleet.wire import answer


async def failed(code):
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no details")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidFieldError),
        (grpc.StatusCode.UNAVAILABLE, errors.ConnectionLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineError),
    ],
)
async def test_a_status_without_details_is_what_it_means_between_servers(code, error):
    with pytest.raises(error):
        await answer(failed(code))
