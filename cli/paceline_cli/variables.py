"""Finds a PACELINE_* variable that no command and no server knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_serving.settings import (
    VARIABLE_PREFIX,
    is_service_link,
    nearest,
    settings_in,
    variables_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType

    from paceline_serving.settings import Settings


def unknown_variable(command: ModuleType, environment: Mapping[str, str]) -> str | None:
    """Describe the first unknown variable, if there is one.

    A shell may have PACELINE_ADDRESS for one command while another one is called. So a variable
    that any command or server knows is accepted.

    Args:
        command: The module of the command that is called.
        environment: The variables.

    Cost: imports modules only if there is a variable that the command itself does not know.
    """
    variables = [
        name
        for name in environment
        if name.startswith(VARIABLE_PREFIX) and not is_service_link(name)
    ]
    if set(variables) <= _variables(settings_in(command)):
        return None
    from paceline_cli.known_settings import settings_classes

    known = _variables(settings_classes())
    unknown = next((name for name in variables if name not in known), None)
    return unknown and f"unknown variable {unknown}{nearest(unknown, known)}"


def _variables(classes: Iterable[type[Settings]]) -> set[str]:
    return set().union(*map(variables_of, classes))
