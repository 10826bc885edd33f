"""Files of API keys."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "sk-a-long-random-word"


def entry(name: str = "alice", secret: str = SECRET, **limits: int) -> str:
    """Return one entry of such a file."""
    lines = [f"- name: {name}", f"  sha256: {hashlib.sha256(secret.encode()).hexdigest()}"]
    return "\n".join([*lines, *(f"  {key}: {value}" for key, value in limits.items()), ""])


def rewrite(path: Path, text: str) -> None:
    """Do as Kubernetes does: another file under the same name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
