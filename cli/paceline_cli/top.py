"""`paceline top`: a live view of a running system."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from typing import TYPE_CHECKING

import aiohttp
from pydantic import Field
from rich.console import Console
from rich.live import Live

from paceline.errors import ConnectionLostError
from paceline_cli.connection import open_client
from paceline_cli.top_view import draw, view
from paceline_cli.top_watch import Watch
from paceline_local.metrics_pages import parse_sources
from paceline_local.options import CallerSettings, read_options
from paceline_local.up_record import metrics_addresses
from paceline_serving.settings import StringList, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from paceline_cli.top_watch import Snapshot

_EXAMPLES = """
paceline top                                       beside `paceline up`
paceline top --once                                one reading, as plain text
paceline top --metrics paceline-metrics:9090       every pod behind a headless Service
paceline top --metrics target-0=gpu-1:9090,target-1=gpu-2:9090,gpu-3:9090
paceline top --json | jq .totals.tokens_per_second
"""
_NO_METRICS = "no metrics: --metrics says where servers show them (their --metrics-listen)"
_PLAIN_WIDTH = 160


class TopSettings(CallerSettings):
    """Watch pools, servers, sessions, acceptance, queues and waste of a running system.

    Rates are averages between two readings. Ctrl-C ends it.
    """

    metrics: StringList = Field(
        (),
        description="addresses of the servers' metrics: HOST:PORT, NAME=HOST:PORT or a URL; a"
        " host name with several addresses stands for all of them. Default: those of"
        " `paceline up` at --address",
    )
    interval_seconds: float = option(
        2.0, description="seconds between two readings", flag="interval", ge=0.1, le=3600
    )
    once: bool = Field(
        False, description="print one reading as text and end, as always without a terminal"
    )
    json_object: bool = option(
        False, description="print one JSON object a line, one for each reading", flag="json"
    )
    timeout_seconds: float = Field(2.0, description="seconds to wait for an answer", gt=0)


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(TopSettings, arguments, program="paceline top", examples=_EXAMPLES)
    try:
        asyncio.run(_watch(settings))
    except KeyboardInterrupt:
        return 0  # there is no other way to end it
    return 0


async def _watch(settings: TopSettings) -> None:
    """Read and show, again and again.

    Raises:
        ConnectionLostError: No server answers the first time.
    """
    task = asyncio.current_task()
    assert task is not None
    # SIGTERM must restore the terminal, too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    known = settings.metrics or [
        f"{name}={address}" for name, address in metrics_addresses(settings.address).items()
    ]
    timeout = aiohttp.ClientTimeout(total=settings.timeout_seconds)
    async with open_client(settings) as client, aiohttp.ClientSession(timeout=timeout) as session:
        watch = Watch(client, session, parse_sources(known))
        first = await watch.snapshot()
        if first.is_empty:
            raise ConnectionLostError(first.problem)
        if settings.json_object:
            await _print_json(watch, settings)
        elif settings.once or not sys.stdout.isatty():
            await _print_once(watch, settings)
        else:
            await _show_live(watch, settings, first)


async def _print_json(watch: Watch, settings: TopSettings) -> None:
    while True:
        await asyncio.sleep(settings.interval_seconds)
        shown = view(await watch.snapshot())
        print(json.dumps({"time": time.time(), **shown.record()}), flush=True)
        if settings.once:
            return


async def _print_once(watch: Watch, settings: TopSettings) -> None:
    await asyncio.sleep(settings.interval_seconds)
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(highlight=False, width=width)
    console.print(_drawn(await watch.snapshot(), settings, console))


async def _show_live(watch: Watch, settings: TopSettings, snapshot: Snapshot) -> None:
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_drawn(snapshot, settings, console), refresh=True)
            await asyncio.sleep(settings.interval_seconds)
            snapshot = await watch.snapshot()


def _drawn(snapshot: Snapshot, settings: TopSettings, console: Console) -> RenderableType:
    words = [
        "paceline top",
        settings.address,
        time.strftime("%H:%M:%S"),
        f"every {settings.interval_seconds:g} s",
    ]
    title = "  ".join(words if snapshot.scrapes else [*words, _NO_METRICS])
    return draw(view(snapshot), title=title, console=console)
