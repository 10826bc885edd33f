"""The one interface between the engine and a model.

A backend is one model on a device (`model_backend.py`) or several models
(`stack_backend/stack.py`). It runs items. A cache is one session's sequence in the backend. Loading
and computing happen on the worker thread only; the event loop reads the description and makes empty
caches.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from traceback import clear_frames
from typing import TYPE_CHECKING, TypeAlias

from paceline.errors import UnsupportedError
from paceline_contract.proposal import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paceline_contract.proposal import Proposal
    from paceline_contract.sampling import Grammar
    from paceline_engine.terms.calls import ModelDescription, SessionSpec
    from paceline_engine.terms.items import Item, Outcome
    from paceline_engine.terms.latencies import StageMeasures
    from paceline_engine.terms.model_cache import ModelCache

Interrupt: TypeAlias = threading.Event
"""Set by another thread when a forward has become worthless."""


PLAIN, INT8, INT4 = "plain", "int8", "int4"
"""How weights are held: in the dtype to compute in, or as whole numbers of eight bits or four."""

_MOST_NAMES = 3
_MOST_CHARACTERS = 120  # of a name
_MOST_REASON = 200  # characters of an error's line


class ModelLoadError(Exception):
    """A model cannot be served. The message is one line for the operator."""

    def __init__(self, message: str) -> None:
        # Libraries' messages have several lines.
        super().__init__(" ".join(message.split()))


def first_line(error: BaseException) -> str:
    """Return an error's first line, for a log or a message; its kind if it says nothing."""
    return str(error).splitlines()[0][:_MOST_REASON] if str(error) else type(error).__name__


def few_names(names: Iterable[str]) -> str:
    """Return the first names in their order, and how many more there are, for a message.

    A file can have a hundred thousand names.
    """
    ordered = sorted(names)
    shown = ", ".join(name[:_MOST_CHARACTERS] for name in ordered[:_MOST_NAMES])
    more = len(ordered) - _MOST_NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def forget_locals(error: BaseException) -> None:
    """Clear the variables of the ended functions that an error and its causes came through.

    An error holds its traceback, and this holds all tensors of the forward that failed. The next
    forward would find no memory for its own. The traceback keeps its lines.
    """
    known: dict[int, BaseException] = {}  # a library may make a circle of causes
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop()
        if found is not None and id(found) not in known:
            known[id(found)] = found
            clear_frames(found.__traceback__)
            left += [found.__cause__, found.__context__]


class DeviceLostError(Exception):
    """The device can compute nothing more: the process has to end."""


class ForwardInterrupted(Exception):  # noqa: N818 - an order carried out, not an error
    """A forward was given up because its interrupt was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMemory:
    """The memory for sessions' tokens.

    Attributes:
        free_bytes: Free memory where the model computes.
        usable_share: The part of it that tokens may fill; forwards need the rest to compute.
        bytes_per_token: The memory of a token, in all layers together.
        kept_share: The part of the tokens that sequences of ended sessions may have.
        bytes_per_text: The memory of a sequence however short it is: a recurrent state.
    """

    free_bytes: int
    usable_share: float
    bytes_per_token: int
    kept_share: float = 1.0
    bytes_per_text: int = 0

    @property
    def token_count(self) -> int:
        """How many tokens fit."""
        return int(self.free_bytes * self.usable_share) // self.bytes_per_token

    @property
    def tokens_per_text(self) -> int:
        """How many tokens take as much memory as a sequence does however short it is."""
        return -(-self.bytes_per_text // self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How a model wants a conversation written as a prompt; see ChatTemplate in the protos."""

    fingerprint: str
    source: str
    named_tokens: Mapping[str, str]
    special_tokens: tuple[str, ...]
    added_token_ids: Mapping[str, int] = field(default_factory=dict)


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
    def judges_row_by_row(self) -> bool:
        """Whether each token of a proposal takes a forward of its own, up to the first rejected."""
        return False

    @property
    def layers_run(self) -> int:
        """How many layers forwards have gone through so far; 0 where there are no layers."""
        return 0

    @property
    def model_forwards(self) -> tuple[tuple[str, int], ...]:
        """For each model of a stack its name, and how many forwards it ran so far."""
        return ()

    @property
    def stage_measures(self) -> tuple[StageMeasures, ...]:
        """The measurements of each stage of a stack, made while it drafted."""
        return ()

    def knows_grammar(self, grammar: Grammar) -> bool:  # noqa: ARG002 - most know none
        """Whether a grammar is compiled already, so that `compile_grammar` takes no time."""
        return False

    def compile_grammar(self, grammar: Grammar) -> None:  # noqa: ARG002 - most know none
        """Compile a grammar for sessions that are opened with it. Any thread may call this.

        Raises:
            InvalidFieldError: it is no grammar that can be enforced.
            UnsupportedError: the model knows no grammars.
        """
        raise UnsupportedError("spec.sampling.grammar: this model knows no grammars")

    def forced(self, item: Item, beyond: Sequence[int] = (), *, most: int) -> Proposal:  # noqa: ARG002 - most know no grammars
        """Return a chain of the tokens that alone may follow, by the session's grammar.

        Worker thread only.

        Args:
            item: Has the prefix.
            beyond: The tokens after the prefix that they follow.
            most: How many tokens to return at most.
        """
        return NOTHING

    def measure(self, interrupt: Interrupt) -> None:  # noqa: B027 - most have nothing to choose
        """Measure the numbers that only this backend decides by. Worker thread only."""

    def token_memory(self) -> TokenMemory | None:
        """Measure the memory for tokens; None if tokens take no memory. Worker thread only."""
        return None

    @abstractmethod
    def new_cache(self, spec: SessionSpec) -> ModelCache:
        """Begin an empty sequence for a session. Must be quick: the event loop waits for it."""

    @abstractmethod
    def run(
        self, items: Sequence[Item], interrupt: Interrupt, *, row_limit: int | None = None
    ) -> list[Outcome | Exception]:
        """Do a step of each item in one forward, and answer each as if it had been alone.

        Worker thread only.

        Args:
            items: Each of another sequence. Proposals are chains, unless the model takes trees.
            interrupt: Set when no caller waits for any of the items.
            row_limit: The most rows of the forward; it is above the sum of all items but the last.
                The last item's prefix is cut to the rows that are left, at least one.

        Returns:
            For each item its outcome, or the error of this item alone: InvalidFieldError if a
            proposal's distribution is none, OverloadedError without memory, any other error for a
            bug.

        Raises:
            ForwardInterrupted: the interrupt was set. The caches are as good as before.
            DeviceLostError: the device can compute nothing more.
        """


class ComposedBackend(Backend):
    """A backend that computes with other backends' models.

    Args:
        description: What it is as one model. Whether it cancels between layers follows from its
            models, and can change while they compute.

    Attributes:
        models: The other backends.
    """

    def __init__(self, models: Sequence[Backend], description: ModelDescription) -> None:
        self.models = models
        self._description = description

    @property
    def description(self) -> ModelDescription:
        """What it is as one model."""
        cancels = all(model.description.cancels_between_layers for model in self.models)
        if cancels != self._description.cancels_between_layers:
            self._description = replace(self._description, cancels_between_layers=cancels)
        return self._description

    @description.setter
    def description(self, description: ModelDescription) -> None:
        self._description = description
