"""Any decoder-only Hugging Face model, one sequence per forward."""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
from array import array
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as transformers_logging

from paceline.errors import OverloadedError
from paceline_engine.backends.base import (
    Backend,
    DeviceLostError,
    ForwardInterrupted,
    Interrupt,
    ModelCache,
    ModelLoadError,
    TokenMemory,
)
from paceline_engine.backends.captured import CapturedStep
from paceline_engine.backends.key_values import KeyValues
from paceline_engine.backends.llama import FusedLlama, can_fuse
from paceline_engine.backends.memory import free_memory
from paceline_engine.backends.model_files import ModelFiles, find_model_files
from paceline_engine.calls import ModelDescription, SessionSpec, VerificationRule
from paceline_engine.decisions import draft_from, judge_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.items import Item, Judge, Judgement
    from paceline_engine.proposal import Proposal

__all__ = ["TransformersBackend", "TransformersCache", "usable_device"]

_log = logging.getLogger(__name__)

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
# What families of models call the most tokens of a text, the usual name first.
# Several times what the largest models have: beyond, a number is a slip or an attack.
_MOST_TOKENS = 1 << 26
_MOST_LAYERS = 4096
_CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@contextmanager
def _on_device() -> Iterator[None]:
    """Compute without gradients, and give what the device reports its type.

    A device reports late: at the next wait for it, which may be well after the forward.
    """
    try:
        with torch.inference_mode():
            yield
    except torch.OutOfMemoryError as error:
        raise OverloadedError("the device has no memory left", retry_after_seconds=1) from error
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
            raise DeviceLostError(str(error)) from error
        raise


