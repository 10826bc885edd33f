"""The folder of a LoRA adapter, as the PEFT library writes it: its configuration, and its limits.

The folder has `adapter_config.json`, and `adapter_model.safetensors` with two factors for each
linear module that it changes. What a model computes with the adapter follows from the factors and
from one number for each module, the scale. What the configuration says besides is either of no
meaning for a forward, or is refused by name: a part that is passed over would give other texts than
the adapter was trained for.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline_contract.limits import MOST_LORA_ADAPTERS
from paceline_contract.names import NAME_RULE, is_name
from paceline_engine.model_files.small_files import read_json
from paceline_engine.terms.backend import ModelLoadError, few_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LORA_CONFIG = "adapter_config.json"
LORA_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"

MOST_RANK = 1024
"""The largest rank in use is 256."""

_MOST_PATTERNS = 1 << 14
_MOST_SCALE = 1e6
# What a configuration says of training, of the folder's origin, and of modules that the names of
# the weights tell anyway.
_MEANINGLESS = frozenset({
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
})  # fmt: skip
_READ = frozenset({
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "use_rslora",
})  # fmt: skip
# Ways to begin training that leave the model's own weights as they are. The others change them.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
# A module's name, or its end; PEFT takes "^" for the whole of it.
_PLAIN_PATTERN = re.compile(r"\^?[\w.-]+")


@dataclass(frozen=True, slots=True)
class LoraFolder:
    """A LoRA adapter's name and its configuration, checked; its weights are not read yet.

    Attributes:
        name: By which requests ask for it.
        directory: Where it is.
        rank: The rank of modules without one of their own.
        alpha: As of `rank`.
        ranks, alphas: By modules' names or the ends of these.
        is_rank_stabilised: Whether a scale is alpha / sqrt(rank), and not alpha / rank.
    """

    name: str
    directory: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilised: bool

    @property
    def weights(self) -> Path:
        """The file of its weights."""
        return self.directory / LORA_WEIGHTS

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's factors."""
        return self.ranks.get(_match(module, self.ranks), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the number by which a module's product of factors is multiplied."""
        rank = self.rank_of(module)
        alpha = self.alphas.get(_match(module, self.alphas), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def read_lora_folders(settings: Iterable[str]) -> list[LoraFolder]:
    """Read the configurations of adapters, before anything large is read.

    Args:
        settings: NAME=DIR of each.

    Raises:
        ModelLoadError: There are too many, two have one name, or one cannot be used.
    """
    folders: dict[str, LoraFolder] = {}
    for setting in settings:
        name, separator, directory = setting.partition("=")
        if not (name and separator and directory and is_name(name)):
            raise ModelLoadError(
                f"--lora {setting[:200]!r} is not NAME=DIR, with a name of 1 and {NAME_RULE}"
            )
        if name in folders:
            raise ModelLoadError(f"--lora: two adapters are called {name!r}")
        if len(folders) == MOST_LORA_ADAPTERS:
            raise ModelLoadError(f"--lora: there are more than {MOST_LORA_ADAPTERS} adapters")
        folders[name] = read_lora_folder(name, Path(directory))
    return list(folders.values())


def read_lora_folder(name: str, directory: Path) -> LoraFolder:
    """Read the configuration of one adapter.

    Raises:
        ModelLoadError: It is not there, cannot be read, or says what is not supported.
    """
    told = f"LoRA adapter {name!r}"
    config = read_json(directory / LORA_CONFIG)
    if not (directory / LORA_WEIGHTS).exists():
        pickled = (directory / _PICKLED).exists()
        hint = f"; {_PICKLED} is pickled, and can run code: convert it to safetensors"
        raise ModelLoadError(
            f"{told}: there is no {directory / LORA_WEIGHTS}{hint if pickled else ''}"
        )
    _refuse_other_kinds(told, config)
    rank: Any = config.get("r")
    if not _is_rank(rank):
        raise ModelLoadError(f"{told}: {LORA_CONFIG} says r {rank!r:.80}, not in [1, {MOST_RANK}]")
    alpha: Any = config.get("lora_alpha")
    if not _is_alpha(alpha):
        raise ModelLoadError(
            f"{told}: {LORA_CONFIG} says lora_alpha {alpha!r:.80}, which is no scale"
        )
    is_rank_stabilised: Any = config.get("use_rslora", False)
    if not isinstance(is_rank_stabilised, bool):
        raise ModelLoadError(
            f"{told}: {LORA_CONFIG} says use_rslora {is_rank_stabilised!r:.80}, not true or false"
        )
    ranks = _patterns(told, config, "rank_pattern")
    alphas = _patterns(told, config, "alpha_pattern")
    if not all(map(_is_rank, ranks.values())):
        raise ModelLoadError(f"{told}: rank_pattern has a rank that is not in [1, {MOST_RANK}]")
    if not all(map(_is_alpha, alphas.values())):
        raise ModelLoadError(f"{told}: alpha_pattern has what is no scale")
    return LoraFolder(
        name,
        directory,
        rank=rank,
        alpha=float(alpha),
        ranks=ranks,
        alphas={module: float(each) for module, each in alphas.items()},
        is_rank_stabilised=is_rank_stabilised,
    )


def _refuse_other_kinds(told: str, config: Mapping[str, Any]) -> None:
    """Refuse what would compute something else than a sum with products of two factors."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(
            f"{told}: {LORA_CONFIG} says peft_type {kind!r:.80}, and only LORA is known"
        )
    if config.get("bias", "none") != "none":
        raise ModelLoadError(
            f"{told}: bias {config['bias']!r:.80} is not supported: train it with bias 'none'"
        )
    beginning = config.get("init_lora_weights")
    if not (isinstance(beginning, bool | str | None) and beginning in _PLAIN_BEGINNINGS):
        raise ModelLoadError(
            f"{told}: init_lora_weights {beginning!r:.80} changes the model's own weights:"
            " save it converted to plain LoRA (path_initial_model_for_weight_conversion)"
        )
    unknown = {name for name, value in config.items() if value and name not in _READ}
    if unsupported := unknown - _MEANINGLESS:
        raise ModelLoadError(
            f"{told}: {LORA_CONFIG} asks for what is not supported:"
            f" {few_names(map(repr, unsupported))}"
        )


def _patterns(told: str, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        raise ModelLoadError(f"{told}: {key} is no object of at most {_MOST_PATTERNS} modules")
    if odd := [name for name in found if not _PLAIN_PATTERN.fullmatch(name)]:
        raise ModelLoadError(
            f"{told}: {key} has regular expressions, and only names of modules are supported:"
            f" {few_names(map(repr, odd))}"
        )
    return found


def _match(module: str, patterns: Iterable[str]) -> str:
    """Return the first pattern that is a module's name, or a whole end of it."""
    for pattern in patterns:
        if module == pattern.removeprefix("^") or module.endswith(f".{pattern}"):
            return pattern
    return ""


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_RANK


def _is_alpha(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= _MOST_SCALE  # type: ignore[operator]
