"""What no model may bring: programs, links out of its directory, names of files elsewhere.

Each check raises a ModelLoadError.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline_engine.terms.backend import ModelLoadError

_CODE_SUFFIXES = frozenset({".py", ".so"})
# Fields with which a configuration names files, or programs of a hub, that nobody has looked at.
_REFUSED_FIELDS = {
    "auto_map": "asks for the model's own code to be run",
    "transformers_weights": "names other files of weights",
}
_KERNEL_FIELDS = frozenset(
    f"{prefix}{kind}_implementation{suffix}"
    for prefix in ("", "_")
    for kind in ("attn", "experts")
    for suffix in ("", "_internal")
)


def refuse_links_outside(directory: Path) -> None:
    """Refuse links that lead out of a model; in the Hugging Face cache a model has two folders."""
    root = directory.resolve()
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for path in directory.rglob("*"):
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            if not any(target.is_relative_to(each) for each in inside):
                raise ModelLoadError(f"{path} is a link that leaves the model's directory")


def refuse_programs(directory: Path) -> None:
    """Refuse code, which would run with the model, and configurations that are no plain files."""
    for path in directory.rglob("*"):
        if path.suffix.lower() in _CODE_SUFFIXES:
            raise ModelLoadError(f"{path}: models that bring their own code are not run")
    for path in directory.glob("*.json"):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelLoadError(f"{path}: is not a regular file")


def refuse_foreign_parts(path: Path, content: object) -> None:
    """Refuse what a configuration may name besides the files beside it, however deep it stands."""
    if isinstance(content, list):
        for each in content:
            refuse_foreign_parts(path, each)
    if not isinstance(content, dict):
        return
    for name, value in content.items():
        if name in _REFUSED_FIELDS and value is not None:
            raise ModelLoadError(f"{path}: {name} {_REFUSED_FIELDS[name]}")
        # A name with a slash is a program in a hub; others are the library's own.
        if name in _KERNEL_FIELDS and "/" in json.dumps(value):
            raise ModelLoadError(f"{path}: {name} {value!r} asks for a program of a hub to be run")
        refuse_foreign_parts(path, value)
