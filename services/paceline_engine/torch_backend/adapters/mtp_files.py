"""Multi-token-prediction modules in the files of checkpoints: found, checked and loaded.

Two layouts are read:

    families                the module's weights           its norms, product, output norm
    Qwen3-Next, Qwen3.5     mtp.layers.0.*                 mtp.pre_fc_norm_*, mtp.fc, mtp.norm
    GLM 4.5, DeepSeek V3    model.layers.N.*, after the    enorm, hnorm, eh_proj,
                            last layer N - 1               shared_head.norm

The module lies in the files that the model was checked, hashed and loaded from. Here only its own
weights are read of them.
"""

from __future__ import annotations

import logging
import math
import re
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from transformers.modeling_layers import MtpModel

from paceline_engine.model_files.small_files import CONFIG, DECODER_PARTS
from paceline_engine.terms.backend import ModelLoadError, first_line
from paceline_engine.torch_backend.adapters.card import MOST_REACH
from paceline_engine.torch_backend.adapters.mtp_head import MtpHead
from paceline_engine.torch_backend.families import quiet_library, rotations_change

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.terms.rank_paths import RankPath

MODULE = "mtp"
"""What stands in the place of an adapter's directory: the module inside the checkpoint."""

# The one module's weights where it has names of its own. The library would take a bare number in it
# for one of the model's layers.
_APART = r"^mtp\.(layers\.[0]|fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\."
# Copies of the model's own embedding and head, which are not loaded.
_COPIES = ("embed_tokens.", "shared_head.head.")
_REACH = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family's checkpoints hold a module.

    Attributes:
        stands_apart: Whether it has names of its own; if not, it is a layer after the last one.
        makes_keys: Whether its layer makes keys and values of what it keeps.
    """

    stands_apart: bool
    makes_keys: bool = False


_FAMILIES = {
    "qwen3_next": _Family(stands_apart=True),
    "qwen3_5": _Family(stands_apart=True),
    "qwen3_5_text": _Family(stands_apart=True),
    "qwen3_5_moe": _Family(stands_apart=True),
    "qwen3_5_moe_text": _Family(stands_apart=True),
    "glm4_moe": _Family(stands_apart=False),
    "deepseek_v3": _Family(stands_apart=False, makes_keys=True),
}


@dataclass(frozen=True, slots=True)
class ModuleCard:
    """What an adapter's card says, of a module; a checkpoint has no card.

    Attributes:
        kind: "mtp".
        tree: Which guesses it proposes: a chain.
        most_steps: None: nobody has measured how many steps it guesses well.
    """

    kind: str
    tree: tuple[RankPath, ...]
    most_steps: None = None


@dataclass(frozen=True, slots=True)
class LoadedModule:
    """A checkpoint's module with its model's dtype, on its model's device.

    Attributes:
        card: What is told of it.
        module: The head.
    """

    card: ModuleCard
    module: MtpHead


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint has its modules.

    Attributes:
        family: Of its model.
        pattern: Finds the weights' names of the one module that there may be.
        count: How many there are.
        foreign: The name of a weight that no known module has; empty: all are known.
    """

    family: _Family
    pattern: str
    count: int
    foreign: str


def tell_of_module(files: ModelFiles) -> None:
    """Log that a checkpoint has a module which is not used, and how to use it."""
    place = _find(files)
    if place is not None and place.count == 1 and files.quantisation is None:
        _log.info(
            "model %r has a module that predicts further tokens: with --adapter %s a target drafts"
            " with it",
            files.name,
            MODULE,
        )


def check_module(files: ModelFiles) -> int:
    """Check that a checkpoint has a module which can be loaded, before anything large is read.

    Returns:
        How many weights the module has.

    Raises:
        ModelLoadError: It has none, several, or one of a kind that is not computed.
    """
    place = _checked_place(files)
    count = 0
    for path in files.weights:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                found = re.match(place.pattern, key)
                if found and not key[found.end() :].startswith(_COPIES):
                    count += math.prod(file.get_slice(key).get_shape())
    return count


def load_module(files: ModelFiles, model: Any, *, guesses: int | None = None) -> LoadedModule:
    """Load a checkpoint's module for the model that was loaded from the same files.

    Args:
        guesses: How many to make after a verdict; None: three.

    Raises:
        ModelLoadError: It has no such module, or one that is damaged or of another shape.
    """
    place = _checked_place(files)
    config = model.config.get_text_config(decoder=True)
    if rotations_change(config):
        raise ModelLoadError(f"model {files.name!r}: its rotations change: it takes no --adapter")
    if "self_attn" not in dict(model.get_decoder().layers[-1].named_children()):
        raise ModelLoadError(
            f"model {files.name!r}: its last layer is not of the kind that its module has"
        )
    try:
        head = _load_head(files, model, place)
    except ModelLoadError:
        raise
    except Exception as error:  # a checkpoint is a stranger's, and may break anything
        raise ModelLoadError(
            f"model {files.name!r}: its module cannot be loaded: {first_line(error)}"
        ) from error
    reach = min(guesses or _REACH, MOST_REACH)
    tree = tuple((0,) * depth for depth in range(1, reach + 1))
    return LoadedModule(ModuleCard(kind=MODULE, tree=tree), head)


