"""The paths of the bundled models, of SmolLM2, and of what a folder holds to be served."""

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


@dataclass(frozen=True, slots=True)
class ServedModels:
    """A model to serve, and one that drafts for it.

    Attributes:
        drafter: None: drafts come from the text itself.
        bundled: The folder that both are in, if they are the bundled ones.
    """

    target: Path
    drafter: Path | None
    bundled: BundledModels | None = None


def find_models(folder: Path | None) -> BundledModels:
    """Find the models in a folder, or in the checkout around this package or the working directory.

    Raises:
        InvalidFieldError: The models are not there.
    """
    for guess in _guesses("models") if folder is None else [folder]:
        models = BundledModels(guess)
        if models.target.is_dir() and models.drafter.is_dir():
            return models
    if folder is not None and _is_one_model(folder):
        raise InvalidFieldError.of(
            "models",
            f"{folder} is one model, and this command needs the bundled ones: a folder with"
            f" python-target and python-drafter. `paceline up --models {folder}` serves it",
        )
    where = "in this checkout" if folder is None else f"in {folder}"
    raise InvalidFieldError.of(
        "models",
        f"there are no python-target and python-drafter {where}, and no model (config.json or a"
        " GGUF file): give --models FOLDER with one of these",
    )


def find_served_models(folder: Path | None) -> ServedModels:
    """Find what to serve: a folder that is one model, or one with the bundled models.

    A drafter for one model is in its folder, in `drafter`.

    Raises:
        InvalidFieldError: There is neither.
    """
    if folder is not None and _is_one_model(folder):
        return ServedModels(folder, _drafter_for(folder))
    bundled = find_models(folder)
    return ServedModels(bundled.target, bundled.drafter, bundled)


def find_smollm2() -> ServedModels | None:
    """Find what `make smollm2` made, in the checkout around this package or working directory."""
    found = next((each for each in _guesses("build", "smollm2") if _is_one_model(each)), None)
    return None if found is None else ServedModels(found, _drafter_for(found))


def _drafter_for(model: Path) -> Path | None:
    drafter = model / "drafter"
    return drafter if _is_one_model(drafter) else None


def _is_one_model(path: Path) -> bool:
    return path.is_file() or (path / "config.json").is_file() or any(path.glob("*.gguf"))


def _guesses(*parts: str) -> list[Path]:
    here = Path(__file__).resolve()
    return [parent.joinpath(*parts) for parent in (*here.parents, Path.cwd(), *Path.cwd().parents)]
