"""What the library itself decodes with a model, one text at a time."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from support.families import VOCABULARY_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

# Between the two best logits; rounding moves them by about 1e-5.
LEAST_GAP = 1e-3


@dataclass
class Reference:
    """What the library decodes: prompts, and what follows them."""

    prompts: list[list[int]]
    texts: list[list[int]]


def prompts(lengths: Iterable[int], *, seed: int = 5) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(VOCABULARY_SIZE) for _ in range(length)] for length in lengths]


def texts_of(directory: Path, lengths: Sequence[int], *, count: int) -> Reference:
    """Decode `count` tokens by the library alone, after prompts where rounding decides nothing."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    reference = Reference([], [])
    for length in lengths:
        for seed in itertools.count():
            (prompt,) = prompts([length], seed=seed)
            ids = torch.tensor([prompt])
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            text = found.sequences[0, length:].tolist()
            best = torch.cat(found.logits).topk(2).values
            is_sharp = float((best[:, 0] - best[:, 1]).min()) > LEAST_GAP
            # What repeats itself says little.
            if is_sharp and len(set(text)) > count // 4:
                break
            assert seed < 9, "some texts should do"
        reference.prompts.append(prompt)
        reference.texts.append(text)
    return reference
