"""EndpointSlices, read: which pods there are behind a set of Services, and what they are good for.

A Service has one slice or more, and a pod may be in several of them: while it moves from one to
another, and with two address families. So all slices are merged, and pods told apart by their uid.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline_orchestrator.fleet.discovery.endpoints import Availability, Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from paceline_orchestrator.fleet.discovery.services import Service

# The label by which a slice says whose it is.
SERVICE_LABEL = "kubernetes.io/service-name"
_PORT_NAME = "grpc"
# Where two slices disagree about a pod, the older one knows less: pods get ready, then terminate.
_ORDER = (Availability.NOT_READY, Availability.READY, Availability.TERMINATING)


def read_slices(
    slices: Iterable[Mapping[str, Any]], *, services: Iterable[Service]
) -> frozenset[Endpoint]:
    """Return the pods of these Services; what has no address or no port is left out.

    Args:
        slices: EndpointSlice objects, as the API sends them.
        services: Those that matter; a port that is given wins over the slices'.
    """
    by_name = {service.name: service for service in services}
    found: dict[object, Endpoint] = {}
    for each in slices:
        service = by_name.get((each["metadata"].get("labels") or {}).get(SERVICE_LABEL, ""))
        if service is None:
            continue
        for endpoint in _read_slice(each, service):
            known = found.get(endpoint.key)
            found[endpoint.key] = _merged(known, endpoint) if known else endpoint
    return frozenset(found.values())


def _read_slice(endpoint_slice: Mapping[str, Any], service: Service) -> Iterator[Endpoint]:
    namespace = endpoint_slice["metadata"].get("namespace") or "default"
    port = service.port or _port(endpoint_slice.get("ports") or ())
    if not port:
        return
    for entry in endpoint_slice.get("endpoints") or ():
        addresses = entry.get("addresses")
        if not addresses:
            continue
        host = addresses[0]  # the others, if any, are the same server's
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        pod = entry.get("targetRef") or {}
        yield Endpoint(
            name=pod.get("name") or address,
            address=address,
            role=service.role,
            uid=pod.get("uid") or "",
            tls_name=f"{service.name}.{namespace}.svc",
            availability=_availability(entry.get("conditions") or {}),
        )


def _port(ports: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the port named grpc, or the only one."""
    numbers = {port.get("name") or "": port.get("port") for port in ports}
    return numbers.get(_PORT_NAME) or (next(iter(numbers.values())) if len(numbers) == 1 else None)


def _availability(conditions: Mapping[str, Any]) -> Availability:
    """Read conditions; the API leaves out what it does not know: then a pod is ready.

    `serving` is not asked for: a server that drains says that it is not serving any more, and
    still finishes what it has.
    """
    if conditions.get("terminating"):
        return Availability.TERMINATING
    return Availability.NOT_READY if conditions.get("ready") is False else Availability.READY


def _merged(one: Endpoint, other: Endpoint) -> Endpoint:
    """Return one endpoint for a pod: an IPv4 address before an IPv6 one, the later state."""
    first = min(one, other, key=lambda it: ("[" in it.address, it.address))
    return replace(first, availability=max(one.availability, other.availability, key=_ORDER.index))
