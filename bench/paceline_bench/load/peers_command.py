"""`paceline bench load --backend transformers`: real models under load, beside their peers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from paceline import AsyncClient, Strategy
from paceline.errors import InvalidFieldError
from paceline_bench.charts import save_figure
from paceline_bench.load.peer_chart import draw_peers
from paceline_bench.load.peer_tables import peer_findings, peer_tables
from paceline_bench.load.peers import (
    cut_prompts,
    insist,
    local_peer,
    measure_peers,
    peer_rows,
    service_peer,
)
from paceline_bench.load.settings import REQUESTS, SESSIONS, STRATEGIES
from paceline_bench.load.streams import Load, decode_plainly, warm_up
from paceline_bench.pair.contest import Group, read_prompts
from paceline_bench.report import load_average, write_json
from paceline_contract.words import counted
from paceline_engine.loading import LoadOptions, load_backend
from paceline_local.bundled import find_models
from paceline_local.models import NOTHING_KEPT
from paceline_local.running import running_system
from paceline_local.screen import progress
from paceline_local.system import LocalSystemConfig

if TYPE_CHECKING:
    from paceline_bench.load.peers import Peer
    from paceline_bench.load.settings import LoadSettings
    from paceline_bench.load.streams import Prompt
    from paceline_bench.report import Row
    from paceline_engine.terms.backend import Backend
    from paceline_local.bundled import BundledModels

_TOLD = {"drafters", "prompt_tokens", "requests", "rounds", "targets", "threads", "tokens"}


def run_beside_peers(settings: LoadSettings) -> int:
    """Measure, tell, and keep; return the exit code."""
    load_at_start = load_average()
    bundled = find_models(settings.models)
    engine = load_backend(LoadOptions(model=str(bundled.target), threads=settings.threads))
    prompts = _prompts(settings, bundled, engine)
    rows = asyncio.run(_measured(settings, bundled, engine=engine, prompts=prompts))
    print(f"# {_title(settings)}\n")
    print(peer_tables(rows), *peer_findings(rows), sep="\n")
    if settings.json_file is not None:
        system = settings.model_dump(mode="json", include=_TOLD)
        write_json(settings.json_file, rows, load_at_start=load_at_start, system=system)
    if settings.chart is not None:
        save_figure(draw_peers(rows, title=_title(settings)), settings.chart)
    return 0 if all(row["identical"] for row in rows) else 1


def _prompts(settings: LoadSettings, bundled: BundledModels, engine: Backend) -> tuple[Prompt, ...]:
    """Cut as many prompts as are decoded at once, in tokens, out of the held-out ones."""
    from tokenizers import Tokenizer

    room = engine.description.context_length
    if settings.prompt_tokens + settings.tokens > room:
        raise InvalidFieldError.of(
            "prompt_tokens", f"with {settings.tokens} more exceeds the models' context of {room}"
        )
    assert engine.tokenizer is not None
    encoded = Tokenizer.from_str(engine.tokenizer.decode()).encode_batch(
        read_prompts(bundled.prompts)
    )
    count = max(settings.requests, *settings.streams)
    return tuple(cut_prompts([each.ids for each in encoded], count, length=settings.prompt_tokens))


async def _measured(
    settings: LoadSettings, bundled: BundledModels, *, engine: Backend, prompts: tuple[Prompt, ...]
) -> list[Row]:
    loads = [
        Load(
            prompts=prompts,
            strategy=Strategy.AUTOREGRESSIVE,
            stream_count=count,
            request_count=max(count, settings.requests),
            max_tokens=settings.tokens,
        )
        for count in settings.streams
    ]
    async with (
        running_system(_system(settings, bundled)) as system,
        AsyncClient(system.orchestrator_address) as client,
    ):
        peers = [*_services(settings, client), *_local(settings, bundled, engine)]
        measure = partial(
            measure_peers,
            peers,
            orchestrator_pid=system.orchestrator.pid,
            model_pids=[server.pid for server in (*system.targets, *system.drafters)],
        )
        with progress("the reference and a warm-up", total=len(peers)) as step:
            await warm_up([client], max_tokens=settings.tokens)
            plainly = partial(decode_plainly, client, prompts, max_tokens=settings.tokens)
            expected = await insist(plainly, step)
            await measure(loads[:1], rounds=1, on_run=step)
        total = settings.rounds * len(loads) * len(peers)
        with progress("loading", total=total) as step:
            entries = await measure(loads, rounds=settings.rounds, on_run=step)
    return peer_rows(entries, expected)


def _services(settings: LoadSettings, client: AsyncClient) -> list[Peer]:
    names = ("non-si", *settings.strategies)
    return [service_peer(client, each) for name, each in STRATEGIES.items() if name in names]


def _local(settings: LoadSettings, bundled: BundledModels, engine: Backend) -> list[Peer]:
    from paceline_bench.load.together import LibraryBatches, decode_together

    library = LibraryBatches(
        str(bundled.target),
        most_texts=max(settings.streams),
        longest=settings.prompt_tokens + settings.tokens,
    )
    plain = Strategy.AUTOREGRESSIVE.abbreviation
    return [
        local_peer(Group.ENGINE, plain, partial(decode_together, engine)),
        local_peer(Group.LIBRARY, "generate", library.padded),
        local_peer(
            Group.LIBRARY, "continuous batching", library.continuous, ready=library.batching
        ),
    ]


def _system(settings: LoadSettings, bundled: BundledModels) -> LocalSystemConfig:
    flags = (
        f"--threads={settings.threads}",
        f"--session-limit={SESSIONS}",
        f"--queue-limit={SESSIONS}",
        NOTHING_KEPT,
    )
    return LocalSystemConfig(
        targets=settings.targets,
        drafters=settings.drafters,
        target_arguments=(f"--model={bundled.target}", *flags),
        drafter_arguments=(f"--model={bundled.drafter}", *flags),
        orchestrator_arguments=(f"--request-limit={REQUESTS}",),
    )


def _title(settings: LoadSettings) -> str:
    return (
        f"{counted(settings.targets, 'target')}, {counted(settings.drafters, 'drafter')}, "
        f"{counted(settings.threads, 'thread')} each; {settings.prompt_tokens} tokens of prompt, "
        f"{settings.tokens} of text"
    )
