"""constraints.txt pins what both distributions ask for, and the images' lists what it pins."""

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTS = ROOT / "k8s" / "images" / "requirements"
PROJECTS = ("pyproject.toml", "clients/python/pyproject.toml")
OURS = {"paceline", "paceline-client"}
# pip freeze leaves it out, and torch asks for it.
UNPINNED = {"setuptools"}


def pins():
    lines = (ROOT / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, version in (it.split("==") for it in lines)}


def listed(*names):
    """Return name to (version, hashes) of all that some of the images' lists have."""
    found = {}
    for name in names:
        text = (LISTS / f"{name}.txt").read_text()
        for package, version, hashes in re.findall(
            r"^([\w.-]+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})*)$", text, re.MULTILINE
        ):
            found[canonicalize_name(package)] = version, re.findall(r"sha256:\w+", hashes)
        assert text.count("==") == len(re.findall(r"^[\w.-]+==", text, re.MULTILINE))
    return found


def needed(*extras):
    """Return what is needed on Linux for some extras of ours, by what is installed here."""
    found = set()
    pending = [Requirement(f"paceline[{','.join(extras)}]")]
    while pending:
        requirement = pending.pop()
        environments = [{"extra": it} for it in requirement.extras or {""}]
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in found:
            continue
        found.add((name, *sorted(requirement.extras)))
        for text in requires(name) or ():
            other = Requirement(text)
            if other.marker is None or any(map(other.marker.evaluate, environments)):
                pending.append(other)
    return {name for name, *_ in found} - OURS


@pytest.mark.parametrize("path", PROJECTS)
def test_every_dependency_is_pinned_within_its_range(path):
    project = tomllib.loads((ROOT / path).read_text())["project"]
    groups = [project["dependencies"], *project.get("optional-dependencies", {}).values()]
    requirements = [Requirement(text) for group in groups for text in group]
    pinned = pins()
    for requirement in requirements:
        if requirement.name not in OURS:
            version = pinned.get(canonicalize_name(requirement.name))
            assert version, f"{requirement.name} is not pinned: run `make lock`"
            assert version in requirement.specifier, f"{requirement} is stale: run `make lock`"


@pytest.mark.parametrize(
    ("extras", "names"),
    [
        ("cli,gateway,tracing", ["orchestrator"]),
        ("server,tracing", ["orchestrator", "server", "torch-cuda"]),
        ("server,tracing", ["orchestrator", "server", "torch-cpu"]),
    ],
)
def test_an_images_list_has_all_that_is_needed_as_it_is_pinned(extras, names):
    found = {name: version for name, (version, _) in listed(*names).items()}
    missing = needed(*extras.split(",")) - found.keys()
    assert not missing, f"{missing} are not listed: run `make lock`"
    pinned = pins()
    for name in needed(*extras.split(",")) - UNPINNED:
        assert found[name] == pinned[name], f"{name} is stale: run `make lock`"


def test_an_image_gets_nothing_that_it_does_not_need():
    assert listed("orchestrator").keys() == needed("cli", "gateway", "tracing")
    assert listed("server").keys() <= needed("server")
    beyond = listed("torch-cuda").keys() - {"torch", "triton"}
    assert all(name.startswith(("nvidia-", "cuda-")) for name in beyond)
    assert listed("torch-cpu").keys() == {"torch"}


@pytest.mark.parametrize("path", sorted(LISTS.iterdir()), ids=lambda path: path.stem)
def test_every_package_of_an_image_has_a_hash_and_no_list_names_a_server(path):
    packages = listed(path.stem)
    assert packages
    assert all(hashes for _, hashes in packages.values())
    assert "://" not in path.read_text()
    assert "--index" not in path.read_text()
