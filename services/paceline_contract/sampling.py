"""The limits and the meaning of SamplingParameters; sampling.proto says the same in words."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
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


SAMPLING_INTERVALS: Mapping[str, Interval] = {
    "temperature": Interval(0, 100),
    "top_p": Interval(0, 1, is_open=True),
    "min_p": Interval(0, 1),
    "presence_penalty": Interval(-2, 2),
    "frequency_penalty": Interval(-2, 2),
    # A logit divided by a smaller number might not be finite.
    "repetition_penalty": Interval(0.01, 100),
}
"""The fields whose limits are the same for every model, and their limits."""

SHAPING_PARAMETERS: Mapping[str, object] = {
    "logit_bias": (),
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "grammar": None,
}
"""The fields by which the tokens so far change logits, before the temperature and the filters do;
each with the value that changes nothing. Servers without GetModelInfoResponse.shapes_logits know
none of them."""
