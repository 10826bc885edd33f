"""A library model with the state that it keeps between forwards, whatever the state is."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# What families call their state, as an argument and in the output.
_NAMES = ("past_key_values", "cache_params", "state")
_ROLLED_BACK = {DynamicLayer, DynamicSlidingWindowLayer}


def has_recurrent_state(model: Any) -> bool:
    """Whether a model keeps more than keys and values, so that rows cannot be forgotten."""
    layers = DynamicCache(config=model.config).layers
    return bool(model._is_stateful) or any(  # noqa: SLF001 - there is no public word for it
        type(layer) not in _ROLLED_BACK for layer in layers
    )


class LibraryState:
    """The state of a library model after the first tokens of a sequence.

    Attributes:
        length: How many tokens it stands for.
    """

    def __init__(self, model: Any) -> None:
        """Build the state of no tokens."""
        parameters = inspect.signature(type(model).forward).parameters
        self._model = model
        self._name = next(name for name in _NAMES if name in parameters)
        self._takes_positions = "position_ids" in parameters
        self._state: Any = None  # the library makes it in the first forward
        self.length = 0

    def append(self, token_ids: Tensor) -> Tensor:
        """Compute the rows of further tokens, (T,): their logits, (T, V).

        A failure leaves a state of which nothing is known.
        """
        options: dict[str, Any] = {self._name: self._state} if self.length else {}
        if self._takes_positions:
            # Told, because some families count from 0 in each forward.
            start = self.length
            positions = torch.arange(start, start + len(token_ids), device=token_ids.device)
            options["position_ids"] = positions[None]
        output = self._model(token_ids[None], use_cache=True, **options)
        if self._name not in output:
            raise ValueError("its forward gives back no state")
        self._state = output[self._name]
        self.length += len(token_ids)
        logits: Tensor = output.logits[0]
        return logits

    @property
    def layers(self) -> Sequence[Any]:
        """The layers of the library's cache.

        Raises:
            ValueError: it has another kind of state.
        """
        if not isinstance(self._state, DynamicCache):
            raise ValueError(f"its state is a {type(self._state).__name__}")
        return self._state.layers

    def copy(self) -> LibraryState:
        """Return a state of its own that stands for the same tokens."""
        other = copy.copy(self)
        other._state = copy.deepcopy(self._state)  # noqa: SLF001 - it is of this class
        return other

    @property
    def byte_count(self) -> int:
        """The memory of all its tensors."""
        return sum(tensor.nbytes for tensor in _tensors(self._state, set()))


def _tensors(of: Any, known: set[int]) -> Iterator[Tensor]:
    """Yield the tensors of an object and of those that it holds, each once."""
    if id(of) in known:
        return
    known.add(id(of))
    if isinstance(of, Tensor):
        yield of
    elif isinstance(of, dict):
        for each in of.values():
            yield from _tensors(each, known)
    elif isinstance(of, list | tuple):
        for each in of:
            yield from _tensors(each, known)
    elif hasattr(of, "__dict__"):
        yield from _tensors(vars(of), known)
