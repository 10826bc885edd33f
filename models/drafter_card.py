"""Measure a drafter beside its target in the engine: `python models/drafter_card.py --help`.

The target answers held-out questions and goes on with held-out code, greedily and with a seed. At
each place of these texts the drafter says what it would draft. As long as its tokens are right it
sees the target's own text, so runs of right tokens say how many would be accepted, whatever the
lookahead. The result goes into the card that lies beside the drafter's own weights.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from accepted_runs import MOST_LOOKAHEAD, Runs
from paceline_contract.sampling import SamplingParameters
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.model_files.files import find_model_files
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from text_writers import chat_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline_engine.terms.backend import Backend

_PROMPTS = Path(__file__).resolve().parent / "prompts.jsonl"
_CODE_PROMPTS = 8

# The drafter never saw them: what it learnt from, its target asked itself.
CHATS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "Give me a recipe for pancakes as a list of steps.",
    "Fix the bug in this code:\n```python\ndef mean(xs):\n    return sum(xs) / len(x)\n```",
    "Write a JSON object that describes a book with title, author and year.",
    "What are three ways to save water at home?",
    "Write a short email that asks a colleague to move a meeting to Friday.",
    "How does a bicycle stay upright?",
    "Write a SQL query that counts the orders of each customer.",
    "Tell me a short story about a fox and a river.",
    "What is the difference between a list and a tuple in Python?",
)
SAMPLINGS = {
    "greedy": SamplingParameters(),
    "T = 0.7": SamplingParameters(temperature=0.7, top_p=0.95),
    "T = 1": SamplingParameters(temperature=1.0),
}


def measure(
    target: Backend,
    drafter: Backend,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    sampling: SamplingParameters,
) -> dict[str, Any]:
    """Compare what a drafter drafts with what its target chooses, under EXACT.

    Args:
        tokens: The most of each text.
        sampling: How the target chooses; the seed is the prompt's place.
    """
    runs: list[Runs] = []
    target_seconds: list[float] = []
    draft_seconds: list[float] = []
    ends = {*target.description.eos_token_ids}
    for seed, prompt in enumerate(prompts):
        spec = SessionSpec(len(prompt) + tokens + 1, sampling, seed=seed)
        deciding, drafting = ModelText(target, spec), ModelText(drafter, spec)
        text = array("I", prompt)
        hits: list[bool] = []
        while len(hits) < tokens and not (hits and text[-1] in ends):
            started = time.thread_time()
            chosen = deciding.judge(text).next_token
            between = time.thread_time()
            (guess,) = drafting.draft(text).token_ids
            draft_seconds.append(time.thread_time() - between)
            target_seconds.append(between - started)
            hits.append(guess == chosen)
            text.append(chosen)
        runs.append(Runs.of(torch.tensor(hits), torch.ones(len(hits), dtype=torch.bool)))
    every = Runs.together(runs)
    accepted = every.accepted(MOST_LOOKAHEAD)
    return {
        "tokens": len(every.lengths),
        "acceptance": accepted[0],
        "accepted": accepted,
        "by_place": every.by_place(MOST_LOOKAHEAD),
        "target_ms": median(target_seconds) * 1e3,
        "draft_ms": median(draft_seconds) * 1e3,
    }


def read_prompts(target: str) -> dict[str, list[list[int]]]:
    """Return held-out prompts by kind, as tokens of a target."""
    tokenizer = chat_tokenizer(find_model_files(target))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def chat(text: str) -> str:
        message = [{"role": "user", "content": text}]
        written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        assert isinstance(written, str)
        return written

    lines = [json.loads(line)["text"] for line in _PROMPTS.read_text().splitlines()]
    code = lines[:: max(1, len(lines) // _CODE_PROMPTS)][:_CODE_PROMPTS]
    return {
        "chats": [encode(chat(text)) for text in CHATS],
        "code": [encode(text) for text in code],
    }


def render(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Render what was measured as a Markdown table."""
    titles = ["", "tokens", "accepted", *(f"of {each}" for each in range(1, MOST_LOOKAHEAD + 1))]
    titles += ["right at places 1 to 5", "target, ms", "draft, ms"]
    lines = [titles, ["---"] * len(titles)]
    for name, row in rows.items():
        lengths = [f"{each:.2f}" for each in row["accepted"]]
        places = " ".join(f"{each:.2f}" for each in row["by_place"])
        times = [f"{row[key]:.1f}" for key in ("target_ms", "draft_ms")]
        lines.append(
            [name, str(row["tokens"]), f"{row['acceptance']:.3f}", *lengths, places, *times]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it into the card if there is one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="as a server's --model")
    parser.add_argument("--drafter", required=True, help="the drafter's folder, laid out")
    parser.add_argument("--tokens", type=int, default=64, help="the most of each text")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--card", type=Path, help="the card.json that takes the result")
    options = parser.parse_args(arguments)
    how = {"dtype": options.dtype, "threads": options.threads}
    target = load_backend(LoadOptions(model=options.target, **how))
    drafter = load_backend(LoadOptions(model=options.drafter, **how))
    rows = {}
    for kind, prompts in read_prompts(options.target).items():
        for name, sampling in SAMPLINGS.items():
            rows[f"{kind}, {name}"] = row = measure(
                target, drafter, prompts, tokens=options.tokens, sampling=sampling
            )
            print(f"{kind}, {name}: {row['acceptance']:.3f}", flush=True)
    print(render(rows))
    if options.card is not None:
        card = json.loads(options.card.read_text())
        options.card.write_text(json.dumps({**card, "measured": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
