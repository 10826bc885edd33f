"""Who leads the texts that a target writes: what stands in them, and what is drawn.

A chat begins with the template and perhaps the user's first words; the target writes the rest of
the user's turn, and the answer. Then comes the user's next turn. Other text begins with some lines
of code or prose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pydoc_data import topics
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from corpus import load_corpus

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from paceline_engine.model_files.files import ModelFiles

_CHAT_SHARE = 0.7
_CODE_SHARE = 0.2  # The rest is prose.
USER_TOKENS = 64
ANSWER_TOKENS = 200
USER_TEMPERATURE = 1.0
# Half of the texts are greedy: so are most requests. Greedy text alone would have too few different
# contexts.
_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
_GIVEN_TOKENS = (16, 80)
_OPENED_SHARE = 0.6  # The share of the user's turns whose first words are given.

_TEXTS_KNOWN = 1024

# Where a token comes from.
TEMPLATE, GIVEN, USER, OWN = range(4)

OPENERS = (
    "What is", "What are the", "Why", "How do I", "How does", "How can I", "Explain", "Describe",
    "Write a Python function that", "Write a Python class for", "Write a function in Python to",
    "Fix the bug in this Python code:\n", "What does this code do?\n```python\n", "Write a script",
    "Write a SQL query that", "Write a regular expression", "Give me a JSON object with",
    "Write a short story about", "Write a poem about", "Write an email to", "Write a letter",
    "Write a paragraph about", "Write a summary of", "Summarize the following text:", "List",
    "List three", "List ten", "Give me five", "Give me some advice on", "Can you", "Could you",
    "Tell me about", "Tell me a joke about", "Who was", "Who is", "When did", "Where is",
    "Which", "Compare", "What is the difference between", "Translate", "Rewrite this sentence:",
    "Correct the grammar:", "Classify", "I want to", "I need help with", "I'm planning",
    "Please", "Is it true that", "Calculate", "Solve", "If", "Plan", "Suggest", "Make a table of",
    "Define", "Hello", "Hi,", "Thanks", "Continue", "In one sentence,", "Step by step,",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Writer:
    """What leads one text: a turn that ends is followed by the answer, and that by another turn.

    The target draws what is not given. A turn of a chat that becomes too long is ended.

    Attributes:
        temperature: Of the answers and the continuations.
        open_turn: Makes a turn of the user: the template before it, and the given first words; in
            other text, a given beginning.
        answer: The template between the user's turn and the answer; empty in other text.
        end_ids: The tokens that end a turn.
    """

    temperature: float
    open_turn: Callable[[], list[tuple[int, int]]]
    answer: Sequence[int]
    end_ids: Sequence[int]


class Writers:
    """Makes the writers of a batch, from a tokenizer and the texts that beginnings are cut from."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, code: Sequence[str], prose: Sequence[str]
    ) -> None:
        # Few first words open very many turns.
        self._encode: Callable[[str], tuple[int, ...]] = lru_cache(_TEXTS_KNOWN)(
            lambda text: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        )
        message = [{"role": "user", "content": "\0"}]
        chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        assert isinstance(chat, str)
        before, _, after = chat.partition("\0")
        self._before = self._encode(before)
        self._end = self._encode(after)[0]
        self._answer = self._encode(after)[1:]
        user = message_start(before)
        self._again = [*self._encode(after[after.index("\n") :])[:1], *self._encode(user)]
        self._ends = (self._end, *self._encode("<|endoftext|>"))
        self._code, self._prose = code, prose

    def make(self, chance: random.Random) -> Writer:
        """Make a writer of a kind that is drawn."""
        kind = chance.random()
        temperature = chance.choice(_TEMPERATURES)
        if kind < _CHAT_SHARE:
            starts = iter([self._before])
            return Writer(
                temperature,
                lambda: self._open_chat(next(starts, self._again), chance),
                self._answer,
                (self._end,),
            )
        texts = self._code if kind < _CHAT_SHARE + _CODE_SHARE else self._prose
        return Writer(temperature, lambda: self._beginning(texts, chance), (), self._ends)

    def _open_chat(self, template: Sequence[int], chance: random.Random) -> list[tuple[int, int]]:
        opened = chance.random() < _OPENED_SHARE
        given = self._encode(chance.choice(OPENERS)) if opened else ()
        return [(each, TEMPLATE) for each in template] + [(each, GIVEN) for each in given]

    def _beginning(self, texts: Sequence[str], chance: random.Random) -> list[tuple[int, int]]:
        """Cut some tokens from one of the texts, from the beginning of a line on."""
        text = chance.choice(texts)
        start = text.rfind("\n", 0, chance.randrange(len(text))) + 1
        token_ids = self._encode(text[start : start + 1000])
        return [(each, GIVEN) for each in token_ids[: chance.randint(*_GIVEN_TOKENS)]]


def chat_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer, with its chat template."""
    template = files.chat_template
    if template is None:
        raise SystemExit(f"{files.name} has no chat template, and writes no chats")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(files.tokenizer.decode()),
        chat_template=template.source,
    )


def message_start(template: str) -> str:
    """Return the last message's start in the rendered beginning of a chat."""
    return template[template.rindex("<|im_start|>") :]


def load_writers(files: ModelFiles, *, held_out: bool) -> Writers:
    """Return what makes writers, with beginnings that are for training or held out."""
    corpus = load_corpus()
    code = [file.text for file in (corpus.held_out if held_out else corpus.training)]
    prose = [text for index, text in enumerate(topics.topics.values()) if
             (index % 20 == 0) == held_out]  # fmt: skip
    return Writers(chat_tokenizer(files), code=code, prose=prose)
