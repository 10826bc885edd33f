"""How a request tells the logits processor by which rule its rows are decided: plain data.

The processor may run in other processes, one for each part of a divided model. So a request carries
the whole rule in its `extra_args`, and the processor answers with nothing but the chosen token.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from paceline_contract.sampling import SamplingParameters
from paceline_engine.terms.calls import SessionSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELD = "paceline"
"""The key of a request's `extra_args`, and of the engine's `additional_config`."""


def row_task(spec: SessionSpec, *, fingerprint: str) -> dict[str, Any]:
    """Return a session's rule as a request's `extra_args`, with the model that it is for."""
    sampling = asdict(replace(spec.sampling, grammar=None))
    return {
        FIELD: {
            "model": fingerprint,
            "seed": spec.seed,
            "sampling": {**sampling, "logit_bias": [[*pair] for pair in spec.sampling.logit_bias]},
            "prompt_length": spec.prompt_length,
            "end_token_ids": [*spec.end_token_ids],
        }
    }


def read_row_task(extra_args: Mapping[str, Any] | None) -> SessionSpec | None:
    """Return the rule that a request carries; None: it is none of ours, as in a warm-up."""
    if not extra_args or FIELD not in extra_args:
        return None
    told = extra_args[FIELD]
    biases = tuple((int(token), float(bias)) for token, bias in told["sampling"]["logit_bias"])
    return SessionSpec(
        reserve_length=1,
        sampling=SamplingParameters(**{**told["sampling"], "logit_bias": biases}),
        seed=told["seed"],
        prompt_length=told["prompt_length"],
        end_token_ids=tuple(told["end_token_ids"]),
    )


def model_of_row_task(extra_args: Mapping[str, Any]) -> str:
    """Return the fingerprint of the model that a request is for."""
    fingerprint: str = extra_args[FIELD]["model"]
    return fingerprint
