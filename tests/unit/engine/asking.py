"""What the tests of a host ask it, and the text that its model goes on with."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from paceline.errors import PacelineError, PrefixNotHeldError
from paceline_contract.calls import DraftOptions, PrefixCall, VerifyOptions
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from unit.engine.conftest import Gate, call_on, chain, continuation, instant, until

if TYPE_CHECKING:
    import asyncio

    from paceline_engine.sessions.host import ModelHost

PROMPT = [1, 2, 3]
SPEC = SessionSpec(400)
ORACLE = continuation(ModelText(instant(), SPEC), PROMPT, 40)


def opened(host: ModelHost, spec: SessionSpec = SPEC) -> str:
    return host.open_session(spec).session_id


def asked(session_id: str, sequence: int = 1, append: list[int] | None = None) -> PrefixCall:
    return call_on(session_id, sequence, base=[], append=PROMPT if append is None else append)


async def drafted(host: ModelHost, call: PrefixCall, **window: int) -> list[int]:
    async with aclosing(host.draft(call, DraftOptions(**window))) as stream:
        return [token async for chunk in stream for token in chunk.proposal.token_ids]


async def held_length(host: ModelHost, session_id: str, *, sequence: int) -> int:
    """Return how many tokens a session holds, as the refusal of a base that is too long says."""
    call = PrefixCall(session_id, sequence, base_length=100, base_digest=bytes(16), token_ids=[1])
    with pytest.raises(PrefixNotHeldError) as refused:
        await host.verify(call)
    return int(refused.value.metadata["held_length"])


async def entered(gate: Gate, count: int = 1) -> None:
    await until(lambda: len(gate.entered) >= count)


def verifying(group: asyncio.TaskGroup, host: ModelHost, call: PrefixCall, block=(), **options):
    """Start a verification whose error is its result, so that it does not end the group."""

    async def verify():
        try:
            return await host.verify(call, chain(block), options=VerifyOptions(**options))
        except PacelineError as error:
            return error

    return group.create_task(verify(), name=f"verify {call.sequence}")
