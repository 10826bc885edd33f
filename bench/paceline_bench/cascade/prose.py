"""Prose to continue: docstrings of Python's own library."""

from __future__ import annotations

import ast
import sysconfig
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PROMPT_WORDS = 24
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_prompts(files: Sequence[str], *, library: Path | None = None) -> list[str]:
    """Return beginnings of paragraphs, one of each file in turn; none of a file that is not there.

    Args:
        files: Relative to the library.
        library: Where it lies, if it is not this interpreter's.
    """
    folder = library or Path(sysconfig.get_path("stdlib"))
    found = [list(_beginnings(folder / file)) for file in files if (folder / file).is_file()]
    in_turn = chain.from_iterable(zip_longest(*found))
    return list(dict.fromkeys(each for each in in_turn if each is not None))


def _beginnings(path: Path) -> Iterator[str]:
    """Yield what begins like a docstring, and ends in the middle of its first long paragraphs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
        for paragraph in (text or "").split("\n\n"):
            words = paragraph.split()
            if len(words) > _PROMPT_WORDS and ">>>" not in words:
                yield '"""' + " ".join(words[:_PROMPT_WORDS])
