"""A model of the transformers library, loaded from its files; computed_model.py computes it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline_engine.deciding.grammars import GrammarCompiler, grammar_engine
from paceline_engine.deciding.gumbel import noise_kernel
from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.lora_folder import read_lora_folders
from paceline_engine.model_files.quantisation import find_quantisation
from paceline_engine.terms.backend import (
    INT4,
    INT8,
    PLAIN,
    ModelLoadError,
)
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.adapters.mtp_files import (
    MODULE,
    LoadedModule,
    check_module,
    load_module,
    tell_of_module,
)
from paceline_engine.torch_backend.chain_drafting import ChainDrafter, layers_beside
from paceline_engine.torch_backend.deciding_model import DecidingModel
from paceline_engine.torch_backend.device import on_device, usable_device
from paceline_engine.torch_backend.draft_head import DraftHead
from paceline_engine.torch_backend.invariance import (
    MOST_INT8_THREADS,
    is_invariant,
    make_invariant,
)
from paceline_engine.torch_backend.llama import FusedLlama
from paceline_engine.torch_backend.lora_adapters import LoraAdapters
from paceline_engine.torch_backend.lora_files import load_lora, lora_fingerprint
from paceline_engine.torch_backend.model_loading import count_tokens, describe, load_model
from paceline_engine.torch_backend.own_guesses import OwnGuesses
from paceline_engine.torch_backend.self_drafting import SelfDrafter, load_for
from paceline_engine.torch_backend.whole_products import (
    products_of,
    refuse_weights,
    tell_what_is_faster,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.model_files.files import ModelFiles
    from paceline_engine.model_files.lora_folder import LoraFolder
    from paceline_engine.torch_backend.adapters.files import LoadedAdapter
    from paceline_engine.torch_backend.adapters.mtp_head import MtpHead
    from paceline_engine.torch_backend.decoders import Decoder
    from paceline_engine.torch_backend.kv_arena import KeyValueShape
    from paceline_engine.torch_backend.lora_rows import LoraRows

_log = logging.getLogger(__name__)


class TransformersBackend(DecidingModel):
    """A model of the transformers library that is loaded from its files."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        dtype: str = "float32",
        device: str = "cpu",
        threads: int = 1,
        capture: bool = False,
        invariant: bool = False,
        weights: str = PLAIN,
        compiled: bool = True,
        adapter: str | None = None,
        guesses: int | None = None,
        prune_below: float = 0.0,
        lora: Sequence[str] = (),
    ) -> None:
        """Load a model.

        Args:
            model: A directory, or a hub id where there is a network.
            revision: For a hub id, its branch, tag or commit.
            dtype: What to compute in; one of bfloat16, float16, float32, float64.
            device: As torch names it: "cpu", "cuda", "cuda:1".
            threads: CPU threads of one forward. More than one only helps on a quiet machine.
            capture: On CUDA, record forwards of few rows and replay them. They cannot be given up
                half way.
            invariant: Let a row's logits follow from its sequence alone, bit by bit: see
                `invariant.py`.
            weights: PLAIN, in `dtype`, or as a quantised model's files have them; or INT8, with
                all products in eight bits (`int8_linear.py`); or INT4, in four, or as files have
                them in groups (`grouped_linear.py`). With `invariant` INT8 and INT4 take two
                threads, too.
            compiled: On a CPU, compile what a layer computes between its products, where there is
                a compiler; its logits keep their bits: see `compiled_steps.py`.
            adapter: Directory with an adapter for it; MODULE: the module inside its checkpoint;
                None: it does not draft for itself.
            guesses: How many it makes after a verdict; None: as the adapter's card says.
            prune_below: See `SelfDrafter` and `ChainDrafter`.
            lora: LoRA adapters that sequences can have, each as NAME=DIR.

        Raises:
            ModelLoadError: it is not there, not plain data, its cache cannot be rolled back, it
                cannot be invariant, or an adapter is not one for it; or it has an adapter and a
                draft vocabulary.
        """
        lora_folders = read_lora_folders(lora)  # before anything large is read
        if lora_folders and adapter is not None:
            raise ModelLoadError("--lora and --adapter do not go together")
        computed_on = usable_device(device, dtype=dtype)
        refuse_weights(weights, dtype=dtype, device=computed_on, compiled=compiled)
        if invariant:
            _check_can_be_invariant(computed_on, threads=threads, weights=weights)
        torch.set_num_threads(threads)
        files = find_model_files(model, revision=revision, check=find_quantisation)
        beside = check_module(files) if adapter == MODULE else 0
        token_count = count_tokens(files)
        self.tokenizer = files.tokenizer
        self.chat_template = files.chat_template
        loaded = load_model(
            files,
            dtype=dtype,
            device=computed_on,
            keeps_grids=weights != PLAIN or files.quantisation is not None,
            beside=beside,
        ).to(computed_on)
        computed_in = dtype if weights == PLAIN else weights
        if weights == PLAIN and files.quantisation is not None:
            computed_in = products_of(
                files.name, loaded, files.quantisation, dtype=dtype, device=computed_on
            )
        draft_head = _narrow_head(files, loaded, has_adapter=adapter is not None)
        loaded_adapter = _load_adapter(files, loaded, adapter, guesses=guesses)
        head = _head_of(loaded_adapter)
        super().__init__(
            files.name,
            loaded,
            device=computed_on,
            capture=capture,
            invariant=invariant,
            weights=PLAIN if computed_in == dtype else computed_in,
            compiled=compiled,
            head=head,
        )
        self.draft_head = draft_head
        self.description = describe(
            files,
            loaded,
            token_count=token_count,
            dtype=computed_in,
            device=computed_on,
            threads=threads,
            cancels_between_layers=bool(self._layers) and not self.captures,
            shares_forwards=self.shares_forwards,
            is_invariant=invariant,
        )
        self._prepare_grammars()
        noise_kernel(computed_on)  # compiled now, so that no request waits for it
        if computed_in == dtype:
            tell_what_is_faster(
                files.name, loaded, dtype=dtype, device=computed_on, compiled=compiled
            )
        if invariant:
            self._prove_invariance(threads=threads)
        if lora_folders:
            self._load_lora(lora_folders)
        if loaded_adapter is not None:
            self._draft_for_itself(loaded_adapter, guesses=guesses, prune_below=prune_below)

    @on_device()
    def _prove_invariance(self, *, threads: int) -> None:
        """Choose shapes in which a row's logits follow from its sequence alone."""
        self.row_multiple = make_invariant(
            self.model,
            self.decoder,
            None if self._slabs is None else self._slabs.shape,
            description=self.description,
            threads=threads,
            attention_places=self._attention_places,
        )

    @on_device()
    def _load_lora(self, folders: Sequence[LoraFolder]) -> None:
        """Let sequences have LoRA adapters."""
        what = self.description
        if self._stepped is not None:
            raise ModelLoadError(
                f"model {what.name!r} has a recurrent state that goes row by row: it takes no"
                " --lora"
            )
        if self.decoder is None or self._slabs is None:
            raise ModelLoadError(
                f"model {what.name!r} is computed in the library's own way: it takes no --lora"
            )
        self.lora = LoraAdapters(
            self.model,
            self.decoder,
            shape=self._slabs.shape,
            attention_places=self._attention_places,
        )
        fingerprints = tuple(self._add_lora(self.lora, each) for each in folders)
        if self._invariant:
            self._check_lora_rows(self.lora, self.decoder, self._slabs.shape)
        self.description = replace(what, lora_fingerprints=fingerprints)

    def _add_lora(self, lora: LoraAdapters, folder: LoraFolder) -> tuple[str, str]:
        """Load an adapter; return its name and its fingerprint.

        What is loaded is freed here: `lora` holds the factors in another form.
        """
        adapter = load_lora(folder, self.model, device=self.device)
        lora.add(adapter)
        return adapter.name, lora_fingerprint(self.description.fingerprint, adapter)

    def _check_lora_rows(self, lora: LoraAdapters, decoder: Decoder, shape: KeyValueShape) -> None:
        """Check that also with adapters a sequence's logits follow from the sequence alone."""
        what = self.description
        for name in lora.one_of_each_shape:

            def rows(counts: Sequence[int], name: str = name) -> LoraRows | None:
                return lora.rows([(name, count) for count in counts])

            if not is_invariant(
                decoder,
                shape,
                vocabulary_size=what.vocabulary_size,
                context_length=what.context_length,
                multiple=self.row_multiple,
                lora_of=rows,
                attention_places=self._attention_places,
            ):
                raise ModelLoadError(
                    f"LoRA adapter {name!r} cannot be served with --invariant: what it adds for a"
                    " text depends on what else a forward computes"
                )

    def _prepare_grammars(self) -> None:
        """Let sessions have grammars, if the tokenizer is one that the library can read."""
        what = self.description
        if self.tokenizer is None or not what.eos_token_ids:
            return  # a text cannot end along a grammar without a token that ends it
        try:
            self.shapers.grammars = GrammarCompiler(
                self.tokenizer,
                vocabulary_size=what.vocabulary_size,
                eos_token_ids=what.eos_token_ids,
            )
        except Exception as error:  # noqa: BLE001 - everything else works without
            _log.warning("model %r: it knows no grammars: %s", what.name, str(error)[:200])
            return
        self.description = replace(what, grammar_engine=grammar_engine())

    def _draft_for_itself(
        self, adapter: LoadedAdapter | LoadedModule, *, guesses: int | None, prune_below: float
    ) -> None:
        is_module = isinstance(adapter, LoadedModule)
        if self._stepped is not None or (self._tiles is not None and not is_module):
            raise ModelLoadError(
                f"model {self.description.name!r} has a recurrent state: it takes no --adapter"
            )
        if self.decoder is None:
            raise ModelLoadError(
                f"model {self.description.name!r} is computed in the library's own way, where no"
                " adapter can read what it needs"
            )
        if isinstance(adapter, LoadedModule):
            adapter.module.try_out(self.model)  # again, with the products that it has now
        drafter = self._drafter_with(adapter, guesses=guesses, prune_below=prune_below)
        size = self.description.vocabulary_size
        self.own_guesses = OwnGuesses(drafter, vocabulary_size=size)
        self.description = replace(
            self.description, self_draft_depth=drafter.depth, self_draft_kind=drafter.kind
        )

    def _drafter_with(
        self, adapter: LoadedAdapter | LoadedModule, *, guesses: int | None, prune_below: float
    ) -> SelfDrafter | ChainDrafter:
        """Make what drafts with an adapter: step by step if it keeps features."""
        head = _head_of(adapter)
        if head is None:
            assert not isinstance(adapter, LoadedModule), "it has a head"
            return SelfDrafter(
                adapter,
                self.model,
                takes_trees=self.description.takes_trees,
                # What a forward goes on with after pruning is no longer invariant.
                prune_below=0 if self._invariant else prune_below,
                goes_along=isinstance(self.decoder, FusedLlama) and not self._invariant,
            )
        assert self._slabs is not None, "it has a decoder"
        shape = self._slabs.shape
        return ChainDrafter(
            adapter,
            head,
            self.model,
            first_layer=shape.layers - layers_beside(head, shape),
            vocabulary_size=self.description.vocabulary_size,
            takes_trees=self.description.takes_trees,
            prune_below=prune_below,
            guesses=guesses,
        )