def _load_head(files: ModelFiles, model: Any, place: _Place) -> MtpHead:
    """Load the module, and compute a row with it."""
    layer = _load_layer(files, model, pattern=place.pattern)
    _take_buffers(files, layer, pattern=place.pattern)
    for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
        if not bool(tensor.isfinite().all()):
            raise ModelLoadError(
                f"model {files.name!r}: {name} of its module has weights that are no numbers"
            )
    like = model.lm_head.weight
    layer.to(like.device).requires_grad_(False).eval()
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(like.dtype)
    head = MtpHead(layer, model, makes_keys=place.family.makes_keys)
    head.try_out(model)
    return head


def _load_layer(files: ModelFiles, model: Any, *, pattern: str) -> Any:
    """Let the library load the module's layer: it knows how families store experts."""
    shared = _shared_weights(model)
    text = model.config.get_text_config(decoder=True)
    sizes: dict[str, Any] = {"num_mtp_layers": 1}
    if getattr(text, "layer_types", None) is not None:
        sizes["mtp_layer_types"] = ["full_attention"]
    with (
        files.laid_out() as directory,
        quiet_library(),
        _with_attributes(text, **sizes),
        _with_attributes(model.config, name_or_path=str(directory)),
        # By this the library tells a module's weights; for some families it knows one size's alone.
        _with_attributes(model, _keys_to_ignore_on_load_unexpected=[pattern]),
    ):
        module: Any = MtpModel.from_pretrained(model)
    # The library's module holds the model's own embedding and head, and could load others there.
    if any(one is not other for one, other in zip(shared, _shared_weights(model), strict=True)):
        raise ModelLoadError(f"model {files.name!r}: its module has an embedding or a head")
    return module.layers[0]


def _take_buffers(files: ModelFiles, layer: Any, *, pattern: str) -> None:
    """Load a layer's buffers in float32: for some families the library loads the model's dtype.

    What chooses experts is a buffer, and more precise than that.
    """
    wanted = {
        name.partition(".")[2]: name
        for name, buffer in layer.named_buffers()
        if buffer.is_floating_point()
    }
    for path in files.weights:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                found = re.match(pattern, key)
                name = wanted.get(key[found.end() :]) if found else None
                if name is not None:
                    owner, _, own = name.rpartition(".")
                    setattr(layer.get_submodule(owner), own, file.get_tensor(key).float())


@contextmanager
def _with_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Let an object have these attributes, and then those that it had before."""
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _shared_weights(model: Any) -> tuple[Any, Any]:
    return model.get_input_embeddings().weight, model.lm_head.weight


def _checked_place(files: ModelFiles) -> _Place:
    name = files.name
    if files.gguf is not None or files.quantisation is not None:
        raise ModelLoadError(
            f"model {name!r} is quantised: --adapter {MODULE} needs a checkpoint that is not"
        )
    kind, _ = _kind_and_layers(files)
    if kind not in _FAMILIES:
        raise ModelLoadError(
            f"model {name!r} is of the kind {kind!r}: --adapter {MODULE} knows modules of"
            f" {', '.join(sorted(_FAMILIES))}"
        )
    place = _find(files)
    if place is None:
        raise ModelLoadError(
            f"model {name!r} has no module that predicts further tokens: its files have no weights"
            f" of one, as --adapter {MODULE} needs"
        )
    if place.count > 1:
        raise ModelLoadError(
            f"model {name!r} has {place.count} modules that predict further tokens: --adapter"
            f" {MODULE} uses one"
        )
    if place.foreign:
        raise ModelLoadError(
            f"model {name!r} has a module with {place.foreign!r}, which --adapter {MODULE} does not"
            " compute"
        )
    return place


def _find(files: ModelFiles) -> _Place | None:
    """Find a checkpoint's modules by the names of its weights."""
    kind, layer_count = _kind_and_layers(files)
    family = _FAMILIES.get(kind)
    if family is None or files.gguf is not None or type(layer_count) is not int:
        return None
    pattern, layer = _APART, r"mtp\.layers\.(\d+)\."
    if not family.stands_apart:
        pattern, layer = rf"^model\.layers\.{layer_count}\.", r"model\.layers\.(\d+)\."
    first = 0 if family.stands_apart else layer_count
    names = _names(files)
    found = {int(it[1]) for name in names if (it := re.match(layer, name))}
    count = sum(number >= first for number in found)
    foreign = ""
    if family.stands_apart:
        own = (name for name in names if name.startswith("mtp."))
        foreign = next((name for name in own if not re.match(pattern, name)), "")
    return _Place(family, pattern, count, foreign) if count else None


def _kind_and_layers(files: ModelFiles) -> tuple[str, object]:
    """Return what config.json says of the decoder: its family, and how many layers it has."""
    config = files.small.json(CONFIG)
    parts = [config.get(part) for part in DECODER_PARTS]
    decoder = next((each for each in parts if isinstance(each, dict)), config)
    kind = decoder.get("model_type") or config.get("model_type")
    return str(kind), decoder.get("num_hidden_layers")


def _names(files: ModelFiles) -> list[str]:
    """Return the names of all weights."""
    names: list[str] = []
    for path in files.weights:
        with safe_open(path, framework="pt") as file:
            names.extend(file.keys())
    return names
