"""vLLM's build for CPUs, in this process: see measuring.py."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from peer_engines.runners.measuring import Engine, Text, run

if TYPE_CHECKING:
    from collections.abc import Sequence


class Vllm(Engine):
    """An engine, stepped here."""

    def __init__(self, job: dict[str, Any]) -> None:
        cores = sorted(job["cores"])[: job["threads"]]
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        import vllm

        self._params, self._count = vllm.SamplingParams, 0
        self._engine = vllm.LLM(
            job["model"],
            dtype=job["format"],
            max_model_len=2048,
            max_num_seqs=16,
            block_size=32,
            enable_prefix_caching=False,
        ).llm_engine
        self.version = vllm.__version__

    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Add all requests, then step until none is left."""
        assert way == "plain", way
        since, texts = time.perf_counter(), dict[str, Text]()
        for prompt in prompts:
            name = str(self._count)
            asked = self._params(temperature=0.0, max_tokens=count, ignore_eos=True)
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, asked)
            texts[name] = Text()
            self._count += 1
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                text = texts[output.request_id]
                text.take(output.outputs[0].token_ids[len(text.token_ids) :], since=since)
        return [*texts.values()]


if __name__ == "__main__":
    run(Vllm)
