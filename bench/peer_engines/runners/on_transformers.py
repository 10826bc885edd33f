"""`generate` of transformers, in Paceline's environment: see measuring.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from peer_engines.runners.measuring import Engine, Text, run

if TYPE_CHECKING:
    from collections.abc import Sequence

_PADDING = 0


class Library(Engine):
    """A model in the library's class."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        library: Any = transformers.AutoModelForCausalLM
        self._model = library.from_pretrained(job["model"], dtype=job["format"]).eval()
        # As many tokens as are asked for, as from everybody.
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = _PADDING
        self.version = transformers.__version__

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Decode one batch; shorter prompts are filled up on the left."""
        assert way == "plain", way
        watch, longest = _Watch(), max(map(len, prompts))
        missing = [longest - len(prompt) for prompt in prompts]
        ids = [[_PADDING] * gap + list(it) for gap, it in zip(missing, prompts, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in missing]
        output = self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            max_new_tokens=count,
            do_sample=False,
            streamer=watch,
        )
        arrivals = [(at, 1) for at in watch.seconds[1:]]
        return [Text(row[longest:], arrivals) for row in output.tolist()]


class _Watch(BaseStreamer):
    """Is told of the prompts, and then of each step."""

    def __init__(self) -> None:
        self._since, self.seconds = time.perf_counter(), list[float]()

    def put(self, _value: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter() - self._since)

    def end(self) -> None:
        pass


if __name__ == "__main__":
    run(Library)
