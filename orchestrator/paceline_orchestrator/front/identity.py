"""The client of a call, as far as the call tells: limits and queues are shared fairly by client."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from paceline_serving.lanes import client_of, lane_in

if TYPE_CHECKING:
    from paceline_serving.keys import Caller

_DIGITS = 16


def share_of(context: Any, caller: Caller | None = None) -> str:
    """Name the client of a call: by its certificate, or its key, or its address without the port.

    Clients behind one proxy are one client here, unless the proxy passes on what tells them apart.

    Args:
        context: The call's; a grpc.aio.ServicerContext.
        caller: Whose key came with it; None where no keys are asked for.

    Returns:
        A digest: the same at every orchestrator, and no name in clear for servers and logs.
    """
    return hashlib.sha256(client_of(context, caller).encode()).hexdigest()[:_DIGITS]


def lane_of(context: Any) -> str:
    """Return the lane that the client names: a proxy has one for each of its own clients."""
    return lane_in(context.invocation_metadata())
