"""Every settings class there is: what a PACELINE_* variable can mean to someone."""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, TypeGuard

import paceline_bench
import paceline_cli
import paceline_local
from paceline_gateway import settings as gateway_settings
from paceline_model_server import settings as model_settings
from paceline_orchestrator import settings as orchestrator_settings
from paceline_serving import server_settings
from paceline_serving.settings import (
    CONFIG_VARIABLE,
    VARIABLE_PREFIX,
    Settings,
    is_service_link,
    nearest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType


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
        *_modules(paceline_cli),
        *_modules(paceline_local),
        *_modules(paceline_bench),
    )
    return tuple(declared for module in modules for declared in _declared(module))


def unknown_variable(command: ModuleType, environment: Mapping[str, str]) -> str | None:
    """Say which PACELINE_* variable nothing knows, if there is one.

    A shell may well have PACELINE_ADDRESS for one command when another is called. So a variable of
    any command or server is none of these.

    Args:
        command: The command that is called: where it knows all variables, nothing else is imported.
        environment: The variables.
    """
    variables = [
        name
        for name in environment
        if name.startswith(VARIABLE_PREFIX) and not is_service_link(name)
    ]
    own = [each for each in vars(command).values() if _is_settings(each)]
    if set(variables) <= _variables(own):
        return None
    known = _variables(settings_classes())
    unknown = next((name for name in variables if name not in known), None)
    return unknown and f"unknown variable {unknown}{nearest(unknown, known)}"


def _variables(classes: Iterable[type[Settings]]) -> set[str]:
    names = {name.upper() for cls in classes for name in cls.model_fields}
    return {CONFIG_VARIABLE, *(VARIABLE_PREFIX + name for name in names)}


def _declared(module: ModuleType) -> Iterator[type[Settings]]:
    return (each for each in vars(module).values() if _is_settings(each, of=module))


def _is_settings(value: object, *, of: ModuleType | None = None) -> TypeGuard[type[Settings]]:
    if not isinstance(value, type) or not issubclass(value, Settings):
        return False
    return of is None or value.__module__ == of.__name__


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    """Import all modules of a package, and of those below it, but those whose extra is missing."""
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
