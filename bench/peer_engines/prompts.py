"""What everybody continues: chats by the model's template, and pieces of a text, as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List ten animals that live in the sea, each with one sentence about it.",
    "Explain to a child why the sky is blue.",
    """This function should add up a list but returns 0. Correct it, and give all of it again:

def total(values):
    result = 0
    for value in values:
        result = value - value
    return result""",
    """Turn this into JSON with the keys name, age and city, one object for each person:
Anna is 31 and lives in Berlin. Tom is 25 and lives in Paris. Mia is 40 and lives in Rome.""",
    """Summarise in two sentences:
The library opened in 1902 and was enlarged twice, in 1931 and in 1968. It holds four million
books, of which half can be borrowed. Since 2015 visitors can order books from other towns.""",
    "Write a short letter to a neighbour who plays music too loudly at night.",
)
_MOST_STREAMS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured in each turn.

    Attributes:
        chats: So many of the questions.
        tokens: Of each text.
        first_token: Lengths of the prompts whose first tokens are timed, each twice.
        streams: Numbers of texts at once.
        stream_tokens: Tokens of each of them.
    """

    chats: int = len(QUESTIONS)
    tokens: int = 64
    first_token: Sequence[int] = (200, 1000)
    streams: Sequence[int] = (4, _MOST_STREAMS)
    stream_tokens: int = 32


QUICK = Plan(chats=2, tokens=16, first_token=(50,), streams=(4,), stream_tokens=8)


def prompts_for(plan: Plan, gguf: Path, text: str) -> dict[str, object]:
    """Return what a job says of prompts, with the tokenizer and the template in the model's file.

    Args:
        plan: How much is needed.
        gguf: The model.
        text: What the long prompts are cut from.
    """
    from tokenizers import Tokenizer

    from paceline_engine.model_files.files import find_model_files
    from paceline_gateway.templates.environment import template_environment

    files = find_model_files(str(gguf)).small
    tokenizer = Tokenizer.from_str(files.contents["tokenizer.json"].decode())
    template = template_environment().from_string(files.contents["chat_template.jinja"].decode())

    def chat(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        said = template.render(messages=messages, add_generation_prompt=True)
        return list(tokenizer.encode(said, add_special_tokens=False).ids)

    ids = tokenizer.encode(text, add_special_tokens=False).ids
    longest = max(plan.first_token)
    streams = [chat(f"{each} This is question {n}.") for n in (1, 2) for each in QUESTIONS]
    return {
        "warm_up": chat("Count from one to twenty."),
        "chats": [chat(each) for each in QUESTIONS[: plan.chats]],
        # Cut at different places: the second begins like no other.
        "first_token": {
            str(length): [list(ids[at * longest :][:length]) for at in (0, 1)]
            for length in plan.first_token
        },
        "streams": {str(count): streams[:count] for count in plan.streams},
    }
