"""Admits requests: their keys, their number, and the size of their bodies."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from paceline.channel import is_loopback
from paceline.errors import DrainingError, OverloadedError, UnauthenticatedError
from paceline_contract.shares import FairShares
from paceline_gateway.errors import no_key, of_paceline, too_much
from paceline_gateway.http.browsers import refuse_other_pages
from paceline_gateway.http.request_body import BodyRules
from paceline_serving import lanes
from paceline_serving.keys import HEADER, Keys, key_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.http.connection import Connection
    from paceline_gateway.settings import GatewaySettings
    from paceline_serving.admission import Admission

# Anthropic's clients send a key by itself.
_OTHER_HEADER = "x-api-key"
# JSON may write a letter of two UTF-8 bytes with six bytes, and an id of five digits with eight.
_JSON_BYTES = 3


class Access:
    """Admits requests or refuses them at once: requests wait at orchestrators, not here.

    Args:
        settings: The operator's settings.
        orchestrators: Know how large a request may be.
        requests: Counts the running requests.

    Raises:
        ValueError: The file of keys is unusable.
    """

    def __init__(
        self, settings: GatewaySettings, *, orchestrators: Orchestrators, requests: Admission
    ) -> None:
        self._settings = settings
        self._orchestrators = orchestrators
        self._requests = requests
        self._keys = Keys(settings.api_keys) if settings.api_keys is not None else None
        self._places = FairShares(settings.request_limit)
        self._body_bytes = FairShares(settings.bodies_limit_bytes)

    @contextmanager
    def admitted(self, connection: Connection, headers: Mapping[str, str]) -> Iterator[BodyRules]:
        """Count a request while it runs, and yield the rules for its body.

        The connection gets the holder of the key, who is charged for tokens, and the lane.

        Raises:
            RequestError: The key is missing, wrong or at its limit; or no key is required and the
                request comes from another site's page; or there is no room; or it was cut.
        """
        try:
            with (
                self._let_in(connection, headers),
                self._requests.admitted(),
                self._place(connection.lane),
                self._requests.cuttable(),
                self._room(connection.lane) as rules,
            ):
                yield rules
        except (DrainingError, OverloadedError) as error:
            raise of_paceline(error, prompt="") from None

    @contextmanager
    def _let_in(self, connection: Connection, headers: Mapping[str, str]) -> Iterator[None]:
        """Check a client's key and its limits, and count the request for the key.

        Raises:
            RequestError: The key is missing, wrong or at its limit; or no key is required and the
                request comes from another site's page.
        """
        connection.lane = lanes.lane_name(f"address:{lanes.network_of(connection.host)}")
        if self._keys is None:
            refuse_other_pages(
                headers,
                is_local=is_loopback(self._settings.listen),
                scheme="http" if self._settings.tls_certificate is None else "https",
                allowed=self._settings.cors_origin,
            )
            yield
            return
        with ExitStack() as stack:
            try:
                caller = self._keys.find(_authorization(headers))
                stack.enter_context(caller.admitted())
            except UnauthenticatedError as error:
                raise no_key(error) from None
            except OverloadedError as error:
                raise too_much(error) from None
            connection.charge = caller.charge
            connection.lane = lanes.lane_name(f"key:{caller.key.name}")
            yield

    @contextmanager
    def _place(self, lane: str) -> Iterator[None]:
        """Hold one of the places for requests, which all lanes share.

        Raises:
            OverloadedError: There is no place for this lane.
        """
        if not self._places.allows(lane):
            raise OverloadedError(
                f"{self._places.capacity - self._places.free} requests are in work,"
                f" {self._places.held_by(lane)} of them from this client",
                retry_after_seconds=1.0,
            )
        self._places.take(lane)
        try:
            yield
        finally:
            self._places.give_back(lane)

    @contextmanager
    def _room(self, lane: str) -> Iterator[BodyRules]:
        """Count the bytes of a request's body while the request runs."""
        kept = 0

        def keep(byte_count: int) -> None:
            nonlocal kept
            if not self._body_bytes.allows(lane, byte_count):
                raise OverloadedError("too many long texts are in work", retry_after_seconds=1.0)
            self._body_bytes.take(lane, byte_count)
            kept += byte_count

        try:
            yield BodyRules(
                ceiling_bytes=self._settings.body_limit_bytes,
                most_bytes=self._most_body_bytes,
                keep=keep,
                mebibyte_seconds=self._settings.slow_reader_seconds,
            )
        finally:
            self._body_bytes.give_back(lane, kept)

    async def _most_body_bytes(self) -> int:
        return _JSON_BYTES * await self._orchestrators.most_request_bytes()


def _authorization(headers: Mapping[str, str]) -> str:
    """Return a request's key as OpenAI's clients send it; empty if there is none.

    Raises:
        UnauthenticatedError: Two headers have two keys: a proxy before this process may have
            checked the other one.
    """
    first, other = headers.get(HEADER, ""), headers.get(_OTHER_HEADER, "").strip()
    if not other:
        return first
    if first and key_in(first) != other:
        raise UnauthenticatedError(f"{HEADER} and {_OTHER_HEADER} have two keys: send one")
    return f"Bearer {other}"
