"""Every settings class there is: what a PACELINE_* variable can mean to someone."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import paceline_cli
from paceline_serving.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["settings_classes"]

_SERVERS = ("paceline_model_server.settings", "paceline_orchestrator.settings")


def settings_classes() -> tuple[type[Settings], ...]:
    """Return those of all commands and servers, but private ones: others derive from those.

    Cost: imports every command, about a second.
    """
    _import_commands()
    for name in _SERVERS:
        importlib.import_module(name)
    return tuple(
        known
        for known in dict.fromkeys(_below(Settings))
        if known.__module__.startswith("paceline_") and not known.__name__.startswith("_")
    )


def _below(base: type[Settings]) -> Iterator[type[Settings]]:
    for derived in base.__subclasses__():
        yield derived
        yield from _below(derived)


def _import_commands() -> None:
    """Import all modules of the command line but those whose extra is not installed."""
    for module in pkgutil.iter_modules(paceline_cli.__path__, f"{paceline_cli.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("paceline_cli"):
                    raise
