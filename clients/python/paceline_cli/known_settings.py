"""Every settings class there is: what a PACELINE_* variable can mean to someone."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import paceline_cli
from paceline_gateway import settings as gateway_settings
from paceline_model_server import settings as model_settings
from paceline_orchestrator import settings as orchestrator_settings
from paceline_serving import server_settings
from paceline_serving.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

__all__ = ["settings_classes"]


def settings_classes() -> tuple[type[Settings], ...]:
    """Return those of all commands and servers, in each module in the order of their declaration.

    Those of a command whose extra is not installed are left out.

    Cost: imports every command, about a second.
    """
    modules = (
        orchestrator_settings,
        gateway_settings,
        model_settings,
        server_settings,
        *_commands(),
    )
    return tuple(
        declared
        for module in modules
        for declared in vars(module).values()
        if isinstance(declared, type)
        and issubclass(declared, Settings)
        and declared.__module__ == module.__name__
    )


def _commands() -> Iterator[ModuleType]:
    """Import all modules of the command line but those whose extra is not installed."""
    for module in pkgutil.iter_modules(paceline_cli.__path__, f"{paceline_cli.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                yield importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").startswith("paceline_cli"):
                    raise
