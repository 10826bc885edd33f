"""The orchestrators of a client, and which of them the next call goes to: no I/O here."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

from paceline.connection import AsyncConnection, Connection
from paceline.errors import InvalidFieldError, TryAgainError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from paceline.errors import PacelineError

# Who has failed is asked after the others, for so long; each time longer, until it answers.
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.1, 10.0

_Link = TypeVar("_Link", Connection, AsyncConnection)


class Endpoint(Generic[_Link]):
    """One address of a client's.

    Attributes:
        address: Where it is.
        connection: The way there.
        leads_to_one: Whether there is one orchestrator behind it, and not as many as a name says.
        serves: What one who watches its health said last. A client by itself watches nothing and
            leaves it True.
        running_count: Calls of this client that run there.
    """

    def __init__(self, address: str, connection: _Link, *, leads_to_one: bool) -> None:
        self.address = address
        self.connection: _Link = connection
        self.leads_to_one = leads_to_one
        self.serves = True
        self.running_count = 0
        self.failure_count = 0
        self.rests_until = float("-inf")


class Endpoints(Generic[_Link]):
    """All of them; requests are spread over those that serve.

    What is known of an address is what its calls have told: nothing is asked for that alone.

    Concurrency: any thread may use it.

    Args:
        endpoints: At least one.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, endpoints: Sequence[Endpoint[_Link]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._all: tuple[Endpoint[_Link], ...] = tuple(endpoints)
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = 0

    def __iter__(self) -> Iterator[Endpoint[_Link]]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def may_be_several(self) -> bool:
        """Whether what one orchestrator leaves unfinished can go on at another."""
        return len(self._all) > 1 or not self._all[0].leads_to_one

    @contextmanager
    def lent(self, asked: Collection[object] = ()) -> Iterator[Endpoint[_Link]]:
        """Lend the best one for a call: not asked yet, well, and with the fewest calls.

        Where all have failed, one is asked all the same, and says why.
        """
        with self._lock:
            endpoint = self._choose(asked)
            endpoint.running_count += 1
        try:
            yield endpoint
        finally:
            with self._lock:
                endpoint.running_count -= 1

    def answered(self, endpoint: Endpoint[_Link]) -> None:
        """Note that it answered as it should."""
        if endpoint.failure_count:
            endpoint.failure_count, endpoint.rests_until = 0, float("-inf")

    def failed(self, endpoint: Endpoint[_Link]) -> None:
        """It refused a call, or broke one off: the others come first for a while."""
        with self._lock:
            now = self._clock()
            if now < endpoint.rests_until:
                return  # one of many calls that ended together
            seconds = _FIRST_REST_SECONDS * 2**endpoint.failure_count
            endpoint.rests_until = now + min(seconds, _LONGEST_REST_SECONDS)
            endpoint.failure_count = min(endpoint.failure_count + 1, 10)

    def is_another_left(
        self, error: PacelineError, endpoint: Endpoint[_Link], asked: set[object]
    ) -> bool:
        """Whether to ask someone else what an endpoint gave no answer to."""
        if not isinstance(error, TryAgainError):
            return False
        self.failed(endpoint)
        asked.add(endpoint)
        return len(asked) < len(self._all)

    def check_open(self) -> None:
        """Raise ClientCancelledError once they were closed."""
        self._all[0].connection.check_open()

    def waking(self, wake: Callable[[], object]) -> AbstractContextManager[None]:
        """Have this called when they are closed; see `Connection.waking`."""
        return self._all[0].connection.waking(wake)

    def _choose(self, asked: Collection[object]) -> Endpoint[_Link]:
        self._turn += 1
        now, count = self._clock(), len(self._all)
        ordered = [self._all[(self._turn + index) % count] for index in range(count)]
        return min(
            ordered,
            key=lambda it: (
                it in asked,
                not it.serves,
                now < it.rests_until,
                it.running_count,
            ),
        )


def listed(address: str | Sequence[str]) -> list[str]:
    """List the addresses that a client was given: one, several, or several between commas.

    Raises:
        InvalidFieldError: There is none.
    """
    # A gRPC scheme has commas of its own: ipv4:10.0.0.1:50050,10.0.0.2:50050 is one target.
    if isinstance(address, str):
        has_scheme = address.partition(":")[0] in {"dns", "ipv4", "ipv6", "unix", "unix-abstract"}
        found = [address] if has_scheme else [each.strip() for each in address.split(",")]
    else:
        found = list(address)
    if not found:
        raise InvalidFieldError.of("address", "must be HOST:PORT, or several")
    return found
