"""What is wrong with a request, told with the options of the command that made it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.request import option_of
from paceline_serving.settings import noted, option_name, settings_in

if TYPE_CHECKING:
    from types import ModuleType

    from paceline.errors import InvalidFieldError
    from paceline_serving.settings import Settings

# Options of commands that have other names than the client's.
_OTHERS = {"predicted_text": "--prediction", "grammar": "--schema or --regex"}


def told_with_options(error: InvalidFieldError, command: ModuleType) -> str:
    """Return the message of an error, with options in place of the wire's fields.

    Args:
        command: The module of the command, whose settings have the options.
    """
    faults = [(it.field, it.description) for it in error.violations]
    if error.message != "; ".join(f"{field}: {fault}" for field, fault in faults):
        return error.message
    known = _options(command)
    return "; ".join(f"{known.get(option_of(field), field)}: {fault}" for field, fault in faults)


def _options(command: ModuleType) -> dict[str, str]:
    """Return a command's options as they are written, by the names of fields and of flags."""
    options: dict[str, str] = {}
    for each in settings_in(command) or _settings_beside(command):
        for name, field in each.model_fields.items():
            options[name] = options[noted(field, "flag") or name] = option_name(name, field)
    return {**_OTHERS, **options}


def _settings_beside(command: ModuleType) -> list[type[Settings]]:
    """Return the settings of a command that only dispatches: those of its package, as loaded."""
    package = command.__name__.rpartition(".")[0]
    loaded = [it for name, it in sys.modules.items() if name.startswith(f"{package}.")]
    return [each for module in loaded for each in settings_in(module)]
