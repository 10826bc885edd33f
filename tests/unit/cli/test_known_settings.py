"""A PACELINE_* variable is known only if its settings class is, so all classes must be listed."""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

from paceline_cli.known_settings import settings_classes

ROOT = Path(__file__).parents[3]


def bases_by_class():
    """Yield what each class of our packages is derived from, as the source says it."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = config["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in packages:
        for source in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.ClassDef):
                    yield node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def settings_in_the_source():
    classes, found = list(bases_by_class()), {"Settings"}
    while more := {name for name, bases in classes if bases & found} - found:
        found |= more
    return Counter(name for name, bases in classes if bases & found)


def test_the_list_has_every_settings_class_of_all_packages_once():
    assert Counter(cls.__name__ for cls in settings_classes()) == settings_in_the_source()


def test_how_several_values_are_given_is_said_by_the_help_alone():
    said = [
        f"{cls.__name__}.{name}: {field.description}"
        for cls in settings_classes()
        for name, field in cls.model_fields.items()
        if re.search("comma|given again", str(field.description))
    ]
    assert said == []


def test_the_search_in_the_source_finds_heirs_of_heirs_too():
    assert settings_in_the_source().keys() >= {
        "ServerSettings",
        "OrchestratorSettings",
        "_Sampling",
    }
