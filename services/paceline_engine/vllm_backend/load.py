"""Loads a model into vLLM and describes it."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import SAMPLING_PARAMETERS
from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.report import known_defaults, known_ends, known_fim, report
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import ModelDescription
from paceline_engine.vllm_backend.options import (
    hashed_dtype,
    node_rank,
    parse_options,
    set_environment,
    told_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.vllm_backend.backend import VllmBackend
    from paceline_engine.vllm_backend.engine import NodePart

INSTALL = "make install-vllm"
_log = logging.getLogger(__name__)


def load_vllm(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    threads: int = 1,
    capture: bool = True,
    invariant: bool = False,
    options: Sequence[str] = (),
) -> VllmBackend:
    """Load a model.

    Args:
        model: A directory, or a hub id where there is a network.
        revision: For a hub id, its branch, tag or commit.
        dtype: What to compute in.
        threads: CPU threads of a forward, where it computes on a CPU.
        capture: Compile the model, and on a GPU record its forwards.
        invariant: Let a row's scores follow from its text alone, bit by bit; proved here.
        options: KEY=VALUE, for vLLM's engine arguments.

    Raises:
        ModelLoadError: vLLM is not installed, or the model cannot be served so.
    """
    parsed = parse_options(options)
    if node_rank(parsed):
        raise ModelLoadError("--engine-option node_rank: only the node with node_rank=0 serves")
    set_environment(os.environ, invariant=invariant)
    with _vllm_installed():
        from paceline_engine.torch_backend.device import hardware_of
        from paceline_engine.vllm_backend.backend import VllmBackend
        from paceline_engine.vllm_backend.engine import Engine, engine_arguments
        from paceline_engine.vllm_backend.invariance import check_invariance
    files, vocabulary_size = _find(model, revision=revision)
    fingerprint = files.fingerprint(hashed_dtype(dtype, parsed))
    with files.laid_out() as directory:
        engine = Engine(
            engine_arguments(
                directory,
                dtype=dtype,
                threads=threads,
                capture=capture,
                vocabulary_size=vocabulary_size,
                fingerprint=fingerprint,
                options=parsed,
            )
        )
    end_ids = known_ends(files, vocabulary_size=vocabulary_size)
    report(files, end_ids=end_ids)
    description = ModelDescription(
        name=files.name,
        revision=files.revision or fingerprint[:16],
        fingerprint=fingerprint,
        tokenizer_fingerprint=hashlib.sha256(files.tokenizer).hexdigest(),
        vocabulary_size=vocabulary_size,
        eos_token_ids=end_ids,
        context_length=engine.context_length,
        backend="vllm",
        dtype=told_dtype(dtype, parsed),
        device=str(engine.device),
        layer_count=engine.layer_count,
        cancels_between_layers=False,
        shares_forwards=True,
        takes_trees=False,
        is_invariant=invariant,
        samples_by=SAMPLING_PARAMETERS,
        scores_prompts=True,
        sampling_defaults=known_defaults(files, vocabulary_size=vocabulary_size),
        verification_rules=(VerificationRule.EXACT,),
        hardware=hardware_of(engine.device, threads=threads),
        fim_token_ids=known_fim(files, vocabulary_size=vocabulary_size),
        configuration=files.configuration,
    )
    backend = VllmBackend(
        engine, description, tokenizer=files.tokenizer, chat_template=files.chat_template
    )
    if invariant:
        check_invariance(backend)
    return backend


def load_part(
    model: str,
    *,
    revision: str | None,
    dtype: str,
    threads: int,
    capture: bool,
    invariant: bool,
    options: Sequence[str],
) -> NodePart:
    """Load what this node has of a model that another node serves: see `load_vllm`.

    Raises:
        ModelLoadError: vLLM is not installed, or the model cannot be computed so.
    """
    parsed = parse_options(options)
    set_environment(os.environ, invariant=invariant)
    with _vllm_installed():
        from paceline_engine.vllm_backend.engine import NodePart, engine_arguments
    files, vocabulary_size = _find(model, revision=revision)
    with files.laid_out() as directory:
        return NodePart(
            engine_arguments(
                directory,
                dtype=dtype,
                threads=threads,
                capture=capture,
                vocabulary_size=vocabulary_size,
                fingerprint=files.fingerprint(hashed_dtype(dtype, parsed)),
                options=parsed,
            )
        )


@contextmanager
def _vllm_installed() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ModelLoadError(
            f"the vllm backend needs vLLM, in an environment of its own: {INSTALL} ({error})"
        ) from error


def _find(model: str, *, revision: str | None) -> tuple[ModelFiles, int]:
    """Find a model's files, and how many of its tokens can be chosen."""
    from paceline_engine.torch_backend.model_loading import count_tokens

    files = find_model_files(model, revision=revision)
    _refuse_others(files)
    return files, min(count_tokens(files), files.vocabulary_size)


def _refuse_others(files: ModelFiles) -> None:
    if files.gguf is not None:
        raise ModelLoadError(
            f"model {files.name!r}: the vllm backend reads safetensors, and no GGUF file"
        )
    if files.draft_vocabulary is not None:
        raise ModelLoadError(
            f"model {files.name!r} has a draft vocabulary: serve it with --backend transformers"
        )
