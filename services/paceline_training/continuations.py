"""What a model says by itself: what guesses are measured on, and may be trained on.

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
    """Have a model go on with prompts, (B, P), by so many tokens, whatever ends a text."""
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
    """Make text of a model's own from the beginnings that another text gives it.

    Greedy text repeats itself as no training text does, and it is what guesses are about: what is
    learnt there is worth more than the same number of other tokens.

    Args:
        model: Goes on with prompts, greedily.
        stream: (N,) where prompts are from.
        count: Of prompts.
        prompt_length: Tokens of each.
        length: Tokens to go on by.
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
