"""Trees of many sizes and shapes, with and without pruning: which is the best on this machine.

In one process and one text at a time, with nothing around the model: what a forward gives and takes
is the model's. A text's first forward, the prompt's, is left out of all numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from paceline_engine.model_files.files import find_model_files
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.rank_paths import cartesian_tree, likeliest_tree
from paceline_engine.torch_backend.adapters.eagle import EagleHead
from paceline_engine.torch_backend.own_guesses import OwnGuesses
from paceline_engine.torch_backend.self_drafting import SelfDrafter, load_for
from paceline_engine.torch_backend.transformers import TransformersBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from paceline_bench.report import Row
    from paceline_engine.terms.rank_paths import RankPath
    from paceline_engine.torch_backend.adapters.card import AdapterCard

_MOST_NODES = 128
_MOST_RESERVED = 256
"""Tokens of a text beyond what is asked for: the last tree's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What to try.

    Attributes:
        widths: Of the trees of all combinations (k), at each reach (gamma).
        sizes: Of the trees of the likeliest guesses.
        thresholds: Below which the early exit prunes; 0: nothing is pruned.
        max_tokens: Of each text.
    """

    widths: tuple[int, ...]
    sizes: tuple[int, ...]
    thresholds: tuple[float, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class SweptTree:
    """A tree of guesses, and of which kind it is: "k = 2", or "likeliest"."""

    kind: str
    reach: int
    paths: tuple[RankPath, ...]


@dataclass(slots=True)
class Case:
    """A variant of decoding, and what it took so far; without guesses it is plain decoding.

    Attributes:
        adapter: What it is called.
        tree: What is proposed.
        prune_below: See SelfDrafter.
        own_guesses: What proposes and prunes.
        layers: Of the model that have streams.
        texts: What was decoded.
        tokens, forwards, rows, dropped, seconds: Of all texts, without their first forwards.
    """

    adapter: str = ""
    tree: SweptTree = SweptTree("plain", 0, ())
    prune_below: float = 0.0
    own_guesses: OwnGuesses | None = None
    layers: int = 0
    texts: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    forwards: int = 0
    rows: int = 0
    dropped: int = 0
    seconds: float = 0.0

    def decode(self, backend: TransformersBackend, prompt: Sequence[int], *, count: int) -> None:
        """Decode a text, greedily, and add what it took."""
        backend.own_guesses = self.own_guesses
        text = ModelText(backend, SessionSpec(len(prompt) + count + _MOST_RESERVED))
        forwards = text.decode(prompt, guesses=self.own_guesses is not None)
        made, _ = next(forwards)
        started = time.perf_counter()
        while len(made) < count:
            decided, _ = next(forwards)
            made += decided
            self.forwards += 1
            self.rows += text.row_count
            self.dropped += text.dropped_count
        self.seconds += time.perf_counter() - started
        self.tokens += len(made) - 1
        self.texts.append(made[:count])

    def row(self, plain: Case) -> Row:
        """Sum up, beside plain decoding of the same texts."""
        speed, plain_speed = self.tokens / self.seconds, plain.tokens / plain.seconds
        return {
            "adapter": self.adapter,
            "layers": self.layers,
            "kind": self.tree.kind,
            "reach": self.tree.reach,
            "nodes": len(self.tree.paths),
            "prune_below": self.prune_below,
            "tokens_per_forward": self.tokens / self.forwards,
            "rows_per_forward": self.rows / self.forwards,
            "upper_rows_per_forward": (self.rows - self.dropped) / self.forwards,
            "tokens_per_second": speed,
            "times_as_fast": speed / plain_speed,
            "identical": self.texts == plain.texts,
        }


def sweep(
    model: Path,
    adapters: Mapping[str, Path],
    prompts: Sequence[str],
    *,
    plan: SweepPlan,
    tell: Callable[[str], None],
) -> list[Row]:
    """Decode each prompt in every variant, in turn; return a row for each, plain decoding's first.

    Raises:
        ModelLoadError: the model or an adapter cannot be loaded.
    """
    backend = TransformersBackend(str(model))
    cases = [Case(), *_cases(backend, model, adapters, plan=plan)]
    assert backend.tokenizer is not None, "a bundled model has one"
    tokenizer = Tokenizer.from_buffer(backend.tokenizer)
    Case().decode(backend, tokenizer.encode(prompts[0]).ids, count=plan.max_tokens)  # warms up
    for turn, prompt in enumerate(prompts):
        token_ids = tokenizer.encode(prompt).ids
        # Whoever comes first with a text comes last with the next.
        for case in cases[:: 1 if turn % 2 else -1]:
            case.decode(backend, token_ids, count=plan.max_tokens)
        tell(f"{len(cases)} variants")
    return [case.row(cases[0]) for case in cases]


def trees_of(card: AdapterCard, plan: SweepPlan) -> Iterator[SweptTree]:
    """Yield the trees to try with an adapter: all combinations, and the likeliest guesses."""
    for width in plan.widths:
        for reach in range(1, card.reach + 1):
            paths = cartesian_tree((width,) * reach)
            if len(paths) <= _MOST_NODES:
                yield SweptTree(f"k = {width}", reach, paths)
    for size in plan.sizes:
        paths = likeliest_tree(card.training["hit_rates"], node_count=size)
        yield SweptTree("likeliest", max(map(len, paths)), paths)


def _cases(
    backend: TransformersBackend, model: Path, adapters: Mapping[str, Path], *, plan: SweepPlan
) -> Iterator[Case]:
    files = find_model_files(str(model), revision=None)
    size = backend.description.vocabulary_size
    for name, directory in adapters.items():
        loaded = load_for(files, backend.model, directory)
        if isinstance(loaded.module, EagleHead):
            raise ModelLoadError(f"adapter {name}: an EAGLE head is measured without --sweep")
        for tree in trees_of(loaded.card, plan):
            like = replace(loaded, card=replace(loaded.card, tree=tree.paths))
            for threshold in plan.thresholds:
                drafter = SelfDrafter(
                    like,
                    backend.model,
                    takes_trees=True,
                    prune_below=threshold,
                    goes_along=True,
                )
                if drafter.prunes or not threshold:
                    own = OwnGuesses(drafter, vocabulary_size=size)
                    yield Case(
                        name,
                        tree,
                        prune_below=threshold,
                        own_guesses=own,
                        layers=loaded.card.layers,
                    )
