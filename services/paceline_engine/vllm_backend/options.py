"""What an operator can tell vLLM (`--engine-option`), and what this backend tells it itself."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING, Any

from paceline_engine.terms.backend import ModelLoadError, few_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableMapping

ENVIRONMENT: Mapping[str, str] = {
    # The scheduler runs on the model's thread: another process would cost a message each way.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Rows are decided by a logits processor of the older interface, which runs on a CPU as well.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Threads stay where the operating system puts them, or two servers would share one core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
"""Variables of vLLM that have these values unless the operator has set them."""

_INVARIANT = "VLLM_BATCH_INVARIANT"

# What this backend relies on: EngineArgs' field, and what to use instead.
_TAKEN: Mapping[str, str] = {
    "model": "--model",
    "revision": "--model-revision",
    "dtype": "--dtype",
    "enforce_eager": "--no-capture",
    "served_model_name": "--model-name",
    **dict.fromkeys(
        (
            "additional_config",
            "async_scheduling",
            "config_format",
            "enable_prefix_caching",
            "generation_config",
            "load_format",
            "logits_processors",
            "logprobs_mode",
            "max_logprobs",
            "seed",
            "skip_tokenizer_init",
            "speculative_config",
            "tokenizer",
            "trust_remote_code",
        ),
        "",
    ),
}

_PARTS = ("tensor_parallel_size", "pipeline_parallel_size")

# With these options a model computes other numbers: another model, by its fingerprint.
_CHANGE_NUMBERS = frozenset(
    {"hf_overrides", "kv_cache_dtype", "quantization", "quantization_config", "rope_scaling"}
)
_MOST_DTYPE_CHARACTERS = 64  # of `ModelDescription.dtype`, as orchestrators take it
_DIGITS = 8


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Read KEY=VALUE, with dashes or underscores in the key, and JSON or a plain text as the value.

    Raises:
        ModelLoadError: one is not of this form, or is not for the operator to choose.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        name = key.strip().removeprefix("--").replace("-", "_")
        if not equals or not name.isidentifier():
            raise ModelLoadError(f"--engine-option {text[:80]!r} is not of the form KEY=VALUE")
        if name in _TAKEN:
            instead = f": use {_TAKEN[name]}" if _TAKEN[name] else ""
            raise ModelLoadError(f"--engine-option {name} cannot be chosen here{instead}")
        found[name] = _value(value)
    return found


def hashed_dtype(dtype: str, options: Mapping[str, Any]) -> str:
    """Say in what numbers a model is computed, for its fingerprint."""
    changes = _number_changes(options)
    return f"{dtype} {json.dumps(changes, sort_keys=True)}" if changes else dtype


def told_dtype(dtype: str, options: Mapping[str, Any]) -> str:
    """Say in what numbers a model is computed, for people: in other words for other numbers."""
    changes = _number_changes(options)
    if not changes:
        return dtype
    said = (f"{key}={json.dumps(value, sort_keys=True)}" for key, value in sorted(changes.items()))
    text = f"{dtype} with {', '.join(said)}"
    if len(text) <= _MOST_DTYPE_CHARACTERS:
        return text
    ending = f"... ({hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]})"
    return text[: _MOST_DTYPE_CHARACTERS - len(ending)] + ending


def _number_changes(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in _CHANGE_NUMBERS}


def _value(text: str) -> Any:
    try:
        value: Any = json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)
    return value


def node_rank(options: Mapping[str, Any]) -> int:
    """Return which of the nodes that hold one model this one is: 0 serves, the others help it.

    Raises:
        ModelLoadError: the nodes, or the parts of the model, are not told so that they fit.
    """
    nodes, rank = _whole(options, "nnodes", 1), _whole(options, "node_rank", 0)
    parts = math.prod(_whole(options, name, 1) for name in _PARTS)
    if rank >= nodes:
        raise ModelLoadError(
            f"--engine-option node_rank={rank} is not below nnodes={nodes}: nodes count from 0"
        )
    if parts % nodes:
        raise ModelLoadError(
            f"--engine-option {' x '.join(_PARTS)} is {parts}, which nnodes={nodes} does not divide"
        )
    if nodes > 1 and not options.get("master_addr"):
        raise ModelLoadError(
            "--engine-option nnodes needs master_addr: the address of the node with node_rank=0"
        )
    return rank


def _whole(options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name, default)
    if type(value) is not int or value < default:
        raise ModelLoadError(
            f"--engine-option {name}={value} is not a whole number of {default} or more"
        )
    return value


def check_known(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Check that vLLM has these options.

    Raises:
        ModelLoadError: it lacks one.
    """
    if unknown := options.keys() - set(known):
        raise ModelLoadError(
            f"--engine-option {few_names(unknown)}: this vLLM has no such engine argument"
        )


def set_environment(environment: MutableMapping[str, str], *, invariant: bool) -> None:
    """Set vLLM's variables, before it is imported.

    Args:
        environment: The process's, which vLLM reads at import and its workers inherit.
        invariant: Whether its kernels are to compute each row alike in every batch.
    """
    for name, value in ENVIRONMENT.items():
        environment.setdefault(name, value)
    if invariant:
        environment[_INVARIANT] = "1"
