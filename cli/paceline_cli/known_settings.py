"""Lists all settings classes."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

import paceline_bench
import paceline_cli
import paceline_local
from paceline_gateway import settings as gateway_settings
from paceline_model_server import settings as model_settings
from paceline_orchestrator import settings as orchestrator_settings
from paceline_serving import server_settings
from paceline_serving.settings import settings_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from paceline_serving.settings import Settings


def settings_classes() -> tuple[type[Settings], ...]:
    """Return the classes of all commands and servers, in each module in order of declaration.

    Classes of a command whose extra is not installed are left out.

    Cost: imports every command, about a second.
    """
    modules = (
        orchestrator_settings,
        gateway_settings,
        model_settings,
        server_settings,
        *_modules(paceline_cli),
        *_modules(paceline_local),
        *_modules(paceline_bench),
    )
    return tuple(declared for module in modules for declared in _declared(module))


def _declared(module: ModuleType) -> Iterator[type[Settings]]:
    return (each for each in settings_in(module) if each.__module__ == module.__name__)


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    """Import the modules of a package and its sub-packages; skip those whose extra is missing."""
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if found.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("paceline"):
                raise
            continue
        yield module
        if found.ispkg:
            yield from _modules(module)
