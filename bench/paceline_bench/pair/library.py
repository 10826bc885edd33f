"""The same models in transformers' own hands: a bare loop, and `generate` in its ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import DynamicCache

from paceline_engine.model_files.files import find_model_files
from paceline_engine.torch_backend.model_loading import load_model as load_library_model

PROMPT_LOOKUP_TOKENS = 10
"""The better of the lookaheads 5 and 10 on the bundled target (bench/LOG.md)."""

Decode: TypeAlias = Callable[[Sequence[int], int], tuple[int, ...]]
"""Continues a prompt by so many tokens, greedily."""


class LibraryPair:
    """A target and a drafter in the library's classes, as they come.

    Attributes:
        target_forward_count: Forwards of the target so far.
    """

    def __init__(
        self, target: str, drafter: str, *, dtype: str, device: str, vocabulary_size: int
    ) -> None:
        """Load both models anew, from a directory or a hub id: nothing of ours is in them.

        Tokens beyond the vocabulary, for which some models have scores, are never chosen.
        """
        self._target, self._drafter = (
            load_model(model, dtype=dtype, device=device) for model in (target, drafter)
        )
        for model in (self._target, self._drafter):
            beyond = range(vocabulary_size, model.config.vocab_size)
            model.generation_config.suppress_tokens = [*beyond] or None
        self._device = torch.device(device)
        self._vocabulary_size = vocabulary_size
        self.target_forward_count = 0
        self._target.register_forward_pre_hook(self._count)

    @torch.inference_mode()
    def bare_loop(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Call the target for one token after another; nothing of `generate`."""
        cache, token_ids = DynamicCache(config=self._target.config), []
        fed = torch.tensor([prompt], device=self._device)
        for _ in range(count):
            output = self._target(fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            fed = output.logits[:, -1:, : self._vocabulary_size].argmax(-1)
            token_ids.append(int(fed))
        return tuple(token_ids)

    def generate(self) -> Decode:
        """Return plain `generate`."""
        return self._generate

    def assisted(self, lookahead: int) -> Decode:
        """Return assisted generation with a constant lookahead, never cut short by confidence."""

        def decode(prompt: Sequence[int], count: int) -> tuple[int, ...]:
            settings = self._drafter.generation_config
            settings.num_assistant_tokens = lookahead
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            return self._generate(prompt, count, assistant_model=self._drafter)

        return decode

    def prompt_lookup(self, lookahead: int = PROMPT_LOOKUP_TOKENS) -> Decode:
        """Return generation that drafts from the text so far."""
        return partial(self._generate, prompt_lookup_num_tokens=lookahead)

    @torch.inference_mode()
    def _generate(self, prompt: Sequence[int], count: int, **options: Any) -> tuple[int, ...]:
        ids = torch.tensor([prompt], device=self._device)
        output = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            **options,
        )
        return tuple(output[0, len(prompt) :].tolist())

    def _count(self, *_: object) -> None:
        self.target_forward_count += 1


def load_model(name: str, *, dtype: str, device: str) -> Any:
    """Load one in the library's class, from files or a hub id; no token of it ends a text."""
    model = load_library_model(find_model_files(name), dtype=dtype)
    # As many tokens as are asked for, from everybody.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(device).eval()
