"""The demo's first part with one model of people's own kind: questions, in its chat template."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from paceline import DrafterKind, Strategy
from paceline.errors import NoTargetError, UnsupportedError
from paceline_cli.comparison import STRATEGIES, Asked, Comparison
from paceline_cli.streamed_text import TextStream
from paceline_contract.words import counted
from paceline_gateway.conversations.conversation import Conversation, Message
from paceline_gateway.templates.chat_template import WRITTEN, ChatTemplates
from paceline_local.screen import progress

if TYPE_CHECKING:
    from paceline import AsyncClient, GenerateOptions

# What a small model can answer: a fact, a correction that repeats its question, an explanation.
_QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    (
        "Correct the mistakes in this text, and write it again: Yesterday I goed to the market and"
        " buyed three apples, two bread and a bottle of milk. Then I walked home and eated them."
    ),
    "Why is the sky blue? Answer in two sentences.",
)
_TEXT = """\
[
  {"name": "Ada", "born": 1815, "country": "England"},
  {"name": "Alan", "born": 1912, "country": "England"},
  {"name": "Grace","""
_MOST_PROMPT_BYTES = 1 << 20
# The answer that is watched first, and the runs that are compared with it.
_ORDER = (Strategy.DISTRIBUTED, Strategy.AUTOREGRESSIVE, Strategy.SPECULATIVE)


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt as people read it, and as it is sent.

    Attributes:
        is_continued: Whether the answer goes on in the prompt's own line.
    """

    shown: str
    asked: Asked
    is_continued: bool = False

    def options(self, strategy: Strategy) -> GenerateOptions:
        """Return the options with a strategy. DSI uses both targets, so that it is DSI."""
        targets: GenerateOptions = {"targets": 2} if strategy is Strategy.DISTRIBUTED else {}
        return {**self.asked.options, **targets, "strategy": strategy}


async def shown_prompts(client: AsyncClient, *, has_drafter: bool) -> list[ShownPrompt]:
    """Write the questions by the model's template, if it has one; one text is continued."""
    kind = DrafterKind.SERVER_AND_MAX_GRAM if has_drafter else DrafterKind.MAX_GRAM
    own: GenerateOptions = {"drafter": kind}
    text = ShownPrompt(_TEXT, Asked(_TEXT, own), is_continued=True)
    try:
        template = await client.chat_template()
    except (UnsupportedError, NoTargetError):
        return [text]
    templates = ChatTemplates()
    try:
        prompts = [
            await templates.render(
                template,
                Conversation(messages=(Message(role="user", content=question),)),
                most_bytes=_MOST_PROMPT_BYTES,
            )
            for question in _QUESTIONS
        ]
    finally:
        await templates.close()
    options: GenerateOptions = {**WRITTEN, **own}
    questions = zip(_QUESTIONS, prompts, strict=True)
    return [*(ShownPrompt(shown, Asked(each, options)) for shown, each in questions), text]


async def answer(client: AsyncClient, prompts: list[ShownPrompt], *, max_tokens: int) -> Comparison:
    """Answer each prompt with DSI, to watch, then with the other strategies, and compare."""
    first, *others = (strategy.abbreviation for strategy in _ORDER)
    print(f"Each answer is streamed with {first}, then computed with {' and '.join(others)}.\n")
    comparison = Comparison()
    for strategy in STRATEGIES:
        comparison.completions[strategy] = []
    for prompt in prompts:
        await _answer_one(client, prompt, comparison, max_tokens=max_tokens)
    return comparison


async def _answer_one(
    client: AsyncClient, prompt: ShownPrompt, comparison: Comparison, *, max_tokens: int
) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(prompt.shown, style="bold", end="" if prompt.is_continued else "\n")
    for strategy in _ORDER:
        options: GenerateOptions = {**prompt.options(strategy), "max_tokens": max_tokens}
        stream = client.generate(prompt.asked.prompt, **options)
        if strategy is _ORDER[0]:
            # In a pipe origins would be brackets around most words.
            with TextStream(sys.stdout, show_origins=sys.stdout.isatty()) as text:
                async for chunk in stream:
                    text.write(chunk)
            print()
        else:
            with progress(f"the same with {strategy.abbreviation}", total=1) as step:
                count = len((await stream.collect()).token_ids)
                step(counted(count, "token"))
        comparison.completions[strategy].append(await stream.collect())
    print(f"{_speeds(comparison)}\n")


def _speeds(comparison: Comparison) -> str:
    """Say in one line how fast the last prompt was with each strategy, and whether it is equal."""
    last = {strategy: runs[-1] for strategy, runs in comparison.completions.items()}
    plain = last[Strategy.AUTOREGRESSIVE].token_ids
    speeds = ", ".join(
        f"{strategy.abbreviation} {len(it.token_ids) * 1e9 / it.finished.statistics.total_ns:.1f}"
        for strategy, it in last.items()
    )
    same = all(each.token_ids == plain for each in last.values())
    return f"-> {len(plain)} tokens, {'the same' if same else 'DIFFERENT'}; tokens/s: {speeds}"
