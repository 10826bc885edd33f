"""How many tokens a second the bundled drafter drafts, alone and as a stack: the engine alone.

Run from the repository's root; CPU time of the thread, for a machine that others use. Everybody
drafts in blocks for the target's own texts, as in SI: the next one goes on where the target would.
"""

from __future__ import annotations

import json
import time
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from paceline_bench.cascade.prose import prose_prompts
from paceline_bench.pair.engine import decode
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.stack_backend.stacks import StackOptions, load_stack
from paceline_engine.terms.calls import SessionSpec

if TYPE_CHECKING:
    from paceline_engine.terms.backend import Backend

MODELS = Path("models")
PROMPTS, TOKENS, LOOKAHEADS, ROUNDS = 12, 96, (4, 8, 16), 3
STACKS = {
    "drafter": (),
    "drafter, Max-Gram": ("max-gram",),
    "drafter, tiny, Max-Gram": (str(MODELS / "python-tiny"), "max-gram"),
}
Text = tuple[list[int], list[int]]


def main() -> None:
    """Print a line for each kind of texts and each lookahead."""
    drafters = {name: loaded(then) for name, then in STACKS.items()}
    for kind, texts in target_texts().items():
        for lookahead in LOOKAHEADS:
            ways = {name: [] for name in drafters}
            for _ in range(ROUNDS):
                for name, drafter in drafters.items():
                    ways[name].append(tokens_per_second(drafter, texts, lookahead))
            alone = median(ways["drafter"])
            told = (
                f"{name} {median(it):.0f} ({median(it) / alone:.2f}x)" for name, it in ways.items()
            )
            print(f"{kind}, lookahead {lookahead}: {'; '.join(told)}", flush=True)


def loaded(then: tuple[str, ...]) -> Backend:
    """Load the drafter, with what drafts below it; the matrix is the one that suits its costs."""
    drafter = options("python-drafter")
    return (
        load_stack(drafter, StackOptions(then=then, cascade="auto"))
        if then
        else load_backend(drafter)
    )


def options(name: str) -> LoadOptions:
    """Say where a bundled model is, and how it computes."""
    return LoadOptions(model=str(MODELS / name), dtype="float32", device="cpu", threads=1)


def target_texts() -> dict[str, list[Text]]:
    """Decode held-out prompts of each kind: the prompt, and what the target says."""
    target = load_backend(options("python-target"))
    tokenizer = Tokenizer.from_file(str(MODELS / "python-target" / "tokenizer.json"))
    lines = [json.loads(line) for line in (MODELS / "prompts.jsonl").read_text().splitlines()]
    prose = prose_prompts(list(dict.fromkeys(line["file"] for line in lines)))
    kinds = {"code": [line["text"] for line in lines], "prose": prose}
    ids = {
        kind: [tokenizer.encode(it).ids for it in texts[:PROMPTS]] for kind, texts in kinds.items()
    }
    return {
        kind: [(prompt, list(decode(target, prompt, TOKENS).token_ids)) for prompt in prompts]
        for kind, prompts in ids.items()
    }


def tokens_per_second(drafter: Backend, texts: list[Text], lookahead: int) -> float:
    """Draft for each text to its end; prompts' forwards are left out."""
    drafted, seconds = 0, 0.0
    for prompt, continuation in texts:
        known, end = [*prompt, *continuation], len(prompt)
        text = ModelText(drafter, SessionSpec(reserve_length=len(known) + lookahead))
        text.draft_chain(known[:end], count=1)
        started = time.thread_time()
        while end < len(known):
            block = text.draft_chain(known[:end], count=lookahead)
            drafted += len(block)
            both = zip(block, known[end:], strict=False)
            end += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both)) + 1
        seconds += time.thread_time() - started
    return drafted / seconds


if __name__ == "__main__":
    main()
