"""Looks at a running system again and again, and remembers whom it saw."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline_cli.metrics_pages import Page, PageError, pages_of, read_page
from paceline_cli.metrics_samples import Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import aiohttp

    from paceline import AsyncClient, SystemInfo
    from paceline_cli.metrics_pages import Source
    from paceline_cli.metrics_samples import Samples

__all__ = ["Look", "Sight", "Watch"]

# An address that its name no longer has is shown as gone for so long.
_FORGET_SECONDS = 60.0
_REMOVED = "its name has it no longer"
_UNRESOLVED = "its name cannot be looked up in time"


@dataclass(frozen=True, slots=True)
class Sight:
    """What is to be seen of one server's page.

    Attributes:
        page: Which one.
        readings: What it said last; None if it never answered.
        problem: Why it did not answer this time; empty if it did.
        gone_seconds: For how long it has not.
    """

    page: Page
    readings: Readings | None
    problem: str = ""
    gone_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at everything.

    Attributes:
        sights: Every page.
        info: What the orchestrator said of itself and its servers.
        problem: Why it said nothing; empty if it did.
    """

    sights: tuple[Sight, ...]
    info: SystemInfo | None
    problem: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nobody answered."""
        return self.info is None and all(it.problem for it in self.sights)


@dataclass(slots=True)
class _Known:
    """A page that has answered."""

    samples: Samples
    seen_at: float
    readings: Readings

    def saw(self, samples: Samples, at: float) -> None:
        self.readings = Readings(samples, samples.since(self.samples), at - self.seen_at)
        self.samples, self.seen_at = samples, at


class Watch:
    """Looks when it is told to.

    Args:
        client: Of the orchestrator.
        session: To read pages with.
        sources: Where pages are.
        clock: Tells seconds.
    """

    def __init__(
        self,
        client: AsyncClient,
        session: aiohttp.ClientSession,
        sources: Sequence[Source],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._session = session
        self._sources = sources
        self._clock = clock
        self._known: dict[Page, _Known] = {}

    async def look(self) -> Look:
        """Ask the orchestrator and read all pages, at the same time."""
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(self._ask(), name="top: ask the orchestrator")
            read = [
                tasks.create_task(self._look_at(source), name=f"top: look at {source.host}")
                for source in self._sources
            ]
        info, problem = asked.result()
        sights = (sight for task in read for sight in task.result())
        return Look(tuple(sights), info, problem)

    async def _ask(self) -> tuple[SystemInfo | None, str]:
        try:
            return await self._client.info(), ""
        except PacelineError as error:
            return None, error.message

    async def _look_at(self, source: Source) -> list[Sight]:
        known = [page for page in self._known if page.source == source]
        try:
            async with asyncio.timeout(self._session.timeout.total):
                pages = await pages_of(source)
        except (PageError, TimeoutError) as error:
            if not known:
                return [Sight(Page(source, source.host), None, str(error) or _UNRESOLVED)]
            pages = known  # nobody can tell now where they are: there, as far as is known
        async with asyncio.TaskGroup() as tasks:
            looks = [
                tasks.create_task(self._read(page), name=f"top: read {page.url}") for page in pages
            ]
        removed = self._remember([page for page in known if page not in pages])
        return [task.result() for task in looks] + [self._gone(it, _REMOVED) for it in removed]

    async def _read(self, page: Page) -> Sight:
        try:
            samples = await read_page(self._session, page)
        except PageError as error:
            return self._gone(page, str(error))
        now = self._clock()
        if page in self._known:
            self._known[page].saw(samples, now)
        else:
            self._known[page] = _Known(samples, now, Readings(samples))
        return Sight(page, self._known[page].readings)

    def _gone(self, page: Page, problem: str) -> Sight:
        known = self._known.get(page)
        if known is None:
            return Sight(page, None, problem)
        return Sight(page, known.readings, problem, self._clock() - known.seen_at)

    def _remember(self, removed: Sequence[Page]) -> list[Page]:
        """Forget what was last seen long ago, and return the others."""
        oldest = self._clock() - _FORGET_SECONDS
        for page in removed:
            if self._known[page].seen_at < oldest:
                del self._known[page]
        return [page for page in removed if page in self._known]
