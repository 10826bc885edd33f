"""Models of any size without a download: random weights, for latencies only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline_contract.calls import VerificationRule
from paceline_engine.terms.calls import ModelDescription
from paceline_engine.torch_backend.deciding_model import DecidingModel
from paceline_engine.torch_backend.device import usable_device

_CONTEXT, _VOCABULARY = 1 << 17, 32_000
_HEAD = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama's size.

    Attributes:
        layers: How many.
        width: The model's.
        head: A head's width.
        kv_heads: How many key heads; None: as many as query heads.
        inner: The width between the two products of the MLP; None: 8/3 of the width, as is usual.
        vocabulary: The rows of the head.
    """

    layers: int
    width: int
    head: int = _HEAD
    kv_heads: int | None = None
    inner: int | None = None
    vocabulary: int = _VOCABULARY

    @classmethod
    def parse(cls, words: str) -> Self:
        """Read LAYERSxWIDTH, such as 40x5120.

        Raises:
            ValueError: It is something else.
        """
        found = re.fullmatch(r"(\d+)x(\d+)", words)
        if found is None:
            raise ValueError(f"{words!r} is not LAYERSxWIDTH, such as 40x5120")
        shape = cls(int(found[1]), int(found[2]))
        if not 1 <= shape.layers <= 1000 or shape.width % _HEAD or not shape.width:
            raise ValueError(f"{words!r}: 1 to 1000 layers, and a width that {_HEAD} divides")
        return shape

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"


class RandomModel(DecidingModel):
    """A Llama of random weights, computed as a loaded one is."""

    def __init__(
        self, shape: Shape, *, dtype: str, device: str, threads: int = 1, capture: bool = False
    ) -> None:
        """Make it up.

        Raises:
            ModelLoadError: The device is not there.
        """
        computed_on = usable_device(device)
        torch.set_num_threads(threads)
        self.tokenizer = None
        config = LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.inner or -(-8 * shape.width // 3 // 256) * 256,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.width // shape.head,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=_CONTEXT,
        )
        with computed_on:
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=getattr(torch, dtype)
            )
        super().__init__(str(shape), model.eval(), device=computed_on, capture=capture)
        self.description = ModelDescription(
            name=f"random {shape}",
            revision="random",
            fingerprint="random",
            tokenizer_fingerprint="none",
            vocabulary_size=shape.vocabulary,
            eos_token_ids=(),
            context_length=_CONTEXT,
            backend="transformers",
            dtype=dtype,
            device=device,
            layer_count=shape.layers,
            cancels_between_layers=True,
            shares_forwards=self.decoder is not None,
            takes_trees=self.decoder is not None,
            is_invariant=False,
            verification_rules=(VerificationRule.EXACT,),
        )
