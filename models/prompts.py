"""Cut the held-out prompts (`prompts.jsonl`): beginnings of functions and classes to complete.

Run it after `train.py`; it uses the target's tokenizer.
"""

from __future__ import annotations

import ast
import hashlib
import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from corpus import SourceFile, load_corpus
from recipe import TARGET_FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPTS_FILE = "prompts.jsonl"
_COUNT = 120
_SHORTEST, _LONGEST = 60, 200  # Tokens.
_LEFT_TO_COMPLETE = 32  # Tokens of the definition that must follow the prompt.


@dataclass(frozen=True)
class Prompt:
    """A prompt: the file that it is from, relative to the standard library, and its text."""

    file: str
    text: str


def cut_prompts(files: Sequence[SourceFile], *, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Choose `_COUNT` prompts evenly; fewer if the files have no more.

    One comes from each file in turn, in an order given by a hash of the text.

    Args:
        files: The held-out files.
        tokenizer: Prompts have 60 to 200 of its tokens.
    """
    waiting = []
    for file in files:
        texts = set(_beginnings(file, tokenizer=tokenizer))
        waiting.append([Prompt(file.name, text) for text in sorted(texts, key=_digest)])
    chosen: dict[str, Prompt] = {}
    while any(waiting) and len(chosen) < _COUNT:
        for prompts in waiting:
            if prompts and len(chosen) < _COUNT:
                prompt = prompts.pop()
                chosen.setdefault(prompt.text, prompt)
    return list(chosen.values())


def load_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts, one JSON object per line."""
    with path.open(encoding="utf-8") as lines:
        return [Prompt(**json.loads(line)) for line in lines]


def _beginnings(file: SourceFile, *, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield for each definition its shortest beginning that is long enough.

    A beginning ends where a statement of the body ends, so never inside a docstring, and without
    its line break: a break and the next line's indentation are one token.
    """
    lines = file.text.splitlines()
    for node in ast.walk(ast.parse(file.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        whole = _token_count(_excerpt(lines, first, node.end_lineno or first), tokenizer)
        statements = (inner for inner in ast.walk(node) if isinstance(inner, ast.stmt))
        ends = sorted({statement.end_lineno or 0 for statement in statements})
        for end in ends:
            text = _excerpt(lines, first, end)
            length = _token_count(text, tokenizer)
            if _SHORTEST <= length <= _LONGEST and length + _LEFT_TO_COMPLETE <= whole:
                yield text
                break


def _excerpt(lines: Sequence[str], first: int, last: int) -> str:
    """Return lines [first, last], counted from 1, without their common indentation."""
    return textwrap.dedent("\n".join(lines[first - 1 : last])).rstrip()


def _token_count(text: str, tokenizer: PreTrainedTokenizerBase) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    """Write `prompts.jsonl` beside this file."""
    folder = Path(__file__).resolve().parent
    tokenizer = AutoTokenizer.from_pretrained(folder / TARGET_FOLDER)
    prompts = cut_prompts(load_corpus().held_out, tokenizer=tokenizer)
    lines = (json.dumps(asdict(prompt)) + "\n" for prompt in prompts)
    (folder / PROMPTS_FILE).write_text("".join(lines), encoding="utf-8")
    print(f"{len(prompts)} prompts from {len({prompt.file for prompt in prompts})} files")


if __name__ == "__main__":
    main()
