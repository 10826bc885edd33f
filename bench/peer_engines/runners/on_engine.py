"""Paceline's engine alone, without services: see measuring.py."""

from __future__ import annotations

import threading
import time
from array import array
from importlib import metadata
from typing import TYPE_CHECKING, Any

from paceline_contract.max_gram import MaxGram
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item
from peer_engines.runners.measuring import Engine, Text, run

if TYPE_CHECKING:
    from collections.abc import Sequence

_LOOKAHEAD = 4


class EngineAlone(Engine):
    """A loaded model."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._backend = load_backend(
            LoadOptions(model=job["model"], threads=job["threads"], **job["load_options"])
        )
        self.version = metadata.version("paceline")

    def decode(self, prompts: Sequence[Sequence[int]], *, count: int, way: str) -> list[Text]:
        """Decode plainly, or one text with Max-Gram as its drafter."""
        if way == "plain":
            return self._together(prompts, count)
        assert way == "si", way
        return [self._speculated(prompt, count) for prompt in prompts]

    def _together(self, prompts: Sequence[Sequence[int]], count: int) -> list[Text]:
        """Continue all texts, one `run` for a step of all of them."""
        since, interrupt = time.perf_counter(), threading.Event()
        texts, pending = [], []
        for prompt in prompts:
            spec = SessionSpec(reserve_length=len(prompt) + count)
            cache = self._backend.new_cache(spec)
            item = Item(cache, spec, prefix=array("I", prompt), task=Draft(count))
            texts.append(Text())
            pending.append((item, texts[-1]))
        while pending:
            outcomes = self._backend.run([item for item, _ in pending], interrupt)
            unfinished = []
            for (item, text), outcome in zip(pending, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    raise outcome
                text.take(outcome.drafted.token_ids, since=since)
                if not item.take(outcome):
                    unfinished.append((item, text))
            pending = unfinished
        return texts

    def _speculated(self, prompt: Sequence[int], count: int) -> Text:
        """Draft from the text and verify, in turn."""
        since, found, max_gram = time.perf_counter(), Text(), MaxGram()
        spec = SessionSpec(reserve_length=len(prompt) + count + _LOOKAHEAD)
        target, text = ModelText(self._backend, spec), array("I", prompt)
        while (missing := count - len(found.token_ids)) > 0:
            # A verification gives one token more than it accepts.
            max_gram.follow(text)
            block = max_gram.propose(min(_LOOKAHEAD, missing - 1))
            judged = target.judge(text, block)
            came = [*block[: len(judged.accepted_path)], judged.next_token]
            text.extend(came)
            found.take(came, since=since)
        return found


if __name__ == "__main__":
    run(EngineAlone)
