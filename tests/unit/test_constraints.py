"""constraints.txt pins what pyproject.toml asks for; `make lock` writes it anew."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_every_dependency_is_pinned_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for group in groups for text in group]
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split()]
    pinned = {canonicalize_name(name): version for name, version in pins}
    for requirement in requirements:
        if requirement.name != "paceline":
            version = pinned.get(canonicalize_name(requirement.name))
            assert version, f"{requirement.name} is not pinned: run `make lock`"
            assert version in requirement.specifier, f"{requirement} is stale: run `make lock`"
