"""Measure a head of a target in the engine: `python models/head_card.py --help`.

The target answers the held-out questions and goes on with the held-out code of `drafter_card.py`,
greedily. Its head guesses in chains of its reach, and in trees by confidence. Each text is compared
with plain decoding. What does not depend on the machine can go into the head's card.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter_card import read_prompts
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.adapters.card import AdapterCard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_engine.terms.backend import Backend


@dataclass(slots=True)
class Decoded:
    """What it took to decode some texts.

    Attributes:
        tokens: All of them.
        forwards: The target's.
        accepted: How many verdicts accepted at least so many guesses, by this number, from 1 on.
        seconds: CPU time of this thread.
    """

    tokens: int
    forwards: int
    accepted: Counter[int]
    seconds: float

    def shares(self) -> dict[str, Any]:
        """Return what does not depend on the machine."""
        return {
            "tokens": self.tokens,
            "tokens_per_forward": round(self.tokens / self.forwards, 3),
            "accepted_at_least": [
                round(self.accepted[least] / self.forwards, 3) for least in sorted(self.accepted)
            ],
        }

    def times(self, *, plain: Decoded) -> dict[str, float]:
        """Return the CPU time of a token, and how many times as fast as plain decoding it is."""
        token, plain_token = self.seconds / self.tokens, plain.seconds / plain.tokens
        return {
            "ms_per_token": round(1e3 * token, 2),
            "over_plain": round(plain_token / token, 3),
        }


def decode(
    target: Backend, prompts: Sequence[Sequence[int]], *, tokens: int, guesses: bool
) -> tuple[list[list[int]], Decoded]:
    """Decode texts greedily, with the head's guesses or without.

    Args:
        tokens: The most of each text; one ends where the target ends it.
        guesses: Whether the head guesses.
    """
    ends = {*target.description.eos_token_ids}
    total = Decoded(0, 0, Counter(), 0.0)
    texts = []
    for prompt in prompts:
        # Trees are judged beside the text, so there is room for more than it has.
        text = ModelText(target, SessionSpec(len(prompt) + tokens + 64))
        forwards = text.decode(prompt, guesses=guesses)
        found, _ = next(forwards)  # reads the prompt, and is not measured
        started = time.thread_time()
        while len(found) < tokens and found[-1] not in ends:
            decided, _ = next(forwards)
            stop = next((n for n, each in enumerate(decided, 1) if each in ends), len(decided))
            found += decided[:stop]
            total.accepted.update(range(1, len(decided)))
            total.forwards += 1
        total.seconds += time.thread_time() - started
        total.tokens += min(len(found), tokens) - 1
        texts.append(found[:tokens])
    return texts, total


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line for each, and write the card; return 1 if a text is another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="as a server's --model")
    parser.add_argument("--head", type=Path, required=True, help="the head's folder")
    parser.add_argument("--tokens", type=int, default=64, help="the most of each text")
    parser.add_argument("--prompts", type=int, default=12, help="the most of each kind")
    parser.add_argument("--guesses", type=int, nargs="+", default=[16], help="of a tree")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", default="plain", choices=("plain", "int8"))
    parser.add_argument("--device", default="cpu", help="times are of a CPU's thread alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="the result into the head's card")
    options = parser.parse_args(arguments)
    how = LoadOptions(
        model=options.target,
        dtype=options.dtype,
        weights=options.weights,
        device=options.device,
        threads=options.threads,
        adapter=str(options.head),
    )
    prompts = read_prompts(options.target)
    rows: dict[str, Any] = {}
    plain: dict[str, tuple[list[list[int]], Decoded]] = {}
    differing = 0
    for guesses in (None, *options.guesses):
        target = load_backend(replace(how, guesses=guesses))
        name = "chain" if guesses is None else f"tree of {guesses}"
        for kind, texts in prompts.items():
            some = texts[: options.prompts]
            if kind not in plain:
                plain[kind] = decode(target, some, tokens=options.tokens, guesses=False)
            wanted, baseline = plain[kind]
            found, decoded = decode(target, some, tokens=options.tokens, guesses=True)
            differing += found != wanted
            rows[f"{kind}, {name}"] = row = decoded.shares()
            print(f"{kind}, {name}: {json.dumps(row | decoded.times(plain=baseline))}", flush=True)
    print("all texts identical" if not differing else "TEXTS DIFFER")
    if options.write and not differing:
        card = AdapterCard.read(options.head)
        settings = {key: getattr(options, key) for key in ("tokens", "prompts", "dtype", "weights")}
        measured = {"settings": settings, **rows}
        replace(card, training={**card.training, "measured": measured}).write(options.head)
    return int(differing > 0)


if __name__ == "__main__":
    raise SystemExit(main())