class _Decoder(Protocol):
    """From tokens to logits."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """The decoder layers, called as modules; none if they cannot be told."""

    def __call__(self, ids: Tensor, cache: Cache, *, rows: int) -> Tensor:
        """Append the tokens `ids`, (T,), and return the logits of the last rows: (rows, V)."""


class _LibraryDecoder:
    """Any model, as the library computes it."""

    def __init__(self, model: Any) -> None:
        self.layers = _decoder_layers(model)
        self._model = model
        self._scores_last_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, ids: Tensor, cache: Cache, *, rows: int) -> Tensor:
        options = {"logits_to_keep": rows} if self._scores_last_rows else {}
        output = self._model(ids[None], past_key_values=cache, use_cache=True, **options)
        logits: Tensor = output.logits[0, -rows:]
        return logits


class TransformersBackend(Backend):
    """A model of the transformers library.

    Attributes:
        model: The library's.
        decoder: What computes: the model itself, or a faster one with the same weights.
        captures: Whether forwards of one row are recorded and replayed.

    Cancellation:
        A hook before each decoder layer looks at the running forward's interrupt. On CUDA that is
        the moment of launching: what has been launched already still runs. A captured forward
        always runs to its end.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        capture: bool = False,
    ) -> None:
        """Load a model.

        Args:
            model: A directory, or a hub id where there is a network.
            revision: For a hub id, its branch, tag or commit.
            dtype: What to compute in; one of bfloat16, float16, float32, float64.
            device: As torch names it: "cpu", "cuda", "cuda:1".
            threads: CPU threads of one forward. More than one only helps on a quiet machine.
            capture: On CUDA, record forwards of one row and replay them. They cannot be given up
                half way.

        Raises:
            ModelLoadError: it is not there, not plain data, or its cache cannot be rolled back.
        """
        if dtype not in _DTYPES:
            raise ModelLoadError(f"dtype {dtype!r} is none of {', '.join(sorted(_DTYPES))}")
        self.device = usable_device(device)
        torch.set_num_threads(threads)
        files = find_model_files(model, revision=revision)
        self.tokenizer = files.tokenizer
        model_on_device = _load_model(files, _DTYPES[dtype]).to(self.device)
        self._adopt(files.name, model_on_device, capture=capture)
        self.description = _describe(
            files, self.model, dtype=dtype, device=str(self.device), captures=self.captures
        )

    def _adopt(self, name: str, model: Any, *, capture: bool) -> None:
        self.model = model
        self.decoder = _fastest_decoder(name, model)
        for layer in self.decoder.layers:
            layer.register_forward_pre_hook(self._before_layer)
        self.interrupt = Interrupt()
        self._layers_run = 0
        can_capture = self.device.type == "cuda" and isinstance(self.decoder, FusedLlama)
        self.captures = capture and can_capture
        if capture and not can_capture:
            _log.warning("model %s: its forwards cannot be captured on %s", name, self.device)

    @property
    def layers_run(self) -> int:
        """How many decoder layers forwards have gone through so far."""
        return self._layers_run

    @_on_device()
    def token_memory(self) -> TokenMemory:
        """Measure what there is for tokens: free memory, and what one token takes.

        Cost: a forward of one row.
        """
        self.interrupt = Interrupt()
        one_token = KeyValues(reserve_length=1)
        self._compute(array("I", [0]), one_token, rows=1)
        free = free_memory(self.device)
        return TokenMemory(
            free_bytes=free.byte_count,
            usable_share=free.usable_share,
            bytes_per_token=one_token.byte_count,
        )

    def new_cache(self, spec: SessionSpec) -> TransformersCache:
        """Begin an empty text for a session."""
        return TransformersCache(self, reserve_length=spec.reserve_length)

    @_on_device()
    def _judge(self, scores: Tensor, task: Judge, item: Item) -> Judgement:
        return judge_by(scores, task, spec=item.spec, position=len(item.prefix))

    @_on_device()
    def _draft(self, scores: Tensor, item: Item) -> Proposal:
        return draft_from(scores, spec=item.spec, position=len(item.prefix))

    def forward(self, token_ids: array[int], cache: KeyValues, *, rows: int) -> Tensor:
        """Run the model, and return the last rows' logits: (rows, V) on the device.

        They are valid until the next forward.
        """
        if self.captures and len(token_ids) == 1 and cache.has_room:
            logits = self._step(token_ids, cache)
        else:
            logits = self._compute(token_ids, cache, rows=rows)
        return logits[:, : self.description.vocabulary_size]

    def _compute(self, token_ids: array[int], cache: KeyValues, *, rows: int) -> Tensor:
        ids = torch.tensor(token_ids.tolist()).to(self.device, non_blocking=True)
        return self.decoder(ids, cache, rows=rows)

    def _step(self, token_ids: array[int], cache: KeyValues) -> Tensor:
        """Replay a forward of one row; the first of a text is computed, and recorded."""
        if cache.step is not None and cache.step.is_current:
            self._layers_run += len(self.decoder.layers)
            return cache.step(token_ids[0])
        position = cache.get_seq_length()
        expected = self._compute(token_ids, cache, rows=1)
        cache.keep(position)
        assert isinstance(self.decoder, FusedLlama)
        try:
            cache.step = CapturedStep(self.decoder, cache.text_layers)
            if _agree(expected, cache.step(token_ids[0])):
                return expected
            reason = "they are off"
        except RuntimeError as error:
            reason = str(error)
        _log.warning("model %s: forwards are not captured: %s", self.description.name, reason)
        self.captures, cache.step = False, None
        cache.keep(position)
        return self._compute(token_ids, cache, rows=1)

    def _before_layer(self, *_: object) -> None:
        if self.interrupt.is_set():
            raise ForwardInterrupted
        self._layers_run += 1


class TransformersCache(ModelCache[Tensor]):
    """A session's text in a transformers model; its scores are logits, (rows, V)."""

    def __init__(self, backend: TransformersBackend, *, reserve_length: int) -> None:
        super().__init__()
        self._backend = backend
        self._reserved_length = reserve_length
        self._state = self._nothing()

    def reserve(self, length: int) -> None:
        """Let the next forward have more memory."""
        self._reserved_length = length

    def _nothing(self) -> KeyValues:
        return KeyValues(reserve_length=self._reserved_length, is_fixed=self._backend.captures)

    def _length(self) -> int:
        return min((layer.length for layer in self._state.text_layers), default=0)

    def _crop(self, length: int) -> None:
        if not length:
            # What failed may have left anything, and cropped layers keep their memory.
            self._state = self._nothing()
        self._state.keep(length)

    @_on_device()
    def _forward(self, token_ids: array[int], *, rows: int, interrupt: Interrupt) -> Tensor:
        self._backend.interrupt = interrupt
        self._state.reserve(self._reserved_length)
        return self._backend.forward(token_ids, self._state, rows=rows)


