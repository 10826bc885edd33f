"""The text: the Python sources of the running interpreter's own standard library.

Nothing is downloaded. Files are found through `sysconfig`, so another interpreter gives another
(similar) corpus; the model card names the version that the shipped weights were trained on.
"""

from __future__ import annotations

import hashlib
import sysconfig
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HELD_OUT_PERCENT = 5

# Tables (encodings, pydoc topics) are no prose, lib2to3 is a second copy of older syntax, and
# site-packages is not the standard library.
_EXCLUDED_FOLDERS = frozenset(
    {"__pycache__", "encodings", "lib2to3", "pydoc_data", "site-packages", "turtledemo"}
)
_TEST_FOLDERS = frozenset({"idle_test", "test", "tests"})
_EXCLUDED_PREFIX = "_sysconfigdata"  # Generated at build time and full of local paths.


@dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the standard library, with forward slashes, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The standard library split by file.

    Attributes:
        training: What the tokenizer and the models learn from.
        tests: The library's own tests, which some distributions leave out. There are twice as many
            as of the rest and they are of another kind, so they only supplement it.
        held_out: Never trained on; no test is held out.

    Invariants:
        No file is in two parts, and which part a file is in depends on its name alone.
    """

    training: Sequence[SourceFile]
    tests: Sequence[SourceFile]
    held_out: Sequence[SourceFile]


def is_held_out(name: str) -> bool:
    """Say whether a file is kept out of training, by a hash of its name.

    Args:
        name: Path relative to the standard library, with forward slashes.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT


def load_corpus() -> Corpus:
    """Read and split the running interpreter's standard library."""
    parts: dict[str, list[SourceFile]] = {"training": [], "tests": [], "held_out": []}
    for file in _source_files(Path(sysconfig.get_path("stdlib"))):
        parts[_part(file.name)].append(file)
    return Corpus(**parts)


def _part(name: str) -> str:
    if _TEST_FOLDERS.intersection(name.split("/")[:-1]):
        return "tests"
    return "held_out" if is_held_out(name) else "training"


def _source_files(library: Path) -> Iterator[SourceFile]:
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if _EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        if relative.name.startswith(_EXCLUDED_PREFIX):
            continue
        try:
            with tokenize.open(path) as source:  # Honours the file's own encoding declaration.
                text = source.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # Some tests are broken on purpose.
        if text.strip():
            yield SourceFile(name=relative.as_posix(), text=text)
