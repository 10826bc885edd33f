"""An adapter's card: a JSON file beside its weights that describes the adapter."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from paceline.plain_files import read_plain_file
from paceline_engine.model_files.small_files import refuse_pointer
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.rank_paths import check_tree
from paceline_engine.torch_backend.adapters.eagle_shape import EagleShape

if TYPE_CHECKING:
    from pathlib import Path

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.terms.rank_paths import RankPath

AdapterKind: TypeAlias = Literal["medusa", "streams", "eagle"]

CARD_FILE = "card.json"
FORMAT_VERSION = 1

_MOST_CARD_BYTES = 4 << 20  # with the figures of its training: those bundled have 20 KB
# A larger number would be a mistake: each guess costs rows in every forward.
MOST_REACH = 16
_MOST_LAYERS = 4096
_MOST_RANK = 65536
_MOST_NODES = 4096
_LIMITS = {
    "reach": (1, MOST_REACH),
    "layers": (0, _MOST_LAYERS),
    "rank": (0, _MOST_RANK),
    "exit_rank": (0, _MOST_RANK),
}


def model_fingerprint(files: ModelFiles) -> str:
    """Hash the model that an adapter is for: in whichever dtype, and wherever its sequences end.

    Cost: the first time, reads every weight once, about a second per gigabyte.
    """
    return files.identity()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCard:
    """A card.

    Attributes:
        kind: What it is.
        model: Name of the model that it is for; the fingerprint tells.
        fingerprint: See `model_fingerprint`.
        reach: How many tokens it guesses after the model's own next one (gamma).
        layers: How many of the model's last layers have stream rows; 0 for Medusa.
        rank, exit_rank: Of the low-rank weights and of the early exit; 0 for Medusa. Streams that
            share a fine-tuned model's weights have rank 0, too.
        tree: Which guesses it proposes, unless it is told otherwise; see `rank_paths`.
        weights_sha256: Of the file beside the card.
        training: How it was made and what was measured, `hit_rates` among it: for each depth how
            often each rank was right.
        format_version: Of card and weights.
        eagle: The sizes of an EAGLE head; None for the other kinds.
    """

    kind: AdapterKind
    model: str
    fingerprint: str
    reach: int
    layers: int
    rank: int
    exit_rank: int
    tree: tuple[RankPath, ...]
    weights_sha256: str
    training: dict[str, Any]
    format_version: int = FORMAT_VERSION
    eagle: EagleShape | None = None

    @property
    def most_steps(self) -> int | None:
        """How many steps it is known to guess well; None: nobody has measured it."""
        return self.reach if "hit_rates" in self.training else None

    def write(self, directory: Path) -> None:
        """Write it into an adapter's directory."""
        found = asdict(self)
        if self.eagle is None:
            del found["eagle"]  # as in cards from before there were such heads
        text = json.dumps(found, indent=2)
        (directory / CARD_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> AdapterCard:
        """Read and check the card in a directory.

        Raises:
            ModelLoadError: there is none, or it is damaged or of another version.
        """
        path = directory / CARD_FILE
        try:
            content = read_plain_file(path, most_bytes=_MOST_CARD_BYTES)
            refuse_pointer(path, content)
            found = json.loads(content)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelLoadError(
                f"adapter {str(directory)!r}: no readable card ({error})"
            ) from error
        try:
            return _checked(found)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ModelLoadError(f"{path}: {reason}") from error


def _checked(found: Any) -> AdapterCard:
    if not isinstance(found, dict):
        raise TypeError("not a JSON object")
    # First, because in another version anything may be different.
    version = found.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"format_version {version!r}; this program reads {FORMAT_VERSION}")
    if found["kind"] not in get_args(AdapterKind):
        raise ValueError(f"kind {found['kind']!r} is none of {', '.join(get_args(AdapterKind))}")
    for key, (least, most) in _LIMITS.items():
        if type(found[key]) is not int or not least <= found[key] <= most:
            raise ValueError(f"{key} {found[key]!r} is not in [{least}, {most}]")
    if not isinstance(found["training"], dict):
        raise TypeError(f"training {found['training']!r} is no JSON object")
    for key in ("model", "fingerprint", "weights_sha256"):
        if not isinstance(found[key], str):
            raise TypeError(f"{key} {found[key]!r} is no text")
    if unknown := found.keys() - AdapterCard.__dataclass_fields__.keys():
        raise ValueError(f"unknown key {min(unknown)!r}")
    tree = _tree(found["tree"], reach=found["reach"])
    return AdapterCard(**{**found, "tree": tree, "eagle": _eagle(found)})


def _eagle(found: Any) -> EagleShape | None:
    if (found["kind"] == "eagle") != ("eagle" in found):
        raise ValueError("an adapter of the kind eagle has its shape in the key 'eagle'")
    return EagleShape.read(found["eagle"]) if "eagle" in found else None


def _tree(found: Any, *, reach: int) -> tuple[RankPath, ...]:
    if not isinstance(found, list) or len(found) > _MOST_NODES:
        raise ValueError(f"tree is not a list of up to {_MOST_NODES} paths")
    if not all(isinstance(path, list) and all(type(x) is int for x in path) for path in found):
        raise ValueError("tree: a path is a list of ranks")
    paths = tuple(tuple(path) for path in found)
    check_tree(paths, reach=reach, most_ranks=_MOST_NODES)
    return paths