def _check_can_be_invariant(device: torch.device, *, threads: int, weights: str) -> None:
    most_threads = MOST_INT8_THREADS if weights in {INT8, INT4} else 1
    if device.type != "cpu" or threads > most_threads:
        raise ModelLoadError(
            "with --invariant forwards are computed by one thread of a CPU, or with --weights"
            f" int8 or int4 by up to {MOST_INT8_THREADS}: leave --device and --threads alone"
        )


def _narrow_head(files: ModelFiles, model: Any, *, has_adapter: bool) -> DraftHead | None:
    """Let a model score its draft vocabulary alone, if its files have one."""
    if files.draft_vocabulary is None:
        return None
    if has_adapter:
        raise ModelLoadError(
            f"model {files.name!r} has a draft vocabulary and drafts for another model: it takes no"
            " --adapter"
        )
    return DraftHead(
        model, files.draft_vocabulary, vocabulary_size=files.vocabulary_size, name=files.name
    )


def _load_adapter(
    files: ModelFiles, model: Any, adapter: str | None, *, guesses: int | None
) -> LoadedAdapter | LoadedModule | None:
    if adapter is None:
        tell_of_module(files)
        return None
    if adapter == MODULE:
        return load_module(files, model, guesses=guesses)
    return load_for(files, model, Path(adapter), guesses=guesses)


def _head_of(adapter: LoadedAdapter | LoadedModule | None) -> EagleHead | MtpHead | None:
    """Return an adapter's head, if it keeps features."""
    if isinstance(adapter, LoadedModule):
        return adapter.module
    if adapter is None or not isinstance(adapter.module, EagleHead):
        return None
    return adapter.module
