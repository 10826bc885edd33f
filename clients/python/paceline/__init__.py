"""Paceline's Python client: a large model's exact output, faster.

    async with paceline.AsyncClient("127.0.0.1:50050") as client:
        async for chunk in client.generate("def fib(n):", max_tokens=64):
            print(chunk.text, end="")

`Client` is the same without asyncio. Errors are in `paceline.errors`, and all of them are
`PacelineError`s.

The names below are loaded when they are first used (PEP 562): `import paceline`, and
`paceline.errors` on its own, cost neither gRPC nor protobuf.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.client import AsyncClient, AsyncGeneration
    from paceline.credentials import Tls
    from paceline.errors import PacelineError
    from paceline.generation import (
        ChatTemplate,
        Chunk,
        Completion,
        DispatchPolicy,
        DrafterKind,
        Finished,
        FinishReason,
        ModelForwards,
        PromptChunk,
        ServerInfo,
        Started,
        Statistics,
        Strategy,
        SystemInfo,
        TimelineEvent,
        TimelineEventKind,
        TokenLogprob,
        TokenOrigin,
        Tokens,
        Usage,
        VerificationRule,
    )
    from paceline.grammar import Grammar
    from paceline.prompts import FillIn, PromptPart
    from paceline.request import GenerateOptions
    from paceline.sync_client import Client, Generation

__all__ = [
    "AsyncClient",
    "AsyncGeneration",
    "ChatTemplate",
    "Chunk",
    "Client",
    "Completion",
    "DispatchPolicy",
    "DrafterKind",
    "FillIn",
    "FinishReason",
    "Finished",
    "GenerateOptions",
    "Generation",
    "Grammar",
    "ModelForwards",
    "PacelineError",
    "PromptChunk",
    "PromptPart",
    "ServerInfo",
    "Started",
    "Statistics",
    "Strategy",
    "SystemInfo",
    "TimelineEvent",
    "TimelineEventKind",
    "Tls",
    "TokenLogprob",
    "TokenOrigin",
    "Tokens",
    "Usage",
    "VerificationRule",
]

_HOMES = {
    "AsyncClient": "client",
    "AsyncGeneration": "client",
    "Client": "sync_client",
    "FillIn": "prompts",
    "Grammar": "grammar",
    "GenerateOptions": "request",
    "Generation": "sync_client",
    "PacelineError": "errors",
    "PromptPart": "prompts",
    "Tls": "credentials",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    home = import_module(f"paceline.{_HOMES.get(name, 'generation')}")
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
