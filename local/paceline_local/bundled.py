"""The paths of the bundled models."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidFieldError


@dataclass(frozen=True, slots=True)
class BundledModels:
    """The folder with the bundled models and the held-out prompts."""

    folder: Path

    @property
    def target(self) -> Path:
        """The large model."""
        return self.folder / "python-target"

    @property
    def drafter(self) -> Path:
        """The small model."""
        return self.folder / "python-drafter"

    @property
    def tiny(self) -> Path:
        """A smaller model, which drafts for the small one."""
        return self.folder / "python-tiny"

    @property
    def prompts(self) -> Path:
        """Prompts from files kept out of training: JSON lines with `file` and `text`."""
        return self.folder / "prompts.jsonl"

    def held_out(self) -> list[dict[str, str]]:
        """Read the prompts: `file` and `text` of each."""
        # Split at line feeds only: `splitlines` would also split at other characters of a text.
        lines = self.prompts.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]


def find_models(folder: Path | None) -> BundledModels:
    """Find the models in a folder, or in the checkout around this package or the working directory.

    Raises:
        InvalidFieldError: The models are not there.
    """
    here = Path(__file__).resolve()
    guesses = [parent / "models" for parent in (*here.parents, Path.cwd(), *Path.cwd().parents)]
    for guess in guesses if folder is None else [folder]:
        models = BundledModels(guess)
        if models.target.is_dir() and models.drafter.is_dir():
            return models
    where = "in this checkout" if folder is None else f"in {folder}"
    raise InvalidFieldError.of(
        "models", f"there are no python-target and python-drafter {where}; give --models FOLDER"
    )
