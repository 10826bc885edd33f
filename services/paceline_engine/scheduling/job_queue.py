"""The jobs that wait for a model, in places that shares compete for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from paceline.errors import OverloadedError
from paceline_contract.shares import FairShares

if TYPE_CHECKING:
    from paceline_engine.scheduling.jobs import Job

_RETRY_SECONDS = 0.5


class JobQueue:
    """Jobs that wait. `Batching.choose` decides which of them the next forward has.

    Concurrency: the worker's lock guards it.

    Attributes:
        jobs: The jobs.
    """

    def __init__(self, place_count: int) -> None:
        self.jobs: list[Job] = []
        self._places = FairShares(place_count)
        self._arrivals = itertools.count()

    def has_room_for(self, share: str) -> bool:
        """Whether a share may have one more place."""
        return self._places.allows(share)

    def check_room(self, share: str) -> None:
        """Refuse a share that may have no more places.

        Raises:
            OverloadedError: The queue is full, or the share has too many of its places.
        """
        if not self.has_room_for(share):
            raise OverloadedError(
                f"{len(self.jobs)} calls wait for this model already,"
                f" {self._places.held_by(share)} of them this client's",
                retry_after_seconds=_RETRY_SECONDS,
            )

    def add(self, job: Job, *, now_ns: int, keeps_turn: bool = False) -> None:
        """Add a job, to the end of its share's; one that keeps its turn, to its old place."""
        if not keeps_turn:
            job.arrival = next(self._arrivals)
        job.was_passed_over = False
        job.queued_ns = now_ns
        self.jobs.append(job)
        self._places.take(job.share)

    def remove(self, job: Job) -> None:
        """Take a job out."""
        self.jobs.remove(job)
        self._places.give_back(job.share)

    def clear(self) -> list[Job]:
        """Take all jobs out, and return them."""
        jobs = self.jobs[:]
        for job in jobs:
            self.remove(job)
        return jobs
