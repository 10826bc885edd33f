"""OpenVINO GenAI with continuous batching: see measuring.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino
import openvino_genai

from peer_engines.runners.measuring import Engine, Text, run

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOKAHEAD, _NGRAM = 4, 3


class OpenVino(Engine):
    """A pipeline for each way, of the same files."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._asked, self._count = job, 0
        self._pipelines = {way: self._pipeline(way) for way in job["ways"]}
        self.version = openvino_genai.__version__

    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Add all requests, then step until none is left."""
        pipeline, since = self._pipelines[way], time.perf_counter()
        pending = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handle = pipeline.add_request(self._count, ids, _greedy(count, way))
            pending.append((handle, Text()))
            self._count += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for handle, text in pending:
                while handle.can_read():
                    for found in handle.read().values():
                        text.take(found.generated_ids, since=since)
        return [text for _, text in pending]

    def _pipeline(self, way: str) -> Any:
        asked = openvino_genai.SchedulerConfig()
        asked.cache_size, asked.enable_prefix_caching = 1, False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": self._asked["threads"]}
        if self._asked["precision"]:
            properties["INFERENCE_PRECISION_HINT"] = self._asked["precision"]
        if way == "lookup":
            properties["prompt_lookup"] = True
        return openvino_genai.ContinuousBatchingPipeline(
            self._asked["model"], scheduler_config=asked, device="CPU", properties=properties
        )


def _greedy(count: int, way: str) -> Any:
    asked = openvino_genai.GenerationConfig()
    asked.max_new_tokens, asked.ignore_eos = count, True
    asked.do_sample = asked.apply_chat_template = False
    if way == "lookup":
        asked.num_assistant_tokens, asked.max_ngram_size = _LOOKAHEAD, _NGRAM
    return asked


if __name__ == "__main__":
    run(OpenVino)
