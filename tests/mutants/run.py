"""Seeds each bug of the lists beside this file, one at a time, and sees whether a test dies of it.

    python tests/mutants/run.py [--only PATTERN] [--jobs COUNT] [--list]

Everything happens in copies of the tree, one for each job. What a list says of a bug is in `Bug`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]

# Of one test, and of all that a bug names; a test that hangs has noticed the bug.
_TEST_SECONDS = 60
_RUN_SECONDS = 300
_FAILED, _PASSED = 1, 0  # what pytest ends with
_MODELS = "transformers.models.llama.modeling_llama"
# Each run is forked from a process that has imported what takes seconds, and nothing of ours.
_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["hypothesis", "pytest", "torch", _MODELS])


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A bug that a test has to see.

    Attributes:
        part: Which list it is in.
        harm: What goes wrong for a user: one sentence.
        place: A file, and after `::` a function or class of it, as `Driver.take_verdict`. Without
            one the whole file is searched.
        find: The words to replace. They stand once at that place, with any white space between.
        replace: What stands there instead.
        tests: Files or node ids; one of these tests has to fail.
    """

    part: str
    harm: str
    place: str
    find: str
    replace: str
    tests: tuple[str, ...]

    @property
    def file(self) -> str:
        """Where the bug is seeded."""
        return self.place.partition("::")[0]

    def seeded_in(self, text: str) -> str:
        """Return the file's text with the bug in it."""
        name = self.place.partition("::")[2]
        spans = _definitions(text).get(name, []) if name else [(0, len(text))]
        words = re.compile(r"\s+".join(map(re.escape, self.find.split())))
        found = [match.span() for span in spans for match in words.finditer(text, *span)]
        assert len(found) == 1, f"{self.place} has {len(found)} times what {self.harm!r} replaces"
        start, end = found[0]
        return text[:start] + self.replace + text[end:]


@functools.cache
def _definitions(text: str) -> dict[str, list[tuple[int, int]]]:
    """Return where a program's functions and classes begin and end, by their qualified names.

    A name may be defined more than once, as a property's getter and setter are.
    """
    line_starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
    spans: dict[str, list[tuple[int, int]]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first_line = min([child.lineno, *(it.lineno for it in child.decorator_list)])
                end = line_starts[cast("int", child.end_lineno)]
                name = prefix + child.name
                spans.setdefault(name, []).append((line_starts[first_line - 1], end))
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return spans


def load() -> list[Bug]:
    """Read all lists."""
    return [
        Bug(part=path.stem, **{**entry, "tests": tuple(entry["tests"])})
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["bug"]
    ]


def main() -> int:
    """Return 0 if every bug died, 1 if one survived, 2 if the tests fail without any."""
    arguments = _arguments()
    bugs = [bug for bug in load() if arguments.only.search(f"{bug.part} {bug.place} {bug.harm}")]
    if arguments.list:
        for bug in bugs:
            print(f"{bug.part}: {bug.harm}")
        return 0
    with copied_trees(arguments.jobs) as trees:
        tests = sorted({test for bug in bugs for test in bug.tests})
        print(f"{len(bugs)} bugs; first the tests without any: {len(tests)} files and tests")
        spread = ["-n", str(len(trees)), "--dist", "loadfile"]
        seconds = 10 * _RUN_SECONDS
        if bugs and _run(trees[0], [*spread, *tests], seconds=seconds, quiet=False) != _PASSED:
            print("the tests do not pass as they are")
            return 2
        ends = _try_all(bugs, trees)
    survivors = [bug for bug, end in zip(bugs, ends, strict=True) if end != "killed"]
    print(f"{len(bugs) - len(survivors)} killed")
    for bug in survivors:
        print(f"NOT KILLED {bug.part}: {bug.harm}\n    {bug.place}; {' '.join(bug.tests)}")
    return int(bool(survivors))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        type=re.compile,
        default=re.compile(""),
        metavar="PATTERN",
        help="those in whose list's name, place or sentence this is found",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="COUNT", help="bugs at a time")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    return parser.parse_args()


@contextmanager
def copied_trees(count: int) -> Iterator[list[Path]]:
    """Lend so many copies of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    names = [name for name in listed.stdout.split("\0") if name]
    with tempfile.TemporaryDirectory(prefix="paceline-mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(count)]
        for tree in trees:
            _copy(names, tree)
        yield trees


def _copy(names: Sequence[str], tree: Path) -> None:
    for name in names:
        if (ROOT / name).is_file():  # else it was deleted, and git does not know yet
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)


def _try_all(bugs: Sequence[Bug], trees: Sequence[Path]) -> list[str]:
    """Try each bug, one at a time in each tree."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def try_somewhere(bug: Bug) -> str:
        tree = free.get()
        try:
            return _try(bug, tree)
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(trees)) as workers:
        return list(workers.map(try_somewhere, bugs))


def _try(bug: Bug, tree: Path) -> str:
    """Seed a bug, and say what the tests made of it."""
    path, began = tree / bug.file, time.monotonic()
    before = path.read_text()
    path.write_text(bug.seeded_in(before))
    try:
        code = _run(tree, bug.tests, seconds=_RUN_SECONDS)
    finally:
        path.write_text(before)
    # Anything else is no test that failed, but a tree in which none can run.
    end = {_FAILED: "killed", _PASSED: "SURVIVED"}.get(code, "BROKEN")
    print(f"{end:8} {time.monotonic() - began:5.1f} s  {bug.part}: {bug.harm}", flush=True)
    return end


def _run(tree: Path, arguments: Sequence[str], *, seconds: float, quiet: bool = True) -> int:
    """Run pytest in a tree until the first test fails; return how it ended."""
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)  # what it remembers of other bugs
    flags = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    flags += ["-m", "not full and not long", f"--timeout={_TEST_SECONDS}"]
    flags += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what is imported already
    process = _WARM.Process(target=_pytest, args=(tree, [*flags, *arguments], quiet))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        os.killpg(cast("int", process.pid), signal.SIGKILL)
        process.join()
        return _FAILED
    return process.exitcode


def _pytest(tree: Path, arguments: list[str], quiet: bool) -> None:
    os.setsid()
    if quiet:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
    os.chdir(tree)
    folders = source_folders(tree)
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(code)  # at once: after a test that failed with an open channel, gRPC may wait for ever


def source_folders(tree: Path) -> list[str]:
    """Return where the packages lie: these come before the installed ones."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())
    return [str(tree / name) for name in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]


if __name__ == "__main__":
    sys.exit(main())
