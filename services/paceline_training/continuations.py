"""A model's own continuations: guesses are measured on them, and may be trained on them.

Letters: B texts, T tokens each, P of them the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Continuations:
    """Texts that a model went on with by itself, greedily.

    Attributes:
        token_ids: (B, T) prompts and continuations.
        prompt_length: Tokens of each prompt.
    """

    token_ids: Tensor
    prompt_length: int


@torch.no_grad()
def continue_greedily(model: Any, prompts: Tensor, *, length: int) -> Continuations:
    """Let a model continue prompts, (B, P), by so many tokens, also after an end token."""
    generated: Tensor = model.generate(
        prompts.to(model.device),
        attention_mask=torch.ones_like(prompts).to(model.device),
        do_sample=False,
        min_new_tokens=length,
        max_new_tokens=length,
        eos_token_id=None,
    )
    return Continuations(generated, prompts.shape[1])


def spread_prompts(stream: Tensor, *, count: int, length: int) -> Tensor:
    """Cut prompts from a text, evenly: (count, length) from (N,), which may overlap."""
    starts = torch.linspace(0, len(stream) - length - 1, count).long()
    return torch.stack([stream[start : start + length] for start in starts.tolist()])


def continue_text(
    model: Any,
    stream: Tensor,
    *,
    count: int,
    prompt_length: int,
    length: int,
    at_once: int,
    tell: Callable[[int], None],
) -> Tensor:
    """Make a model's own text, from prompts that are cut from another text.

    Greedy text repeats itself as no training text does, and it is what guesses are about: what is
    learnt there is worth more than the same number of other tokens.

    Args:
        model: Continues the prompts, greedily.
        stream: (N,) the text that prompts are cut from.
        count: The number of prompts.
        prompt_length: Tokens of each prompt.
        length: Tokens of each continuation.
        at_once: Prompts in one forward.
        tell: Called with the number of prompts that are done.

    Returns:
        (count * (prompt_length + length),) prompts and continuations, one after the other.
    """
    made = []
    all_prompts = spread_prompts(stream, count=count, length=prompt_length)
    for prompts in torch.split(all_prompts, at_once):
        made.append(continue_greedily(model, prompts, length=length).token_ids.flatten().cpu())
        tell(min(len(made) * at_once, count))
    return torch.cat(made)
