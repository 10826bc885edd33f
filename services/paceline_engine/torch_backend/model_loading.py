"""Loads a model of the transformers library from files, refuses unusable ones, and describes it."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from paceline.panics import taking_panics
from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import SAMPLING_PARAMETERS
from paceline_engine.model_files.gguf_groups import FLOATING_KINDS
from paceline_engine.model_files.report import known_defaults, known_ends, known_fim, report
from paceline_engine.model_files.small_files import CONFIG
from paceline_engine.terms.backend import ModelLoadError, few_names
from paceline_engine.terms.calls import ModelDescription
from paceline_engine.torch_backend.device import hardware_of
from paceline_engine.torch_backend.families import quiet_library
from paceline_engine.torch_backend.library import decoder_layers
from paceline_engine.torch_backend.memory import free_memory
from paceline_engine.torch_backend.recurrent.library_state import has_recurrent_state
from paceline_engine.torch_backend.stored_weights import stored_weights
from paceline_engine.torch_backend.weight_grids import Grid, StoredAs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.model_files.gguf_model import GgufModel

_log = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# Several times the numbers of the largest models: a larger number is a mistake or an attack.
_MOST_TOKENS = 1 << 26
_CPU = torch.device("cpu")
_SMALLEST_BYTES = 2  # of the dtypes
_MOST_LAYERS = 4096
# The names that families of models have for their context length, the usual name first.
_CONTEXT_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx",
    "context_length",
)  # fmt: skip
# The context length of a model whose state has no length, if its files name none.
_ENDLESS = 1 << 17


def count_tokens(files: ModelFiles) -> int:
    """Count the tokens that a model's tokenizer knows.

    Raises:
        ModelLoadError: its tokenizer.json is broken.
    """
    try:
        with taking_panics():
            tokenizer = Tokenizer.from_str(files.tokenizer.decode())
    except Exception as error:  # the library says it with no class of its own
        raise ModelLoadError(
            f"model {files.name!r}: tokenizer.json cannot be used ({error})"
        ) from error
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def load_model(
    files: ModelFiles,
    *,
    dtype: str,
    device: torch.device = _CPU,
    keeps_grids: bool = False,
    beside: int = 0,
) -> Any:
    """Load a checked model's weights, into the memory of the machine.

    Args:
        dtype: What to compute in; one of bfloat16, float16, float32, float64.
        device: Where they go later.
        keeps_grids: Leave each linear module a `StoredAs`, `stored_as`, for `whole_products.py`.
        beside: How many weights its module has, which must have room, too.

    Raises:
        ModelLoadError: it is none of these; or the model is broken, has no room, or no decoder.
    """
    if dtype not in _DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is none of {', '.join(sorted(_DTYPES))}")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with files.laid_out() as directory, quiet_library():
            loaded = _load(
                files,
                directory,
                dtype=_DTYPES[dtype],
                device=device,
                keeps_grids=keeps_grids,
                beside=beside,
            )
    except ModelLoadError:
        raise
    except KeyError as error:
        raise ModelLoadError(
            f"model {files.name!r} cannot be loaded: the library does not know {error}, a word of"
            " its config.json, or a field that it lacks"
        ) from error
    except Exception as error:  # a configuration is a stranger's, and may break anything
        raise ModelLoadError(f"model {files.name!r} cannot be loaded: {error}") from error
    model, found = loaded
    _refuse_missing_weights(files.name, found)
    _refuse_broken_weights(files.name, model)
    if model.config.is_encoder_decoder:
        raise ModelLoadError(
            f"model {files.name!r}: an encoder with a decoder, not a decoder alone"
        )
    return model.eval()


def _load(
    files: ModelFiles,
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keeps_grids: bool,
    beside: int,
) -> Any:
    how = files.quantisation
    if not files.small.json(CONFIG).get("model_type"):
        raise ModelLoadError(f"model {files.name!r}: config.json does not say model_type")
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    _refuse_nonsense(files.name, config)
    _refuse_other_kinds(files.name, config)
    for each in (config, config.get_text_config(decoder=True)):
        vars(each).pop("quantization_config", None)  # the library would ask for other packages
    _refuse_what_has_no_room(files.name, config, dtype=dtype, device=device, beside=beside)
    files.begin_hashing()
    weights: Iterable[tuple[str, Tensor, StoredAs | None]] | None = None
    if files.gguf is not None:
        weights = _gguf_weights(files.gguf, dtype=dtype)
    elif how is not None:
        weights = stored_weights(files, how, dtype=dtype)
    if weights is not None:
        return _load_quantised(config, weights, dtype=dtype, keeps_grids=keeps_grids)
    return AutoModelForCausalLM.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
    )


def _gguf_weights(
    gguf: GgufModel, *, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor, StoredAs | None]]:
    """Yield a GGUF file's weights, as `stored_weights` yields a folder's."""
    for name, numbers, kind, groups in gguf.named_weights():
        grid = None
        if groups is not None:
            grid = Grid(groups.bits, *map(torch.from_numpy, (groups.scales, groups.least)))
        stored = None if kind in FLOATING_KINDS else StoredAs(kind, grid)
        yield name, torch.from_numpy(numbers).to(dtype), stored


def _load_quantised(
    config: Any,
    weights: Iterable[tuple[str, Tensor, StoredAs | None]],
    *,
    dtype: torch.dtype,
    keeps_grids: bool,
) -> Any:
    """Load dequantised weights."""
    kept: dict[str, StoredAs] = {}

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, numbers, stored in weights:
            if keeps_grids and stored is not None:
                kept[name.removesuffix(".weight")] = stored
            yield name, numbers

    model, found = _of_weights(config, named(), dtype=dtype)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = type(head) is nn.Linear and head.weight is embeddings.weight
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name in kept:
            module.stored_as = kept[name]  # type: ignore[assignment]
        elif is_tied and module is embeddings and name in kept:
            head.stored_as = kept[name]
    return model, found


def _of_weights(config: Any, named: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype) -> Any:
    """Let the library make a model of weights that are read here, in the model's dtype."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_class.from_pretrained(
        None,
        config=config,
        dtype=dtype,
        state_dict=dict(named),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # refused below, by name
    )


