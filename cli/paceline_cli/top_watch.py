"""Takes snapshots of a running system, and remembers which metrics pages have answered before."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline_local.metrics_pages import Page, PageError, pages_of, read_page
from paceline_local.metrics_samples import Readings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import aiohttp

    from paceline import AsyncClient, SystemInfo
    from paceline_local.metrics_pages import Source
    from paceline_local.metrics_samples import Samples

# So long an address is shown as gone after its name no longer has it.
_FORGET_SECONDS = 60.0
_REMOVED = "its name no longer has this address"
_UNRESOLVED = "its name cannot be looked up in time"


@dataclass(frozen=True, slots=True)
class Scrape:
    """The result of reading one server's metrics page.

    Attributes:
        page: The page.
        readings: The page's last answer; None if it never answered.
        problem: Why it did not answer this time; empty if it did.
        gone_seconds: Time since its last answer; 0 if it answered now or never.
    """

    page: Page
    readings: Readings | None
    problem: str = ""
    gone_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The system at one time.

    Attributes:
        scrapes: One for each server's metrics page.
        info: The orchestrator's description of itself and its servers; None if it did not answer.
        problem: Why it did not answer; empty if it did.
    """

    scrapes: tuple[Scrape, ...]
    info: SystemInfo | None
    problem: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether no server answered."""
        return self.info is None and all(it.problem for it in self.scrapes)


@dataclass(slots=True)
class _PageHistory:
    """The last answers of a page that has answered before."""

    samples: Samples
    seen_at: float
    readings: Readings

    def add(self, samples: Samples, at: float) -> None:
        self.readings = Readings(samples, samples.since(self.samples), at - self.seen_at)
        self.samples, self.seen_at = samples, at


class Watch:
    """Takes a snapshot whenever it is asked to.

    Args:
        client: Asks the orchestrator.
        session: Reads the metrics pages.
        sources: Addresses of the metrics pages.
        clock: Returns a time in seconds.
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
        self._known: dict[Page, _PageHistory] = {}

    async def snapshot(self) -> Snapshot:
        """Ask the orchestrator and read all pages, at the same time."""
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(self._ask(), name="top: ask the orchestrator")
            read = [
                tasks.create_task(self._read_source(source), name=f"top: read {source.host}")
                for source in self._sources
            ]
        info, problem = asked.result()
        scrapes = (scrape for task in read for scrape in task.result())
        return Snapshot(tuple(scrapes), info, problem)

    async def _ask(self) -> tuple[SystemInfo | None, str]:
        try:
            return await self._client.info(), ""
        except PacelineError as error:
            return None, error.message

    async def _read_source(self, source: Source) -> list[Scrape]:
        known = [page for page in self._known if page.source == source]
        try:
            async with asyncio.timeout(self._session.timeout.total):
                pages = await pages_of(source)
        except (PageError, TimeoutError) as error:
            if not known:
                return [Scrape(Page(source, source.host), None, str(error) or _UNRESOLVED)]
            pages = known  # their addresses cannot be looked up now: the known ones count
        async with asyncio.TaskGroup() as tasks:
            scrapes = [
                tasks.create_task(self._read(page), name=f"top: read {page.url}") for page in pages
            ]
        removed = self._forget_old([page for page in known if page not in pages])
        return [task.result() for task in scrapes] + [
            self._without_answer(it, _REMOVED) for it in removed
        ]

    async def _read(self, page: Page) -> Scrape:
        try:
            samples = await read_page(self._session, page)
        except PageError as error:
            return self._without_answer(page, str(error))
        now = self._clock()
        if page in self._known:
            self._known[page].add(samples, now)
        else:
            self._known[page] = _PageHistory(samples, now, Readings(samples))
        return Scrape(page, self._known[page].readings)

    def _without_answer(self, page: Page, problem: str) -> Scrape:
        known = self._known.get(page)
        if known is None:
            return Scrape(page, None, problem=problem)
        gone_seconds = self._clock() - known.seen_at
        return Scrape(page, known.readings, problem=problem, gone_seconds=gone_seconds)

    def _forget_old(self, removed: Sequence[Page]) -> list[Page]:
        """Forget pages that answered last long ago, and return the others."""
        oldest = self._clock() - _FORGET_SECONDS
        for page in removed:
            if self._known[page].seen_at < oldest:
                del self._known[page]
        return [page for page in removed if page in self._known]
