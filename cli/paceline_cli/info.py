"""`paceline info`: describe the models and servers behind an orchestrator."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.errors import UnsupportedError
from paceline_cli.connection import open_client
from paceline_cli.server_kind import kind_of_server
from paceline_cli.standing import sentence_on, state_of
from paceline_local.options import CallerSettings, read_options
from paceline_local.screen import print_whole, table
from paceline_serving.one_line import on_one_line
from paceline_serving.settings import option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline import ServerInfo, SystemInfo

_EXAMPLES = """
paceline info
paceline info --address gpu-7:50050 --tls-authority ca.pem
paceline info --json | jq '.servers[] | select(.ready | not)'
"""


class InfoSettings(CallerSettings):
    """Describe the models and servers behind an orchestrator."""

    json_object: bool = option(False, description="print one JSON object", flag="json")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(InfoSettings, arguments, program="paceline info", examples=_EXAMPLES)
    info = asyncio.run(_ask(settings))
    if settings.json_object:
        print(json.dumps(asdict(info)))
    else:
        _print(info)
    return 0


async def _ask(settings: InfoSettings) -> SystemInfo:
    try:
        async with open_client(settings) as client:
            return await client.info()
    except UnsupportedError:
        kind = await kind_of_server(settings.address, settings)
        raise UnsupportedError(f"{settings.address} is {kind}, not an orchestrator") from None


def _print(info: SystemInfo) -> None:
    console = Console(highlight=False, markup=False)
    facts = {
        "model": info.model_name or "(no target has answered yet)",
        "fingerprint": info.model_fingerprint,
        "tokenizer": info.tokenizer_fingerprint,
        "vocabulary": f"{info.vocabulary_size} tokens",
        "context": f"{info.context_length} tokens",
        **({"adapters": ", ".join(sorted(info.lora_adapters))} if info.lora_adapters else {}),
        "running": f"{info.running_request_count} requests",
        "version": info.version,
    }
    for name, value in facts.items():
        console.print(f"{name:12}{on_one_line(value)}")
    rows = [
        (
            server.name,
            server.role,
            server.address,
            state_of(server),
            f"{server.decode_step_ns / 1e6:.2f}" if server.decode_step_ns else "",
            ", ".join(_abilities(server)),
        )
        for server in info.servers
    ]
    console.print()
    print_whole(table(("server", "role", "address", "state", "ms per token", ""), rows), console)
    if sentences := [it for server in info.servers if (it := sentence_on(server))]:
        console.print()
        for sentence in sentences:
            console.print(on_one_line(sentence), soft_wrap=True)


def _abilities(server: ServerInfo) -> Iterator[str]:
    if server.self_draft_kind:
        yield f"drafts for itself ({server.self_draft_kind})"
    if server.is_invariant:
        yield "invariant"