def _refuse_nonsense(name: str, config: Any) -> None:
    """Refuse sizes that would take all memory, or hours, before a weight is read."""
    text = config.get_text_config(decoder=True)
    layer_count = getattr(text, "num_hidden_layers", 1)
    if not (isinstance(layer_count, int) and 0 < layer_count <= _MOST_LAYERS):
        raise ModelLoadError(
            f"model {name!r}: config.json says num_hidden_layers {layer_count!r}, which is not in"
            f" [1, {_MOST_LAYERS}]"
        )
    for key in _CONTEXT_LENGTHS:
        length = getattr(text, key, None)
        if length is not None and not (isinstance(length, int) and length <= _MOST_TOKENS):
            raise ModelLoadError(
                f"model {name!r}: config.json says {key} {length!r}, which is not in"
                f" [1, {_MOST_TOKENS}]"
            )


def _refuse_other_kinds(name: str, config: Any) -> None:
    """Refuse an unknown model type in few words: the library would list all known types."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"model {name!r}: config.json says model_type {config.model_type!r}, which is not a"
            " decoder of text"
        )


def _refuse_what_has_no_room(
    name: str, config: Any, *, dtype: torch.dtype, device: torch.device, beside: int
) -> None:
    """Refuse a model that has no room in a device's memory, before its weights are read.

    Args:
        beside: How many weights its module has, which must have room, too.
    """
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        model = model_class(config)
    count = beside + sum(each.numel() for each in model.parameters())
    needed = count * dtype.itemsize
    free = free_memory(device).byte_count
    if needed > free:
        smaller = "" if dtype.itemsize <= _SMALLEST_BYTES else "; --dtype bfloat16 needs less"
        own = "its weights and its module's take" if beside else "its weights take"
        raise ModelLoadError(
            f"model {name!r} has no room: {own} {_gib(needed)} as {dtype}, and on"
            f" {device} {_gib(free)} are free, so {_gib(needed - free)} are missing{smaller}"
        )


def _gib(byte_count: int) -> str:
    return f"{byte_count / (1 << 30):.3g} GiB"


def _refuse_missing_weights(name: str, found: Any) -> None:
    """Refuse a model that lacks weights: the library would fill in random ones.

    Args:
        found: What the library says of the files that it has read.
    """
    if missing := found["missing_keys"]:
        raise ModelLoadError(f"model {name!r}: its files lack {few_names(missing)}")
    if mismatched := [weights for weights, *_ in found["mismatched_keys"]]:
        raise ModelLoadError(
            f"model {name!r}: {few_names(mismatched)}: of another shape than config.json says"
        )
    if unexpected := found["unexpected_keys"]:
        _log.warning(
            "model %r: %d weights in its files are none of the model's, and left out: %s",
            name,
            len(unexpected),
            few_names(unexpected),
        )


def _refuse_broken_weights(name: str, model: Any) -> None:
    """Refuse weights that are NaN or infinite, with which every call would fail.

    Cost: reads every weight once.
    """
    for weights, tensor in model.named_parameters():
        # A sum takes a thirtieth of the time (bench/LOG.md); it can be infinite without one.
        precise = torch.promote_types(tensor.dtype, torch.float32)
        if tensor.sum(dtype=precise).isfinite() or tensor.isfinite().all():
            continue
        raise ModelLoadError(f"model {name!r}: {weights} has weights that are no numbers")


def describe(
    files: ModelFiles,
    model: Any,
    *,
    token_count: int,
    dtype: str,
    device: torch.device,
    threads: int,
    cancels_between_layers: bool,
    shares_forwards: bool,
    is_invariant: bool,
) -> ModelDescription:
    """Describe a loaded model.

    Args:
        token_count: What its tokenizer knows.
        threads: CPU threads of one forward.

    Raises:
        ModelLoadError: its configuration does not say.
    """
    config = model.config.get_text_config(decoder=True)
    fingerprint = files.fingerprint(dtype)
    vocabulary_size = min(token_count, config.vocab_size)
    end_ids = known_ends(files, vocabulary_size=vocabulary_size)
    report(files, end_ids=end_ids)
    return ModelDescription(
        name=files.name,
        revision=files.revision or fingerprint[:16],
        fingerprint=fingerprint,
        tokenizer_fingerprint=hashlib.sha256(files.tokenizer).hexdigest(),
        vocabulary_size=vocabulary_size,
        eos_token_ids=end_ids,
        context_length=_context_length(files.name, config, endless=has_recurrent_state(model)),
        backend="transformers",
        dtype=dtype,
        device=str(device),
        layer_count=len(decoder_layers(model)),
        cancels_between_layers=cancels_between_layers,
        shares_forwards=shares_forwards,
        # Without a decoder of ours a tree would take a forward for each of its chains.
        takes_trees=shares_forwards,
        is_invariant=is_invariant,
        samples_by=SAMPLING_PARAMETERS,
        scores_prompts=True,
        sampling_defaults=known_defaults(files, vocabulary_size=vocabulary_size),
        verification_rules=(VerificationRule.EXACT, VerificationRule.REJECTION),
        hardware=hardware_of(device, threads=threads),
        scores_every_token=files.draft_vocabulary is None,
        fim_token_ids=known_fim(files, vocabulary_size=vocabulary_size),
        configuration=files.configuration,
    )


def _context_length(name: str, config: Any, *, endless: bool) -> int:
    for key in _CONTEXT_LENGTHS:
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return length
    if endless:
        return _ENDLESS
    raise ModelLoadError(
        f"model {name!r}: config.json does not say how many tokens a text can have; add"
        f" {_CONTEXT_LENGTHS[0]} to it"
    )
