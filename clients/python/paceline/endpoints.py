"""The orchestrators of a client, and the choice of one for the next call: no I/O here."""

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

# So long an endpoint that failed is asked after the others; the time doubles until it answers.
_FIRST_REST_SECONDS, _LONGEST_REST_SECONDS = 0.1, 10.0

_Link = TypeVar("_Link", Connection, AsyncConnection)


class Endpoint(Generic[_Link]):
    """One address of a client.

    Attributes:
        address: HOST:PORT.
        connection: The connection to this address.
        leads_to_one: Whether one orchestrator is behind the address; a name can lead to several.
        serves: The last health of the orchestrator, if somebody watches it, as a gateway does.
            A client does not watch it, and leaves it True.
        running_count: This client's calls that run there.
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
    """All endpoints of a client; requests are spread over the ones that serve.

    An endpoint is judged by the outcomes of its calls alone: no call is made for that purpose.

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
        """Whether another orchestrator can continue an unfinished generation."""
        return len(self._all) > 1 or not self._all[0].leads_to_one

    @contextmanager
    def lent(self, asked: Collection[object] = ()) -> Iterator[Endpoint[_Link]]:
        """Lend the best endpoint for a call: not asked yet, serving, and with the fewest calls.

        If all have failed, one is lent all the same: its error says why.
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
        """Note that an endpoint answered as it should."""
        if endpoint.failure_count:
            endpoint.failure_count, endpoint.rests_until = 0, float("-inf")

    def failed(self, endpoint: Endpoint[_Link]) -> None:
        """Note that an endpoint refused or broke a call: the others come first for a while."""
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
        """Note a failed call, and return whether to ask another endpoint."""
        if not isinstance(error, TryAgainError):
            return False
        self.failed(endpoint)
        asked.add(endpoint)
        return len(asked) < len(self._all)

    def check_open(self) -> None:
        """Raise ClientCancelledError after the client was closed."""
        self._all[0].connection.check_open()

    def waking(self, wake: Callable[[], object]) -> AbstractContextManager[None]:
        """Have a function called when the client is closed; see `Connection.waking`."""
        return self._all[0].connection.waking(wake)

    def _choose(self, asked: Collection[object]) -> Endpoint[_Link]:
        self._turn += 1
        now, count = self._clock(), len(self._all)
        ordered = [self._all[(self._turn + index) % count] for index in range(count)]
        return min(
            ordered,
            key=lambda endpoint: (
                endpoint in asked,
                not endpoint.serves,
                now < endpoint.rests_until,
                endpoint.running_count,
            ),
        )


def listed(address: str | Sequence[str]) -> list[str]:
    """List a client's addresses: one, several, or several separated by commas.

    Raises:
        InvalidFieldError: There is no address.
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
