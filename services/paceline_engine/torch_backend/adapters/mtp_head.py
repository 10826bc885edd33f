"""A multi-token-prediction module inside a checkpoint, as a head that drafts step by step.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) trains one more decoder layer with the model. Its row at
position p reads the model's last hidden state there, after the final norm, and the token at p + 1,
and guesses the token at p + 2. So it is used as an EAGLE head is (`eagle.py`), with three
differences: one feature instead of three, two norms before one product instead of a layer with two
inputs, and the model's own embedding and head. A further guess is made from the module's output
after its norm, by the same module.

The layer is the library's own class, which computes experts, gates and latent attention as in the
model itself. It calls our attention function and, where it keeps latent states, our cache; both ask
the running step (`_step`) for what its rows see.

Difference: vLLM sets the embedding of the first row to zero. The library does not, nor do we.

Letters: R rows, H heads, G key and value heads, D their width, E the model's width.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from paceline_engine.torch_backend.adapters.adapter import SeenRows

_NAME = "paceline-module"


class _KeysAreMade(Exception):  # noqa: N818 - no error
    """Ends the layer early: only its keys and values were wanted."""


class _OnlyKeys:
    """Takes keys and values, and no more of the layer is computed."""

    def __init__(self) -> None:
        self.found: tuple[Tensor, Tensor] | None = None

    def take(self, keys: Tensor, values: Tensor) -> None:
        self.found = keys, values
        raise _KeysAreMade


class _RowAlone:
    """A row that sees itself; what it attends to is zero."""

    def take(self, keys: Tensor, values: Tensor) -> None:
        self._own = tuple(each.transpose(0, 1)[None] for each in (keys, values))

    def states(self) -> Sequence[tuple[Tensor, Tensor]]:
        keys, values = self._own
        return [(keys, values)]

    def attend(
        self,
        queries: Tensor,
        *,
        made: Sequence[tuple[Tensor, Tensor]] | None = None,
        scale: float | None = None,  # noqa: ARG002 - of the protocol
    ) -> Tensor:
        _, values = (made or self.states())[0]
        return queries.new_zeros(*queries.shape[:2], values.shape[-1])


_step: ContextVar[SeenRows | _OnlyKeys] = ContextVar("step")
"""The running step: the library cannot pass it down to its layer."""


class MtpHead:
    """A module beside the loaded model that it belongs to.

    Args:
        module: The library's layer with the norms and the product before it, and the norm after
            it; on the model's device.
        model: The library's.
        makes_keys: Whether the layer makes keys and values of what it keeps.

    Attributes:
        feature_layers: What it reads: the number of layers stands for the output of the final norm.
        width: E.
        state_shape: What it keeps of a row: G, and the widths of its keys and values.
    """

    def __init__(self, module: nn.Module, model: Any, *, makes_keys: bool) -> None:
        module.config._attn_implementation = _NAME  # type: ignore[union-attr]  # noqa: SLF001
        config = model.config.get_text_config(decoder=True)
        self._module: Any = module
        self._embedding = model.get_input_embeddings()
        self._rotate = model.get_decoder().rotary_emb
        self._cache = _Latents() if makes_keys else None
        self._vocabulary_size = config.vocab_size
        self.feature_layers = (config.num_hidden_layers,)
        self.width = config.hidden_size
        self.state_shape = self._probe()

    @property
    def draft_token_ids(self) -> Tensor:
        """The tokens that it can guess: all."""
        return torch.arange(self._vocabulary_size, device=self._embedding.weight.device)

    def reduce(self, features: Tensor) -> Tensor:
        """Return what is kept of the target's rows: (..., E)."""
        return features.to(self._module.eh_proj.weight.dtype)

    def read(self, _model: Any, token_ids: Tensor, feature: Tensor) -> Tensor:
        """Begin rows, (R, E), with the tokens after theirs and features or carried outputs."""
        embedded = self._embedding(token_ids).to(feature.dtype)
        both = (self._module.enorm(embedded), self._module.hnorm(feature))
        begun: Tensor = self._module.eh_proj(torch.cat(both, -1))
        return begun

    def keys_and_values(self, rows: Tensor, *, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of rows that guess nothing: (R, G, D) each."""
        step = _OnlyKeys()
        try:
            self._compute(rows, positions, step)
        except _KeysAreMade:
            assert step.found is not None, "it was raised with them"
            return step.found
        raise AssertionError("the layer attends")

    def output(self, rows: Tensor, *, positions: Tensor, seen: SeenRows) -> Tensor:
        """Return the module's output after its norm: (R, E)."""
        output: Tensor = self._module.post_norm(self._compute(rows, positions, seen))
        return output

    def score(self, model: Any, output: Tensor) -> Tensor:
        """Return the logits of all tokens, (R, V), by the model's own head."""
        logits: Tensor = model.lm_head(output)
        return logits

    def carry(self, output: Tensor) -> Tensor:
        """Return what the next step reads instead of features: (R, E)."""
        return output

    def parts(self) -> list[nn.Module]:
        """Return what it computes with, besides the model's own embedding and head."""
        return [self._module]

    @torch.inference_mode()
    def try_out(self, model: Any) -> None:
        """Compute a row, so that a module that cannot be computed raises now."""
        weight = self._module.eh_proj.weight
        nothing = torch.zeros(1, dtype=torch.int64, device=weight.device)
        rows = self.read(model, nothing, weight.new_zeros(1, self.width))
        self.score(model, self.output(rows, positions=nothing, seen=_RowAlone()))

    def _compute(self, rows: Tensor, positions: Tensor, step: SeenRows | _OnlyKeys) -> Tensor:
        token = _step.set(step)
        try:
            hidden: Tensor = self._module.mtp_block(
                rows[None],
                attention_mask=None,
                position_ids=positions[None],
                position_embeddings=self._rotate(rows[None], position_ids=positions[None]),
                past_key_values=self._cache,
            )
        finally:
            _step.reset(token)
        return hidden[0]

    @torch.inference_mode()
    def _probe(self) -> tuple[int, int, int]:
        weight = self._module.eh_proj.weight
        row = weight.new_zeros(1, self.width)
        positions = torch.zeros(1, dtype=torch.int64, device=weight.device)
        keys, values = self.keys_and_values(row, positions=positions)
        return keys.shape[1], keys.shape[2], values.shape[2]


class _Latents:
    """The running step's states, as the cache of a layer that makes keys and values of them."""

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Learn new rows, (1, G, R, D), and return those of all sequences, one behind another."""
        step = _step.get()
        step.take(keys[0].transpose(0, 1), values[0].transpose(0, 1))
        assert not isinstance(step, _OnlyKeys), "it ends here"
        all_keys, all_values = zip(*step.states(), strict=True)
        return torch.cat(all_keys, 2), torch.cat(all_values, 2)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend for the layer: (1, R, H, D) from (1, heads, R, D)."""
    step = _step.get()
    made = None
    if getattr(module, "kv_b_proj", None) is None:
        step.take(key[0].transpose(0, 1), value[0].transpose(0, 1))
        assert not isinstance(step, _OnlyKeys), "it ends here"
    else:
        assert not isinstance(step, _OnlyKeys), "it has ended in the cache"
        lengths = [keys.shape[2] for keys, _ in step.states()]
        parts = (torch.split(each, lengths, 2) for each in (key, value))
        made = [*zip(*parts, strict=True)]
    return step.attend(query[0].transpose(0, 1), made=made, scale=scaling)[None], None


AttentionInterface.register(_NAME, _attend)
# A row sees what its step says, so the library need not make a mask.
AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
