"""The model servers that are known, and which of them take work now.

Each server has one long-lived channel and one task that watches its health. A request is pinned to
one target model; the pool picks servers for it, and says when something has changed, and how each
server stands.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import insort
from collections import Counter
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Self, TypeAlias

from paceline.errors import NoTargetError, TokenizerMismatchError
from paceline_orchestrator.fleet.discovery import MODEL_ROLES, Role, out_of_sight
from paceline_orchestrator.fleet.endurance import endured_seconds
from paceline_orchestrator.fleet.failed_drafts import FailedDrafts
from paceline_orchestrator.fleet.familiarity import Familiarity
from paceline_orchestrator.fleet.fitting import drafter_obstacle, fits
from paceline_orchestrator.fleet.health_watch import HealthWatch
from paceline_orchestrator.fleet.listeners import Listeners
from paceline_orchestrator.fleet.losses import PastLosses
from paceline_orchestrator.fleet.pauses import Pauses, Probed
from paceline_orchestrator.fleet.quarantine import Quarantine
from paceline_orchestrator.fleet.served_model import ServedModel
from paceline_orchestrator.fleet.server import REMOVED, ModelServer, ServerLoad
from paceline_orchestrator.fleet.silence import SilenceWatch
from paceline_orchestrator.fleet.standing import Orders, standings
from paceline_orchestrator.fleet.standing_log import StandingLog

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping
    from contextlib import AbstractContextManager

    import grpc

    from paceline.errors import PacelineError
    from paceline_orchestrator.fleet.discovery import Discovery, Endpoint
    from paceline_orchestrator.fleet.familiarity import FamiliarText
    from paceline_orchestrator.fleet.silence import Work
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.fleet.words import Standing

_Key: TypeAlias = tuple[Role, str, str]  # an endpoint's key, and its address

_name = attrgetter("name")

_log = logging.getLogger(__name__)

# How often a choice of targets is put off by one call that waits. If always, the requests of two
# orchestrators that met at a target would leave it together, and meet again.
_PUT_OFF_SHARE = 0.5
# A target that has failed more often without a good answer is not waited for.
_FEW_FAILURES = 2


class ServerPool:
    """All drafters and targets. Use it as an asynchronous context manager.

    Args:
        discovery: Where the servers are.
        open_channel: How to reach one.
        probe: Asks a server for a token, and tells whether it came.
        draw_lot: Draws a number from 0 to 1. It breaks ties between servers (the smallest comes
            first), and decides which requests mind a call that waits at a target. Without it
            several orchestrators, which know nothing of each other, would choose the same servers.

    Attributes:
        failed_drafts: Which drafters pause for the requests of one client.
        familiarity: Which servers have had which texts.
        latest_ready_at: When a server last became ready, on the monotonic clock.
        orders: The requests so far; each request is counted here when it begins.
        past_losses: What requests that have ended had lost.
        quarantine: Which targets are kept for requests that may be what ends them.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        open_channel: Callable[[Endpoint], grpc.aio.Channel],
        probe: Callable[[ModelServer], Awaitable[Probed]],
        draw_lot: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._discovery = discovery
        self._open_channel = open_channel
        self._draw_lot = draw_lot
        self.failed_drafts = FailedDrafts()
        self.familiarity = Familiarity()
        self.past_losses = PastLosses()
        self.latest_ready_at = 0.0
        self.orders = Orders()
        self._servers: dict[_Key, ModelServer] = {}
        self._in_order: dict[Role, list[ModelServer]] = {role: [] for role in Role}
        self._watches: dict[_Key, asyncio.Task[None]] = {}
        self._listeners = Listeners()
        self.quarantine = Quarantine(self._listeners.call_soon)
        self._served = ServedModel(self._in_order[Role.TARGET])
        self._unlisted: set[_Key] = set()  # discovery lost them, their own health says SERVING
        self._tasks = asyncio.TaskGroup()
        self._pauses = Pauses(self._tasks, answers=probe, tell=self._tell)
        self._health = HealthWatch(pauses=self._pauses, tell=self._tell)
        self._standing_log = StandingLog(self.standings)

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self._follow(), name="pool: follow discovery")
        self._telling = self._tasks.create_task(
            self._standing_log.run(), name="pool: log how servers stand"
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._following.cancel()
        self._telling.cancel()
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

    def model(self, *, lora: str = "") -> ModelFacts:
        """Return the model that new requests are served with; see `ServedModel.choose`."""
        return self._served.choose(lora=lora)

    def with_those_away(self, model: ModelFacts) -> ModelFacts:
        """Return a model with what any of its targets can do, also one that may be back soon."""
        return self._served.with_those_away(model)

    def silent_target(self) -> str | None:
        """Name a target that may be ready soon and has not said what it has; see ServedModel."""
        return self._served.silent_target()

    def lora_adapters(self) -> Mapping[str, str]:
        """Return the model's fingerprint with each LoRA adapter that it has, also if it is away."""
        return self._served.lora_adapters()

    def last_model(self) -> ModelFacts | None:
        """Return `model()`, or what the targets that are known were last; None if none has said."""
        return self._served.last()

    def targets(self, model: ModelFacts, text: FamiliarText | None = None) -> list[ModelServer]:
        """Return the ready targets with exactly this model, the least loaded first.

        Of equals those come first that have had most of a text.
        """
        tolerated = int(self._draw_lot() >= _PUT_OFF_SHARE)
        return self._ready(
            Role.TARGET,
            lambda facts: fits(facts, model),
            text=text,
            tolerated_calls=tolerated,
        )

    def targets_with_tokenizer_of(
        self, model: ModelFacts, *, with_paused: bool = False
    ) -> list[ModelServer]:
        """Return the ready targets that name a model's tokenizer, those with that model first.

        Args:
            model: The model.
            with_paused: Also those that are well, and take no work for some seconds, unless they
                have failed again and again.
        """
        named = model.tokenizer_fingerprint
        found = [
            it
            for it in self._in_order[Role.TARGET]
            if it.ready or (with_paused and it.pauses and it.failure_count <= _FEW_FAILURES)
            if it.facts and it.facts.tokenizer_fingerprint == named
        ]
        return sorted(found, key=lambda it: not (it.facts and fits(it.facts, model)))

    def has_target_away(self, model: ModelFacts) -> bool:
        """Whether a target that may have this model takes no work now, and may be back soon."""
        targets = self._in_order[Role.TARGET]
        away = (it for it in targets if it.may_be_back_soon and not (it.twin or it.misfit))
        return any(it.facts is None or fits(it.facts, model) for it in away)

    def drafters(self, model: ModelFacts, text: FamiliarText | None = None) -> list[ModelServer]:
        """Return the ready drafters that can draft for this model, the least loaded first.

        Of equals those come first that have had most of a text.

        Raises:
            TokenizerMismatchError: There are drafters, but all with other tokenizers, also those
                that may be back soon.
        """

        def can_draft(drafter: ModelServer) -> bool:
            return drafter.facts is not None and drafter_obstacle(drafter.facts, model) is None

        ready = self._ready(Role.DRAFTER, lambda _: True, text=text)
        fitting = [it for it in ready if can_draft(it)]
        away = (it for it in self._in_order[Role.DRAFTER] if it.may_be_back_soon)
        if ready and not fitting and not any(map(can_draft, away)):
            raise TokenizerMismatchError("every drafter has another tokenizer than the target")
        return fitting

    def standings(self) -> Mapping[ModelServer, Standing]:
        """Say of each server, drafters first, whether it is used, rests, or is not used and why."""
        return standings(self.servers, model=self.last_model(), orders=self.orders)

    def listening(self, listener: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `listener`, inside the block, soon after servers or primary targets have changed."""
        return self._listeners.listening(listener)

    async def wait_for_model(self, timeout_seconds: float, *, lora: str = "") -> ModelFacts:
        """Return `model()`, as soon as there is one.

        Raises:
            NoTargetError: The time was over first.
            ModelNotFoundError: No target has such a LoRA adapter.
        """
        changed = asyncio.Event()
        with self.listening(changed.set), suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                while True:
                    with suppress(NoTargetError):
                        return self.model(lora=lora)
                    changed.clear()
                    await changed.wait()
        return self.model(lora=lora)

    def move_primary(self, origin: ModelServer | None, destination: ModelServer | None) -> None:
        """Note which target is a request's primary from now on; None is none."""
        if origin is not None:
            origin.primary_count -= 1
        if destination is not None:
            destination.primary_count += 1
        was_left = origin is not None and origin.primary_count == 0
        if was_left or (destination is not None and destination.primary_count == 1):
            self._listeners.call_soon()

    def report_failure(self, server: ModelServer, error: PacelineError, *, asked_at: float) -> None:
        """Take a server out after a call to it failed that was made then; see `Pauses`."""
        self._pauses.after_failure(server, error, asked_at=asked_at)

    def examine(self, server: ModelServer, error: PacelineError) -> asyncio.Task[bool]:
        """Find out whether a server that failed so can do its work; see `Pauses`.

        Those who listen are told when that is known.
        """
        examination = self._pauses.examine(server, error)
        examination.add_done_callback(lambda _: self._listeners.call_soon())
        return examination

    def suspect(self, server: ModelServer) -> None:
        """Ask a server that may be silent for a token; without one it is out until it answers."""
        self._pauses.probe(server)

    def note_order_at(self, server: ModelServer) -> None:
        """Note that a request has taken a server: it does not rest."""
        server.last_order = self.orders.count

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

        def rank(server: ModelServer) -> tuple[ServerLoad, float]:
            length = text.length_at(server.process_name) if text is not None else 0
            load = server.load(tolerated_calls=tolerated_calls, familiar_length=length)
            return load, self._draw_lot()

        return sorted(found, key=rank)

    async def _follow(self) -> None:
        """Let servers come, change and go with their endpoints; each has one channel for life."""
        async for endpoints in self._discovery.endpoints():
            listed = {(*it.key, it.address): it for it in endpoints}
            counts = Counter(it.role for it in endpoints)
            _log.info("found: %s", ", ".join(f"{it}s: {counts[it]}" for it in MODEL_ROLES))
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
        def endured(work: Work, waited: float) -> float:
            return endured_seconds(server, work, waited=waited, targets=self._in_order[Role.TARGET])

        server = ModelServer(endpoint, self._open_channel(endpoint), silence=SilenceWatch(endured))
        self._servers[key] = server
        insort(self._in_order[server.role], server, key=_name)
        self._watches[key] = self._tasks.create_task(
            self._health.follow(server, has_failed=lambda: self._forget_unlisted(key)),
            name=f"pool: watch {server.name}",
        )

    async def _forget_unlisted(self, key: _Key) -> None:
        """Remove a server that cannot be reached, if discovery has lost sight of it, too."""
        if key in self._unlisted:
            await self._remove((key,))

    async def _remove(self, keys: Collection[_Key]) -> None:
        """Forget servers; what still runs there fails, as with any server that goes away."""
        for key in keys:
            if key not in self._servers:
                continue  # its own watch was faster
            self._watches.pop(key).cancel()
            server = self._servers.pop(key)
            self._in_order[server.role].remove(server)
            self._pauses.forget(server)
            server.health_status = REMOVED
            if server.role is Role.TARGET:
                self._served.note_removed(server)
            self._tell(server)
            await server.channel.close(None)
            await asyncio.sleep(0)

    def _tell(self, server: ModelServer) -> None:
        """Tell the listeners, if what this server may be used for changed."""
        for changed in (server, *self._find_twins(server.role)):
            if changed.announced == changed.usability:
                continue
            if changed.ready and not changed.announced.is_ready:
                changed.ready_since = self.latest_ready_at = time.monotonic()
                changed.last_order = self.orders.count
            if changed.announced.is_ready and not changed.ready:
                changed.unready_since = time.monotonic()
            changed.announced = changed.usability
            self._listeners.call_soon()
        self._standing_log.look_soon()

    def _find_twins(self, role: Role) -> list[ModelServer]:
        """Find servers that are one process at several addresses: only the first of them counts.

        Otherwise DSI would count on a target that has no hardware of its own.

        Returns:
            Those for which that has changed.
        """
        first: dict[str, ModelServer] = {}
        changed = []
        for server in self._in_order[role]:
            twin = None
            if server.is_well and server.facts is not None and server.facts.incarnation:
                original = first.setdefault(server.facts.incarnation, server)
                twin = original if original is not server else None
            if twin is not server.twin:
                server.twin = twin
                changed.append(server)
        return changed
