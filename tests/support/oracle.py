"""The oracle: plain autoregressive decoding by transformers; nothing of ours but the noise."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from paceline_engine.deciding.noise import Purpose, pair_bits


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Oracle:
    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.size = Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], sampling: Sampling, length: int) -> Iterator[int]:
        tokens, cache = list(prompt), None
        for position in range(len(prompt), len(prompt) + length):
            step = self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            tokens = [int(scores(step.logits[0, -1, : self.size], sampling, position).argmax())]
            yield tokens[0]

    def gap(self, prefix: Sequence[int], sampling: Sampling, choices: tuple[int, int]) -> float:
        logits = self.model(torch.tensor([list(prefix)])).logits[0, -1, : self.size]
        found = scores(logits, sampling, len(prefix))
        return abs(float(found[choices[0]] - found[choices[1]]))


def scores(logits: torch.Tensor, sampling: Sampling, position: int) -> torch.Tensor:
    if sampling.temperature == 0:
        return logits
    scaled, order = torch.sort(logits.double() / sampling.temperature, descending=True, stable=True)
    scaled[1:][scaled.softmax(0).cumsum(0)[:-1] >= sampling.top_p] = -torch.inf
    counter = torch.arange(len(logits) // 2), *map(torch.tensor, (position, 0, Purpose.EXACT))
    uniform = torch.stack(pair_bits(sampling.seed, counter), dim=-1).flatten().double() * 2.0**-53
    return torch.empty_like(scaled).index_copy(0, order, scaled) - (-uniform.log()).log()
