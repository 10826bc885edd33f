"""The model servers that are known, and which of them take work now.

Each server has one long-lived channel and one task that watches its health. A request is pinned to
one target model; the pool picks servers for it, and says when something has changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from bisect import insort
from collections import Counter
from contextlib import aclosing, suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Self, TypeAlias

from prometheus_client import Gauge

from paceline.errors import DeadlineError, NoTargetError, PacelineError, TokenizerMismatchError
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.bad_answers import BadAnswerError, demand
from paceline_orchestrator.fleet.discovery import Role, out_of_sight
from paceline_orchestrator.fleet.familiarity import Familiarity
from paceline_orchestrator.fleet.listeners import Listeners
from paceline_orchestrator.fleet.pauses import Pauses, status_of
from paceline_orchestrator.fleet.server import NOT_SERVING, REMOVED, ModelServer
from paceline_orchestrator.fleet.silence import SilenceWatch
from paceline_orchestrator.fleet.wire import fetch_facts, health_changes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager

    import grpc
    from prometheus_client import CollectorRegistry

    from paceline_orchestrator.fleet.discovery import Discovery, Endpoint
    from paceline_orchestrator.fleet.familiarity import FamiliarText
    from paceline_orchestrator.fleet.silence import Work
    from paceline_orchestrator.fleet.wire import ModelFacts

__all__ = ["ServerPool", "count_ready_servers"]

_MODEL_ROLES = (Role.DRAFTER, Role.TARGET)
_Key: TypeAlias = tuple[Role, str, str]  # an endpoint's key, and its address

_name = attrgetter("name")

_log = logging.getLogger(__name__)

# The health stream is renewed so often, and with it what the server says of its model.
_WATCH_SECONDS = 60.0
_RECONNECT_SECONDS = 0.1
# That of a server which is not known to be well: where certificates were renewed since, the next
# stream connects with the new ones.
_APPROACH_SECONDS = 5.0
# One that ends its health stream as soon as that gets longer pauses each time, up to the next ones.
_HASTY_SECONDS = 1.0
# A server that says what it must not is asked again after so long. A health stream whose time is
# over too early counts as such an answer.
_BAD_ANSWER_SECONDS = 5.0
# However long a server says that it is to be left alone, it is asked after so long.
_LONGEST_RETRY_SECONDS = 10.0
# Health changes in a stream: each has the server asked what its model is.
_MOST_CHANGES = 100
# A call that its server says it has is endured for so long at least; and for so many times what
# another target says that it would take there.
_LEAST_ENDURED_SECONDS = 10.0
_ENDURED_FACTOR = 4
# Another target counts if each of its own calls was answered in this part of the time.
_PROMPT_SHARE = 0.25
# So many targets are named where none is ready; all are in GetSystemInfo.
_NAMED_TARGETS = 3
# How often a choice of targets is put off by one call that waits. If always, the requests of two
# orchestrators that met at a target would leave it together, and meet again.
_PUT_OFF_SHARE = 0.5


class ServerPool:
    """All drafters and targets. Use it as an asynchronous context manager.

    Args:
        discovery: Where the servers are.
        open_channel: How to reach one.
        probe: Asks a server for a token, and tells whether it came.
        draw_lot: From 0 to 1. Breaks ties between servers, the smallest comes first, and says who
            minds a call that waits at a target. Without it several orchestrators, which know
            nothing of each other, would choose the same servers.

    Attributes:
        familiarity: Who has had which texts.
        latest_ready_at: When a server last became ready, on the monotonic clock.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        open_channel: Callable[[Endpoint], grpc.aio.Channel],
        probe: Callable[[ModelServer], Awaitable[bool]],
        draw_lot: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._discovery = discovery
        self._open_channel = open_channel
        self._draw_lot = draw_lot
        self.familiarity = Familiarity()
        self.latest_ready_at = 0.0
        self._servers: dict[_Key, ModelServer] = {}
        self._in_order: dict[Role, list[ModelServer]] = {role: [] for role in Role}
        self._watches: dict[_Key, asyncio.Task[None]] = {}
        self._listeners = Listeners()
        self._refused: set[tuple[str, str]] = set()  # servers, and why: logged once
        self._unlisted: set[_Key] = set()  # discovery lost them, their own health says SERVING
        self._tasks = asyncio.TaskGroup()
        self._pauses = Pauses(self._tasks, answers=probe, tell=self._tell)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self._follow(), name="pool: follow discovery")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._following.cancel()
        for task in self._watches.values():
            task.cancel()
        self._pauses.close()
        await self._tasks.__aexit__(None, None, None)
        for server in self._servers.values():
            await server.channel.close(None)

    @property
    def servers(self) -> list[ModelServer]:
        """All servers, drafters first, by name."""
        return [server for role in Role for server in self._in_order[role]]

    @property
    def call_count(self) -> int:
        """How many calls of this orchestrator run or wait at servers."""
        return sum(server.call_count for server in self._servers.values())

    def model(self) -> ModelFacts:
        """Return the model that new requests are served with: that of most of the ready targets.

        Raises:
            NoTargetError: No target is ready.
        """
        targets = self._in_order[Role.TARGET]
        model = _commonest_model([it for it in targets if it.ready])
        if model is None:
            raise NoTargetError(
                _why_none_is_ready(targets), retry_after_seconds=shortage.RETRY_SECONDS
            )
        return model

    def last_model(self) -> ModelFacts | None:
        """Return `model()`, or what the targets that are known were last; None if none has said."""
        with suppress(NoTargetError):
            return self.model()
        return _commonest_model([it for it in self._in_order[Role.TARGET] if not it.misfit])

    def targets(self, model: ModelFacts, text: FamiliarText | None = None) -> list[ModelServer]:
        """Return the ready targets with exactly this model, the least loaded first.

        Of equals those come first that have had most of a text.
        """
        tolerated = int(self._draw_lot() >= _PUT_OFF_SHARE)
        return self._ready(
            Role.TARGET,
            lambda facts: facts.identity == model.identity,
            text=text,
            tolerated_calls=tolerated,
        )

    def drafters(self, model: ModelFacts, text: FamiliarText | None = None) -> list[ModelServer]:
        """Return the ready drafters that can draft for this model, the least loaded first.

        Of equals those come first that have had most of a text.

        Raises:
            TokenizerMismatchError: There are drafters, but all with other tokenizers.
        """
        ready = self._ready(Role.DRAFTER, lambda _: True, text=text)
        fitting = [it for it in ready if it.facts and _same_tokens(it.facts, model)]
        for server in ready:
            if server not in fitting and server.facts:
                ours, theirs = server.facts.tokenizer_fingerprint, model.tokenizer_fingerprint
                self._refuse(server, f"its tokenizer is {ours[:12]}, the target's {theirs[:12]}")
        for server in fitting:
            self._note_reach(server, model)
        if ready and not fitting:
            raise TokenizerMismatchError("every drafter has another tokenizer than the target")
        return fitting

    def listening(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `listener`, inside the block, soon after servers or homes have changed."""
        return self._listeners.listening(listener)

    async def wait_for_model(self, timeout_seconds: float) -> ModelFacts:
        """Return `model()`, as soon as there is one.

        Raises:
            NoTargetError: The time was over first.
        """
        changed = asyncio.Event()
        with self.listening(changed.set), suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while True:
                    with suppress(NoTargetError):
                        return self.model()
                    changed.clear()
                    await changed.wait()
        return self.model()

    def move_home(self, origin: ModelServer | None, destination: ModelServer | None) -> None:
        """Note where a request is at home from now on; None is nowhere."""
        if origin is not None:
            origin.home_count -= 1
        if destination is not None:
            destination.home_count += 1
        was_left = origin is not None and origin.home_count == 0
        if was_left or (destination is not None and destination.home_count == 1):
            self._listeners.call_soon()

    def report_failure(self, server: ModelServer, error: PacelineError, *, asked_at: float) -> None:
        """Take a server out after a call to it failed that was made then; see `Pauses`."""
        self._pauses.after_failure(server, error, asked_at=asked_at)

    def suspect(self, server: ModelServer) -> None:
        """Ask a server that may be silent for a token; without one it is out until it answers."""
        self._pauses.probe(server)

    def report_success(self, server: ModelServer) -> None:
        """Note that a server does its work: the next failure is a first one."""
        server.failure_count = 0

    def _ready(
        self,
        role: Role,
        fits: Callable[[ModelFacts], bool],
        *,
        text: FamiliarText | None,
        tolerated_calls: int = 0,
    ) -> list[ModelServer]:
        ready = [it for it in self._in_order[role] if it.ready]
        found = [it for it in ready if it.facts is not None and fits(it.facts)]

        def rank(server: ModelServer) -> tuple[tuple[float, int, int, bool], float]:
            length = text.length_at(server.process_name) if text is not None else 0
            load = server.load(tolerated_calls=tolerated_calls, familiar_length=length)
            return load, self._draw_lot()

        return sorted(found, key=rank)

    def _endured_seconds(self, server: ModelServer, work: Work, *, waited: float) -> float:
        """For how long a call may be unanswered at a server that says it has it; see docs/adr/0036.

        It is for ever where nobody else could do the work: the server may be busy. What it says of
        its own speed does not count, only what others say of theirs that answer in time.
        """

        def seconds(other: ModelServer) -> float:
            here_ns = _ENDURED_FACTOR * other.latency.expected_ns(work.row_count)
            anew_ns = other.latency.expected_ns(work.whole_count)
            return max(_LEAST_ENDURED_SECONDS, here_ns / 1e9, anew_ns / 1e9)

        others = (
            it
            for it in self._in_order[Role.TARGET]
            if it is not server and it.ready and _could_replace(it, server)
        )
        prompt = (it for it in others if it.silence.longest_wait_seconds < waited * _PROMPT_SHARE)
        return min(map(seconds, prompt), default=math.inf)

    def _refuse(self, server: ModelServer, reason: str) -> None:
        """Log, once, why a server that is well is not used."""
        if (server.name, reason) not in self._refused:
            self._refused.add((server.name, reason))
            _log.error("%s is not used: %s", server.name, reason)

    def _note_reach(self, server: ModelServer, model: ModelFacts) -> None:
        """Log, once, that a drafter holds less of a text than its targets do."""
        length = server.facts.context_length if server.facts else model.context_length
        reason = f"it holds {length} tokens, and its targets {model.context_length}"
        if length < model.context_length and (server.name, reason) not in self._refused:
            self._refused.add((server.name, reason))
            name = server.name
            _log.warning("%s: requests longer than %d go on without it: %s", name, length, reason)

    async def _follow(self) -> None:
        """Let servers come, change and go with their endpoints; each has one channel for life."""
        async for endpoints in self._discovery.endpoints():
            listed = {(*it.key, it.address): it for it in endpoints}
            counts = Counter(it.role for it in endpoints)
            _log.info("found: %s", ", ".join(f"{it}s: {counts[it]}" for it in _MODEL_ROLES))
            found = self._with_those_out_of_sight(listed)
            for key in found.keys() & self._servers.keys():
                self._servers[key].endpoint = found[key]
                self._tell(self._servers[key])
            for servers in self._in_order.values():
                servers.sort(key=_name)  # a server may be known by another name now
            await self._remove(self._servers.keys() - found.keys())
            for key in found.keys() - self._servers.keys():
                self._add(key, found[key])
                await asyncio.sleep(0)  # hundreds in one turn would hold up every stream

    def _with_those_out_of_sight(self, listed: Mapping[_Key, Endpoint]) -> Mapping[_Key, Endpoint]:
        """Add the servers that discovery has lost sight of, but that say that they are well."""
        well = {key: it.endpoint for key, it in self._servers.items() if not it.health_status}
        kept = out_of_sight(listed, well=well)
        self._unlisted = kept.keys() - listed.keys()
        if kept:
            names = ", ".join(sorted(it.name for it in kept.values()))
            _log.warning("used though discovery does not say that they are ready: %s", names)
        return {**listed, **kept}

    def _add(self, key: _Key, endpoint: Endpoint) -> None:
        def endured_seconds(work: Work, waited: float) -> float:
            return self._endured_seconds(server, work, waited=waited)

        server = ModelServer(
            endpoint, self._open_channel(endpoint), silence=SilenceWatch(endured_seconds)
        )
        self._servers[key] = server
        insort(self._in_order[server.role], server, key=_name)
        self._watches[key] = self._tasks.create_task(
            self._watch(key, server), name=f"pool: watch {server.name}"
        )

    async def _remove(self, keys: Collection[_Key]) -> None:
        """Forget servers; what still runs there fails, as with any server that goes away."""
        for key in keys:
            if key not in self._servers:
                continue  # its own watch was faster
            self._watches.pop(key).cancel()
            server = self._servers.pop(key)
            self._in_order[server.role].remove(server)
            self._pauses.forget(server)
            self._refused = {it for it in self._refused if it[0] != server.name}
            server.health_status = REMOVED
            self._tell(server)
            await server.channel.close(None)
            await asyncio.sleep(0)

    async def _watch(self, key: _Key, server: ModelServer) -> None:
        """Follow a server's health for ever, or until one that is listed no more has gone."""
        hasty_count = 0
        while True:
            begun = time.monotonic()
            status, pause_seconds = await self._follow_health(server)
            is_hasty = time.monotonic() - begun < _HASTY_SECONDS
            hasty_count = hasty_count + 1 if is_hasty else 0
            if status:
                server.health_status = status
                self._tell(server)
                if key in self._unlisted:
                    await self._remove((key,))
                own_seconds = _RECONNECT_SECONDS * 2.0 ** min(max(0, hasty_count - 1), 10)
                await asyncio.sleep(max(pause_seconds, min(own_seconds, _BAD_ANSWER_SECONDS)))

    async def _follow_health(self, server: ModelServer) -> tuple[str, float]:
        """Follow it while that can be done.

        Whatever one server does, it ends neither this task nor the pool, whose tasks have one
        group; and it is not asked again and again without a pause.

        Returns:
            Why it is out, and when to try again, at least. Empty if the time of its stream is over.
        """
        # One that says NOT_SERVING may have gone meanwhile.
        seconds = _APPROACH_SECONDS if server.health_status else _WATCH_SECONDS
        begun = time.monotonic()
        try:
            await self._follow_health_for(seconds, server)
        except DeadlineError as error:
            if time.monotonic() - begun >= seconds / 2:
                return "", 0.0
            return error.reason, _BAD_ANSWER_SECONDS
        except BadAnswerError as error:
            self._refuse(server, f"it said what it must not: {error.message}")
            return status_of(error), _BAD_ANSWER_SECONDS
        except PacelineError as error:
            told_seconds = min(error.retry_after_seconds or 0.0, _LONGEST_RETRY_SECONDS)
            return error.reason or "NOT_REACHED", told_seconds
        except Exception as bug:  # noqa: BLE001 - one server must not end the watch of the others
            if (server.name, type(bug).__name__) not in self._refused:
                self._refused.add((server.name, type(bug).__name__))
                _log.exception("%s is not used: it could not be watched", server.name)
            return f"FAILED: {type(bug).__name__}", _BAD_ANSWER_SECONDS
        return "NOT_REACHED", 0.0  # it ended the stream

    async def _follow_health_for(self, seconds: float, server: ModelServer) -> None:
        changes = health_changes(server.channel, seconds=seconds)
        change_count = 0
        async with aclosing(changes):
            async for is_serving in changes:
                change_count += 1
                demand(change_count <= _MOST_CHANGES, "health", "changes all the time")
                if is_serving:
                    if server.adopt(await fetch_facts(server.models)):
                        self._refused = {it for it in self._refused if it[0] != server.name}
                    if server.health_status:
                        server.health_status = ""
                        self._pauses.after_reconnection(server)
                    if server.misfit:
                        self._refuse(server, f"it {server.misfit}")
                else:
                    server.health_status = NOT_SERVING
                self._tell(server)

    def _tell(self, server: ModelServer) -> None:
        """Tell the listeners, if what this server may be used for changed."""
        if server.told == (server.ready, server.leaving):
            return
        if server.ready and not server.told[0]:
            server.ready_since = self.latest_ready_at = time.monotonic()
        server.told = server.ready, server.leaving
        _log.info("%s is %s", server.name, "ready" if server.ready else f"out: {server.status}")
        self._listeners.call_soon()


def count_ready_servers(registry: CollectorRegistry, pool: ServerPool) -> None:
    """Show how many servers of each role take work."""
    gauge = Gauge(
        "paceline_ready_servers",
        "Servers that this orchestrator gives work to",
        ["role"],
        registry=registry,
    )

    def count(role: Role) -> int:
        return sum(it.ready for it in pool.servers if it.role is role)

    for role in _MODEL_ROLES:
        gauge.labels(role).set_function(partial(count, role))


def _commonest_model(servers: Sequence[ModelServer]) -> ModelFacts | None:
    """Return what most servers have; of its contexts, which servers may limit, the longest."""
    known = [it.facts for it in servers if it.facts]
    counts = Counter(it.identity for it in known)  # a lone one must not speak for the others
    return max(known, key=lambda it: (counts[it.identity], it.context_length), default=None)


def _why_none_is_ready(targets: Sequence[ModelServer]) -> str:
    if not targets:
        return "no target is known"
    states = [f"{it.name}: {it.status}" for it in targets[:_NAMED_TARGETS]]
    more = ["..."] if len(targets) > _NAMED_TARGETS else []
    return f"no target is ready ({', '.join(states + more)})"


def _could_replace(target: ModelServer, server: ModelServer) -> bool:
    """Whether a target could do the work of a server: of a drafter it can do without."""
    if target.facts is None or server.facts is None:
        return False
    if server.role is Role.DRAFTER:
        return _same_tokens(server.facts, target.facts)
    return target.facts.identity == server.facts.identity


def _same_tokens(drafter: ModelFacts, target: ModelFacts) -> bool:
    return (
        drafter.tokenizer_fingerprint == target.tokenizer_fingerprint
        and drafter.vocabulary_size == target.vocabulary_size
    )
