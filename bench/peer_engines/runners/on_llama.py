"""llama.cpp in this process, by its C functions: see measuring.py."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from peer_engines.runners.llama_library import open_library
from peer_engines.runners.measuring import Engine, Text, run

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_TOKENS, _MOST_TEXTS = 8192, 16


class Llama(Engine):
    """A model and a context of it, with room for 16 sequences."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.version = job["version"]
        self._ffi, self._lib = open_library(job["libraries"])
        lib = self._lib
        self._model = lib.llama_model_load_from_file(
            job["model"].encode(), lib.llama_model_default_params()
        )
        assert self._model, f"{job['model']} cannot be loaded"
        asked = lib.llama_context_default_params()
        asked.n_ctx, asked.n_seq_max, asked.kv_unified = _MOST_TOKENS, _MOST_TEXTS, True
        asked.n_threads = asked.n_threads_batch = job["threads"]
        self._context = lib.llama_init_from_model(self._model, asked)
        assert self._context, "there is no context"
        # With one cache for all sequences each of them may have all of it.
        room = lib.llama_n_ctx_seq(self._context)
        assert room == _MOST_TOKENS, f"a sequence has room for {room} tokens: other declarations"
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_MOST_TOKENS, 0, 1)
        self._most_rows = int(lib.llama_n_batch(self._context))

    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Compute prompts together, then a row of each text at a time."""
        assert way == "plain", way
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        since, texts = time.perf_counter(), [Text() for _ in prompts]
        waiting = list(range(len(prompts)))
        while waiting:
            batch, room = list[int](), self._most_rows
            while waiting and len(prompts[waiting[0]]) <= room:
                room -= len(prompts[waiting[0]])
                batch.append(waiting.pop(0))
            assert batch, "a prompt is longer than a batch"
            rows = [(token, at, seq) for seq in batch for at, token in enumerate(prompts[seq])]
            lasts = [sum(len(prompts[it]) for it in batch[: n + 1]) - 1 for n in range(len(batch))]
            for seq, token in zip(batch, self._next(rows, lasts), strict=True):
                texts[seq].take([token], since=since)
        for step in range(count - 1):
            rows = [
                (text.token_ids[-1], len(prompt) + step, seq)
                for seq, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
            ]
            for text, token in zip(texts, self._next(rows, range(len(rows))), strict=True):
                text.take([token], since=since)
        return texts

    def _next(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """Compute rows (token, position, sequence); return the likeliest token after some."""
        batch, marked = self._batch, set(wanted)
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = index in marked
        status = self._lib.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status} for {len(rows)} rows"
        return [self._likeliest(index) for index in wanted]

    def _likeliest(self, index: int) -> int:
        scores = self._lib.llama_get_logits_ith(self._context, index)
        return int(np.frombuffer(self._ffi.buffer(scores, 4 * self._vocabulary), "f4").argmax())


if __name__ == "__main__":
    run(Llama)
