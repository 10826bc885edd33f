"""The one interface between the engine and a model.

A backend is one model on a device (`model_backend.py`), or several (`stack_backend/stack.py`), and
runs items; a cache is one session's text in it. Loading and computing happen on the worker thread
only; the event loop reads the description, and makes empty caches.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline_engine.terms.calls import ModelDescription, SessionSpec
    from paceline_engine.terms.items import Item, Outcome
    from paceline_engine.terms.latencies import StageMeasures
    from paceline_engine.terms.model_cache import ModelCache

Interrupt: TypeAlias = threading.Event
"""Set by another thread when a forward has become worthless."""


_MOST_NAMES = 3
_MOST_CHARACTERS = 120  # of a name


class ModelLoadError(Exception):
    """A model cannot be served. The message is one line for the operator."""

    def __init__(self, message: str) -> None:
        # Libraries explain themselves in paragraphs.
        super().__init__(" ".join(message.split()))


def few_names(names: Iterable[str]) -> str:
    """Return the first names in their order, and how many more there are, for a message.

    A file can have a hundred thousand names.
    """
    ordered = sorted(names)
    shown = ", ".join(name[:_MOST_CHARACTERS] for name in ordered[:_MOST_NAMES])
    more = len(ordered) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


class DeviceLostError(Exception):
    """The device can compute nothing more: the process has to end."""


class ForwardInterrupted(Exception):  # noqa: N818 - an order carried out, not an error
    """A forward was given up because its interrupt was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMemory:
    """The memory that sessions' tokens can lie in.

    Attributes:
        free_bytes: What is free where the model computes.
        usable_share: The part of it that tokens may fill; forwards need the rest to compute in.
        bytes_per_token: What a token takes, in all layers together.
        kept_share: The part of the tokens that fit which texts of ended sessions may have.
    """

    free_bytes: int
    usable_share: float
    bytes_per_token: int
    kept_share: float = 1.0

    @property
    def token_count(self) -> int:
        """How many tokens fit."""
        return int(self.free_bytes * self.usable_share) // self.bytes_per_token


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How a model wants a conversation written as a prompt; see ChatTemplate in the protos."""

    fingerprint: str
    source: str
    named_tokens: Mapping[str, str]
    special_tokens: tuple[str, ...]


class Backend(ABC):
    """A loaded model.

    Attributes:
        description: What it is.
        tokenizer: The bytes of its tokenizer.json, or None if it has none.
        chat_template: How it wants conversations, or None if it only continues text.
    """

    description: ModelDescription
    tokenizer: bytes | None
    chat_template: ChatTemplate | None = None

    @property
    def cuts_prompts(self) -> bool:
        """Whether a forward never has more rows of a prompt than `run` allows."""
        return True

    @property
    def layers_run(self) -> int:
        """How many layers forwards have gone through so far; 0 where there are no layers."""
        return 0

    @property
    def model_forwards(self) -> tuple[tuple[str, int], ...]:
        """Of a stack, how many forwards each model ran so far, by its name."""
        return ()

    @property
    def stage_measures(self) -> tuple[StageMeasures, ...]:
        """Of a stack, what was measured of each stage while it drafted."""
        return ()

    def measure(self, interrupt: Interrupt) -> None:  # noqa: B027 - most have nothing to choose
        """Measure what it decides by, besides what its callers measure. Worker thread only."""

    def token_memory(self) -> TokenMemory | None:
        """Measure what there is for tokens; None where they take no memory. Worker thread only."""
        return None

    @abstractmethod
    def new_cache(self, spec: SessionSpec) -> ModelCache:
        """Begin an empty text for a session; at once, because the event loop waits for it."""

    @abstractmethod
    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item in one forward, and answer each as if it had been alone.

        Worker thread only.

        Args:
            items: Of different texts. Their proposals are chains, unless the model knows trees.
            interrupt: Set when nobody waits for any of them.
            row_limit: Rows that the forward may have, more than the others need: the last item's
                prefix is cut to what is left, one row at least.

        Returns:
            For each item what it got, or the error that it alone has: InvalidFieldError if what a
            token is said to be drawn from is no distribution, OverloadedError without memory, any
            other where there is a bug.

        Raises:
            ForwardInterrupted: the interrupt was set. The caches are as good as before.
            DeviceLostError: nothing can be computed any more.
        """
