"""Folders of models that score only some of their tokens."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def narrowed(folder: Path, made: Path, *, token_ids: Iterable[int]) -> Path:
    """Copy a model's folder to another place, and let the copy score only these tokens."""
    shutil.copytree(folder, made)
    (made / "draft_vocabulary.json").write_text(json.dumps({"token_ids": [*token_ids]}))
    return made
