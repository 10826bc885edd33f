"""Who decodes in a contest, and how: transformers, the engine alone, the services."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from paceline import DrafterKind, Strategy
from paceline_bench.pair.contest import Contestant, Group, Method, Outcome
from paceline_bench.processes import quiet
from paceline_contract.words import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline import AsyncClient, GenerateOptions
    from paceline_bench.pair.contest import Prompt
    from paceline_bench.pair.engine import Decoded, EnginePair
    from paceline_bench.pair.library import Decode, LibraryPair

_STRATEGIES = {
    Method.PLAIN: Strategy.AUTOREGRESSIVE,
    Method.SPECULATIVE: Strategy.SPECULATIVE,
    Method.DISTRIBUTED: Strategy.DISTRIBUTED,
    Method.LOOKUP: Strategy.SPECULATIVE,
}


def library_variants(pair: LibraryPair, lookaheads: Sequence[int]) -> Iterator[Contestant]:
    """Name transformers' own ways: the bare loop first, which needs the least."""
    variant = partial(_library_variant, pair)
    yield variant(Method.BARE, name="bare loop", decode=pair.bare_loop)
    yield variant(Method.PLAIN, name="generate", decode=pair.generate())
    for lookahead in lookaheads:
        name = f"generate, assisted, lookahead {lookahead}"
        decode = pair.assisted(lookahead)
        yield variant(Method.SPECULATIVE, name=name, decode=decode, lookahead=lookahead)
    yield variant(Method.LOOKUP, name="generate, prompt lookup", decode=pair.prompt_lookup())


def engine_variants(pair: EnginePair, lookaheads: Sequence[int]) -> Iterator[Contestant]:
    """Name the variants of the engine alone."""
    yield _engine_variant(Method.PLAIN, "non-SI", decode=pair.plain)
    for lookahead in lookaheads:
        name, decode = f"SI, lookahead {lookahead}", pair.speculative(lookahead)
        yield _engine_variant(Method.SPECULATIVE, name, decode=decode, lookahead=lookahead)


def lookup_variants(
    library: LibraryPair,
    engine: EnginePair,
    client: AsyncClient,
    *,
    lookahead: int,
    pids: Sequence[int],
) -> Iterator[Contestant]:
    """Name everybody's variants to draft from the text alone, after the plain ones.

    Args:
        library: Of transformers.
        engine: The same models in this process.
        client: Of the services.
        lookahead: Draft tokens in a verification, for all of them.
        pids: Of the servers.
    """
    of_library = partial(_library_variant, library)
    yield of_library(Method.PLAIN, name="generate", decode=library.generate())
    lookup = library.prompt_lookup(lookahead)
    name = "generate, prompt lookup"
    yield of_library(Method.LOOKUP, name=name, decode=lookup, lookahead=lookahead)
    yield _engine_variant(Method.PLAIN, "non-SI", decode=engine.plain)
    max_gram = engine.from_the_text(lookahead)
    yield _engine_variant(Method.LOOKUP, "SI, Max-Gram", decode=max_gram, lookahead=lookahead)
    yield _service_variant(client, Method.PLAIN, "non-SI", pids=pids, targets=1)
    yield _service_variant(client, Method.LOOKUP, "SI, Max-Gram", pids=pids, lookahead=lookahead)


def service_variants(
    client: AsyncClient, lookaheads: Sequence[int], *, pids: Sequence[int]
) -> Iterator[Contestant]:
    """Name the services' variants; DSI with the planner's lookahead."""
    yield _service_variant(client, Method.PLAIN, "non-SI", pids=pids)
    for count in lookaheads:
        name = f"SI, lookahead {count}"
        yield _service_variant(client, Method.SPECULATIVE, name, pids=pids, lookahead=count)
    yield _service_variant(client, Method.DISTRIBUTED, "DSI", pids=pids)


def sharing_variants(
    client: AsyncClient, target_count: int, *, pids: Sequence[int]
) -> Iterator[Contestant]:
    """Name the services' variants that differ in how many processes compute at once.

    Plain decoding has one, SI takes turns, DSI has the drafter and 1, 2, ... targets. SI and DSI
    have the planner's lookahead.
    """
    yield _service_variant(client, Method.PLAIN, "non-SI", pids=pids, targets=1)
    yield _service_variant(client, Method.SPECULATIVE, "SI", pids=pids, targets=1)
    for count in range(1, target_count + 1):
        name = f"DSI on {counted(count, 'target')}"
        yield _service_variant(client, Method.DISTRIBUTED, name, pids=pids, targets=count)


def _library_variant(
    pair: LibraryPair, method: Method, *, name: str, decode: Decode, lookahead: int | None = None
) -> Contestant:
    async def run(prompt: Prompt, count: int) -> Outcome:
        forwards, started_ns = pair.target_forward_count, time.perf_counter_ns()
        token_ids = decode(prompt, count)
        return Outcome(
            token_ids=token_ids,
            elapsed_ns=time.perf_counter_ns() - started_ns,
            target_forwards=pair.target_forward_count - forwards,
        )

    return Contestant(Group.LIBRARY, method, name=name, run=run, lookahead=lookahead)


def _engine_variant(
    method: Method,
    name: str,
    *,
    decode: Callable[[Prompt, int], Decoded],
    lookahead: int | None = None,
) -> Contestant:
    async def run(prompt: Prompt, count: int) -> Outcome:
        started_ns = time.perf_counter_ns()
        decoded = decode(prompt, count)
        accepted = sum(block.accepted for block in decoded.blocks)
        return Outcome(
            token_ids=decoded.token_ids,
            elapsed_ns=time.perf_counter_ns() - started_ns,
            target_forwards=len(decoded.forward_ns),
            first_token_ns=decoded.first_token_ns,
            forward_ns=sum(decoded.forward_ns) + decoded.draft_ns,
            accepted=accepted,
            rejected=sum(block.accepted < block.drafted for block in decoded.blocks),
        )

    return Contestant(Group.ENGINE, method, name=name, run=run, lookahead=lookahead)


def _service_variant(
    client: AsyncClient,
    method: Method,
    name: str,
    *,
    pids: Sequence[int],
    lookahead: int | None = None,
    targets: int | None = None,
) -> Contestant:
    """Name a variant of the services.

    After each text the servers' processes are given time for what is withdrawn and still runs.
    """
    options: GenerateOptions = {"strategy": _STRATEGIES[method], "ignore_eos": True}
    if method is Method.SPECULATIVE:
        options["dispatch"] = "blocks"  # drafter and target take turns, as the library's do
    if method is Method.LOOKUP:
        options["drafter"] = DrafterKind.MAX_GRAM
    if lookahead is not None:
        options["lookahead"] = lookahead
    if targets is not None:
        options["targets"] = targets

    async def run(prompt: Prompt, count: int) -> Outcome:
        started_ns = time.perf_counter_ns()
        request: GenerateOptions = {**options, "max_tokens": count}
        completion = await client.generate(prompt, **request).collect()
        elapsed_ns = time.perf_counter_ns() - started_ns
        await quiet(pids)
        statistics = completion.finished.statistics
        return Outcome(
            token_ids=completion.token_ids,
            elapsed_ns=elapsed_ns,
            target_forwards=statistics.target_forward_count,
            first_token_ns=statistics.time_to_first_token_ns,
            forward_ns=statistics.forward_ns,
            accepted=statistics.accepted_token_count,
            rejected=statistics.rejected_token_count,
        )

    return Contestant(
        Group.SERVICES, method, name=name, run=run, lookahead=lookahead, targets=targets
    )
