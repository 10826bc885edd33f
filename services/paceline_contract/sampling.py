"""SamplingParameters and their limits; sampling.proto says the same in words.

A parameter is declared here once. From the declaration follow the limits that the orchestrator, the
gateway and the engine check, whether the parameter shapes logits, whether a request uses it, and so
which servers may get the request.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers that a field may have; NaN is never one.

    Attributes:
        least: The smallest.
        most: The largest.
        is_open: Whether `least` itself is left out.
    """

    least: float
    most: float
    _: KW_ONLY
    is_open: bool = False

    def __contains__(self, number: float) -> bool:
        return self.least <= number <= self.most and not (self.is_open and number == self.least)

    def __str__(self) -> str:
        return f"{'(' if self.is_open else '['}{self.least:g}, {self.most:g}]"


class GrammarKind(StrEnum):
    """The form of a grammar; the values are the fields of Grammar in sampling.proto."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    CHOICES = "choices"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to follow; limits and meaning as in sampling.proto.

    Attributes:
        text: In the form of its kind; choices are a JSON list of texts.
    """

    kind: GrammarKind
    text: str


def _within(least: float, most: float, *, is_open: bool = False) -> dict[str, object]:
    """Declare the numbers that a parameter may be, where they are the same for every model."""
    return {"interval": Interval(least, most, is_open=is_open)}


_SHAPES: dict[str, object] = {"shapes": True}  # what the tokens so far change logits by


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is chosen; limits and meaning as in sampling.proto.

    Each default is the value that changes nothing.

    Attributes:
        logit_bias: Tokens and their biases, by token id.
    """

    temperature: float = field(default=0.0, metadata=_within(0, 100))
    top_k: int = 0
    top_p: float = field(default=1.0, metadata=_within(0, 1, is_open=True))
    min_p: float = field(default=0.0, metadata=_within(0, 1))
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), metadata=_SHAPES)
    presence_penalty: float = field(default=0.0, metadata=_SHAPES | _within(-2, 2))
    frequency_penalty: float = field(default=0.0, metadata=_SHAPES | _within(-2, 2))
    # A logit divided by a smaller number might not be finite.
    repetition_penalty: float = field(default=1.0, metadata=_SHAPES | _within(0.01, 100))
    min_tokens: int = field(default=0, metadata=_SHAPES)
    grammar: Grammar | None = field(default=None, metadata=_SHAPES)

    @property
    def used(self) -> frozenset[str]:
        """The names of the parameters that may change something."""
        return frozenset(name for name, it in NEUTRAL_VALUES.items() if getattr(self, name) != it)

    @property
    def shapes(self) -> bool:
        """Whether logits depend on these parameters before temperature, filters and noise do."""
        return any(getattr(self, name) != NEUTRAL_VALUES[name] for name in SHAPING_PARAMETERS)


NEUTRAL_VALUES: Mapping[str, object] = {it.name: it.default for it in fields(SamplingParameters)}
"""All parameters, each with the value that changes nothing."""

SAMPLING_PARAMETERS = frozenset(NEUTRAL_VALUES)
"""The names of all parameters: those of this version."""

SAMPLING_INTERVALS: Mapping[str, Interval] = {
    it.name: it.metadata["interval"]
    for it in fields(SamplingParameters)
    if "interval" in it.metadata
}
"""The parameters whose limits are the same for every model, and their limits."""

SHAPING_PARAMETERS = tuple(it.name for it in fields(SamplingParameters) if "shapes" in it.metadata)
"""The parameters by which the tokens so far change logits, before temperature and filters do."""

FILTERS = SAMPLING_PARAMETERS.difference(SHAPING_PARAMETERS)
"""The parameters that a row's scores are filtered by."""

UNNAMED_PARAMETERS = frozenset({"temperature", "top_k", "top_p", "min_p"})
"""What a server applies that names no parameters (GetModelInfoResponse.sampling_parameters).

These are the parameters that the protos had at first. A server that is too old to name its
parameters cannot be told from one that forgot to. If it applies more than these, it gets fewer
requests than it could serve; if it applied less than it is believed to, a text would be wrong.
"""
