"""The proof at load that vLLM computes a row alike, whatever else a step computes."""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING

from paceline_contract.proposal import Proposal
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Decode, Item, Judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_contract.calls import LikeliestTokens
    from paceline_engine.vllm_backend.backend import VllmBackend

_LENGTH = 72
"""Longer than two blocks of vLLM's cache on a CPU, and four on a GPU."""
_TOLD = 20
"""The log probabilities of a row that are compared: all that one row can be asked for."""


def check_invariance(backend: VllmBackend) -> None:
    """Check that a text has the same log probabilities whole, by tokens, and beside others.

    Raises:
        ModelLoadError: they have not.
    """
    what = backend.description
    length = min(_LENGTH, what.vocabulary_size, what.context_length - 1)
    texts = [
        [(7919 * place + 31 * (place // 5) + n) % what.vocabulary_size for place in range(length)]
        for n in (1, 2, 3)
    ]
    whole = [_whole(backend, text) for text in texts]
    alone = [_by_steps(backend, [text])[0] for text in texts]
    if not whole == alone == _by_steps(backend, texts):
        raise ModelLoadError(
            f"model {what.name!r} cannot be served with --invariant: what vLLM computes for a text"
            " depends here on how the text comes, or on what else comes with it"
        )


def _whole(backend: VllmBackend, text: Sequence[int]) -> list[LikeliestTokens]:
    """Score a text in one prompt."""
    task = Judge(Proposal(tuple(text[1:])), score=True, top_logprobs=_TOLD)
    (told,) = _run(backend, [_item(backend, text[:1], task)])
    return told


def _by_steps(backend: VllmBackend, texts: Sequence[Sequence[int]]) -> list[list[LikeliestTokens]]:
    """Score the rows of texts side by side, each text a token further in each step."""
    specs = SessionSpec(_LENGTH + 1)
    caches = [backend.new_cache(specs) for _ in texts]
    found: list[list[LikeliestTokens]] = [[] for _ in texts]
    for length in range(1, len(texts[0])):
        items = [
            Item(
                cache,
                specs,
                prefix=array("I", text[:length]),
                task=Decode(1, top_logprobs=_TOLD),
            )
            for cache, text in zip(caches, texts, strict=True)
        ]
        for own, told in zip(found, _run(backend, items), strict=True):
            own += told
    return found


def _item(backend: VllmBackend, prefix: Sequence[int], task: Judge) -> Item:
    spec = SessionSpec(_LENGTH + 1)
    return Item(backend.new_cache(spec), spec, prefix=array("I", prefix), task=task)


def _run(backend: VllmBackend, items: Sequence[Item]) -> list[list[LikeliestTokens]]:
    """Run items to their verdicts, and return what these tell of each row."""
    never = threading.Event()
    told: dict[int, list[LikeliestTokens]] = {}
    while left := [item for item in items if id(item) not in told]:
        for item, outcome in zip(left, backend.run(left, never), strict=True):
            if isinstance(outcome, Exception):
                raise ModelLoadError(f"the proof of --invariant failed: {outcome}") from outcome
            if outcome.judgement is not None:
                told[id(item)] = [*outcome.judgement.top_logprobs]
    return [told[id(item)] for item in items]
