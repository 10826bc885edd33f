"""Where servers are: a stream of endpoint sets, of which each replaces the one before.

`static`, `dns` and `kubernetes` have one interface, `Discovery`. What is found is never asked for
on the request path, and stays in use while nobody can be asked.
"""

from paceline_orchestrator.fleet.discovery.endpoints import (
    MODEL_ROLES,
    Availability,
    Discovery,
    Endpoint,
    Role,
)
from paceline_orchestrator.fleet.discovery.outage import out_of_sight
from paceline_orchestrator.fleet.discovery.services import DEFAULT_PORT, Service, parse_services
from paceline_orchestrator.fleet.discovery.static import StaticDiscovery, parse_endpoints

__all__ = [
    "DEFAULT_PORT",
    "MODEL_ROLES",
    "Availability",
    "Discovery",
    "Endpoint",
    "Role",
    "Service",
    "StaticDiscovery",
    "out_of_sight",
    "parse_endpoints",
    "parse_services",
]
