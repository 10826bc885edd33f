"""Measure the models in this folder; write `card.json` and the tables of the model card.

Run it as `python models/evaluate.py`. It uses one thread, like a served model of this size.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from card import CARD, render_tables, write_tables
from corpus import load_corpus
from growth import CONTEXT
from prompts import PROMPTS_FILE, load_prompts
from python_text import distinct_share, tokenize_error
from recipe import DRAFTER_FOLDER, TARGET_FOLDER, TINY_FOLDER, TRAINING_LOG
from vocabulary import END_OF_TEXT_ID, token_stream

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from corpus import SourceFile

_NEW_TOKENS = 128
_COMPLETIONS = 100
_BATCH = 25
_TEMPERATURES = (0.0, 0.7, 0.8, 1.0)
_ROWS = (1, 2, 4, 8, 16)
_LATENCY_CONTEXT = 200
_LATENCY_REPEATS = 40
_SEED = 5


@dataclass(frozen=True)
class Family:
    """The models by their role, in float32, and their common tokenizer."""

    target: LlamaForCausalLM
    drafters: Mapping[str, LlamaForCausalLM]
    tokenizer: PreTrainedTokenizerBase

    @property
    def models(self) -> Mapping[str, LlamaForCausalLM]:
        """The target and its drafters."""
        return {"target": self.target, **self.drafters}


@dataclass(frozen=True)
class SharedNoise:
    """Sampling as an argmax: of logits / T + Gumbel noise, or of the logits where T is 0.

    The noise belongs to (seed, batch row, position), so a drafter and a target that see the same
    row at the same position share it, and agree more often than two independent draws would.
    """

    temperature: float
    seed: int

    def choose(self, logits: torch.Tensor, *, step: int) -> torch.Tensor:
        """Return (B,) token ids for (B, V) logits at a step, counted from the first new token."""
        if self.temperature == 0:
            return logits.argmax(-1)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-20)
        return (logits / self.temperature - (-uniform.log()).log()).argmax(-1)


def load_family(folder: Path) -> Family:
    """Load the models as they are meant to be served: stored in 16 bits, computed in 32."""
    target, drafter, tiny = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for name in (TARGET_FOLDER, DRAFTER_FOLDER, TINY_FOLDER)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / TARGET_FOLDER, padding_side="left")
    return Family(target, {"drafter": drafter, "tiny": tiny}, tokenizer)


@torch.inference_mode()
def measure(folder: Path) -> dict[str, Any]:
    """Measure everything that the model card reports.

    Cost:
        About ten minutes of one core.
    """
    family = load_family(folder)
    prompts = [prompt.text for prompt in load_prompts(folder / PROMPTS_FILE)][:_COMPLETIONS]
    print("latency", flush=True)
    latency = _latency(family)
    print("held-out text", flush=True)
    held_out = real_text(family, load_corpus().held_out)
    sampled = []
    for temperature in _TEMPERATURES:
        print(f"{len(prompts)} completions at temperature {temperature}", flush=True)
        sampled.append(completions(family, prompts, temperature=temperature))
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "parameters": {name: model.num_parameters() for name, model in family.models.items()},
        "context": CONTEXT,
        "real_text": held_out,
        "completions": sampled,
        "latency": latency,
        "training": json.loads((folder / TRAINING_LOG).read_text()),
    }


def real_text(family: Family, files: Sequence[SourceFile]) -> dict[str, Any]:
    """Measure the models on every full window of files."""
    stream = token_stream(files, tokenizer=family.tokenizer)
    text_bytes = sum(len(file.text.encode()) for file in files)
    tokens_per_byte = (len(stream) - len(files)) / text_bytes
    samples: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    starts = range(0, len(stream) - CONTEXT, CONTEXT)
    for start in starts:
        window = stream[start : start + CONTEXT + 1]
        log_probs = {
            name: model(window[None, :-1]).logits[0].log_softmax(-1)
            for name, model in family.models.items()
        }
        target = log_probs["target"]
        for name, own in log_probs.items():
            samples["loss"][name].append(float(-own.gather(1, window[1:, None]).mean()))
            same = target.argmax(-1) == own.argmax(-1)
            samples["greedy_agreement"][name].append(float(same.float().mean()))
            overlap = torch.minimum(target.exp(), own.exp()).sum(-1).mean()
            samples["rejection_acceptance"][name].append(float(overlap))
    means = {
        measure: {name: statistics.fmean(values) for name, values in by_name.items()}
        for measure, by_name in samples.items()
    }
    pieces = [
        stream[start : start + _NEW_TOKENS].tolist()
        for start in range(0, len(stream) - _NEW_TOKENS, _NEW_TOKENS)
    ]
    return {
        "tokens": len(starts) * CONTEXT,
        "bytes_per_token": 1 / tokens_per_byte,
        "distinct_4_grams": statistics.fmean(distinct_share(piece, size=4) for piece in pieces),
        "bits_per_byte": {
            name: loss * tokens_per_byte / math.log(2) for name, loss in means["loss"].items()
        },
        **means,
    }


def completions(family: Family, prompts: Sequence[str], *, temperature: float) -> dict[str, Any]:
    """Complete prompts with the target, and ask its drafters at each position of the result."""
    accepted: dict[str, list[bool]] = {name: [] for name in family.drafters}
    distinct: list[float] = []
    strictly: list[bool] = []
    if_continued: list[bool] = []
    for index in range(0, len(prompts), _BATCH):
        texts = list(prompts[index : index + _BATCH])
        encoded = family.tokenizer(texts, return_tensors="pt", padding=True)
        prompt_ids, prompt_mask = encoded["input_ids"], encoded["attention_mask"]
        noise = SharedNoise(temperature=temperature, seed=_SEED + index)
        completed = _complete(family.target, prompt_ids, prompt_mask, noise=noise)
        counts = [_length(row) for row in completed.tolist()]
        for name, model in family.drafters.items():
            drafted = _drafted(model, prompt_ids, prompt_mask, completed, noise=noise)
            for row, count in zip((drafted == completed).tolist(), counts, strict=True):
                accepted[name] += row[:count]
        for prompt, row, count in zip(texts, completed.tolist(), counts, strict=True):
            distinct.append(distinct_share(row[:count], size=4))
            completion = family.tokenizer.decode(row[:count], skip_special_tokens=True)
            text = f"{prompt}{completion}"
            strictly.append(tokenize_error(text, excuse_unfinished=False) is None)
            if_continued.append(tokenize_error(text, excuse_unfinished=True) is None)
    return {
        "temperature": temperature,
        "count": len(prompts),
        "new_tokens": len(accepted["drafter"]),
        "acceptance": {name: statistics.fmean(values) for name, values in accepted.items()},
        "distinct_4_grams": statistics.fmean(distinct),
        "tokenizable": statistics.fmean(strictly),
        "tokenizable_if_continued": statistics.fmean(if_continued),
    }


def _length(row: Sequence[int]) -> int:
    """Return how many tokens of a completion count: those up to the end of text, inclusive."""
    return row.index(END_OF_TEXT_ID) + 1 if END_OF_TEXT_ID in row else len(row)


def _complete(
    target: LlamaForCausalLM,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    *,
    noise: SharedNoise,
) -> torch.Tensor:
    """Complete a left-padded batch.

    Returns:
        (B, 128) int64; what follows `<|endoftext|>` in a row has no meaning.
    """
    cache = DynamicCache()
    ids, mask = prompt_ids, prompt_mask
    chosen: list[torch.Tensor] = []
    for step in range(_NEW_TOKENS):
        positions = _positions(mask)[:, -ids.size(1) :]
        logits = target(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits
        chosen.append(noise.choose(logits[:, -1], step=step))
        ids = chosen[-1][:, None]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
    return torch.stack(chosen, dim=1)


def _drafted(
    drafter: LlamaForCausalLM,
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    completed: torch.Tensor,
    *,
    noise: SharedNoise,
) -> torch.Tensor:
    """Return the (B, 128) tokens that the drafter chooses, each after the target's own text."""
    ids = torch.cat([prompt_ids, completed], dim=1)
    mask = torch.cat([prompt_mask, torch.ones_like(completed)], dim=1)
    logits = drafter(ids, attention_mask=mask, position_ids=_positions(mask)).logits
    before = logits[:, prompt_ids.size(1) - 1 : -1]
    choices = [noise.choose(before[:, step], step=step) for step in range(completed.size(1))]
    return torch.stack(choices, dim=1)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


def _latency(family: Family) -> dict[str, Any]:
    """Time forwards of 1 to 16 rows after 200 cached tokens, the models in turn."""
    samples: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(_LATENCY_REPEATS):
        for name, model in family.models.items():
            cache = DynamicCache()
            model(torch.full((1, _LATENCY_CONTEXT), 300), past_key_values=cache)
            for rows in _ROWS:
                started = time.perf_counter()
                model(torch.full((1, rows), 301), past_key_values=cache)
                samples[name][rows].append((time.perf_counter() - started) * 1e3)
                cache.crop(-rows)
    median_ms = {
        name: {str(rows): statistics.median(values) for rows, values in by_rows.items()}
        for name, by_rows in samples.items()
    }
    return {
        "median_ms": median_ms,
        "fastest_ms": {
            name: {str(rows): min(values) for rows, values in by_rows.items()}
            for name, by_rows in samples.items()
        },
        "ratio": {name: median_ms["target"]["1"] / median_ms[name]["1"] for name in median_ms},
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Measure, and write `card.json` and the tables beside this file."""
    torch.set_num_threads(1)
    folder = Path(__file__).resolve().parent
    card = measure(folder)
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    write_tables(folder, card)
    print(render_tables(card))


if __name__ == "__main__":
    main()