def usable_device(name: str) -> torch.device:
    """Check that a device is there.

    Raises:
        ModelLoadError: it is not.
    """
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelLoadError(f"device {name!r} cannot be used here ({reason})") from error
    return device


def _load_model(files: ModelFiles, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(files.directory, local_files_only=True)
        _refuse_nonsense(files.name, config)
        model: Any = AutoModelForCausalLM.from_pretrained(
            files.directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
        )
    except ModelLoadError:
        raise
    except Exception as error:  # a configuration is a stranger's, and may break anything
        raise ModelLoadError(f"model {files.name!r} cannot be loaded: {error}") from error
    _refuse_broken_weights(files.name, model)
    _refuse_uncroppable(files.name, model)
    return model.eval()


def _refuse_nonsense(name: str, config: Any) -> None:
    """Refuse what would take all memory, or all day, before a weight is read."""
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


def _refuse_broken_weights(name: str, model: Any) -> None:
    """Refuse NaN and infinity, which would end every call: a damaged file, or training gone wrong.

    Cost: reads every weight once.
    """
    for weights, tensor in model.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelLoadError(f"model {name!r}: {weights} has weights that are no numbers")


def _refuse_uncroppable(name: str, model: Any) -> None:
    config = model.config
    is_stateful = model._is_stateful  # noqa: SLF001 - there is no public word for it
    natural_layers = DynamicCache(config=config).layers
    croppable = all(type(x) in {DynamicLayer, DynamicSlidingWindowLayer} for x in natural_layers)
    if config.is_encoder_decoder or is_stateful or not croppable:
        raise ModelLoadError(
            f"model {name!r}: not a decoder whose whole state is keys and values of attention, so "
            "rejected tokens could not be taken back"
        )


def _fastest_decoder(name: str, model: Any) -> _Decoder:
    """Choose how to compute a model; a faster way has to prove that it gives the same."""
    library = _LibraryDecoder(model)
    if not can_fuse(model):
        return library
    fused = FusedLlama(model)
    expected, actual = (_sample_logits(each, model) for each in (library, fused))
    if _agree(expected, actual):
        return fused
    _log.warning("model %s: its layers are not fused: their logits are off", name)
    return library


def _agree(expected: Tensor, actual: Tensor) -> bool:
    """Tell a difference of rounding from an error; NaN agrees with nothing."""
    difference = float((actual - expected).abs().max() / expected.abs().max())
    return difference <= math.sqrt(torch.finfo(expected.dtype).eps)


@_on_device()
def _sample_logits(decoder: _Decoder, model: Any) -> Tensor:
    """Return the logits of a first forward and of two after it: of several rows, and of one."""
    count = 16
    ids = torch.arange(count, device=model.device) * 7919 % model.config.vocab_size
    cache = KeyValues(reserve_length=count)
    return torch.cat([decoder(part, cache, rows=len(part)) for part in ids.split([8, 7, 1])])


def _decoder_layers(model: Any) -> Sequence[nn.Module]:
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return ()


def _context_length(name: str, config: Any) -> int:
    for key in _CONTEXT_LENGTHS:
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            return length
    raise ModelLoadError(
        f"model {name!r}: config.json does not say how many tokens a text can have; add"
        f" {_CONTEXT_LENGTHS[0]} to it"
    )


def _describe(
    files: ModelFiles, model: Any, *, dtype: str, device: str, captures: bool
) -> ModelDescription:
    config = model.config.get_text_config(decoder=True)
    tokenizer = Tokenizer.from_str(files.tokenizer.decode())
    tokenizer_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    fingerprint = files.fingerprint(dtype)
    layer_count = len(_decoder_layers(model))
    return ModelDescription(
        name=files.name,
        revision=files.revision or fingerprint[:16],
        fingerprint=fingerprint,
        tokenizer_fingerprint=hashlib.sha256(files.tokenizer).hexdigest(),
        vocabulary_size=min(tokenizer_size, config.vocab_size),
        eos_token_ids=files.eos_token_ids(),
        context_length=_context_length(files.name, config),
        backend="transformers",
        dtype=dtype,
        device=device,
        layer_count=layer_count,
        cancels_between_layers=layer_count > 0 and not captures,
        verification_rules=(VerificationRule.EXACT, VerificationRule.REJECTION),
    )
