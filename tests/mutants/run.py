"""Seeds each bug of the lists beside this file, one at a time, and sees whether a test dies of it.

    python tests/mutants/run.py [--only PATTERN] [--jobs COUNT] [--list]

Everything happens in copies of the tree, one for each job. What a list says of a bug is in `Bug`.
"""

from __future__ import annotations

import argparse
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

__all__ = ["ROOT", "Bug", "load"]

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
        place: Which list it is in.
        harm: What goes wrong for a user: one sentence.
        file: Where it is seeded.
        find: What stands there, once.
        replace: What stands there instead.
        tests: Files or node ids; one of these tests has to fail.
        harmless: Why none can; then it is not run.
    """

    place: str
    harm: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...] = ()
    harmless: str = ""

    def seeded_in(self, text: str) -> str:
        """Return the file's text with the bug in it."""
        count = text.count(self.find)
        assert count == 1, f"{self.file} has {count} times what {self.harm!r} is to replace"
        return text.replace(self.find, self.replace)


def load() -> list[Bug]:
    """Read all lists."""
    return [
        Bug(place=path.stem, **{**entry, "tests": tuple(entry.get("tests", ()))})
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for entry in tomllib.loads(path.read_text())["bug"]
    ]


def main() -> int:
    """Return 0 if every bug died, 1 if one survived, 2 if the tests fail without any."""
    arguments = _arguments()
    bugs = [bug for bug in load() if arguments.only.search(f"{bug.place} {bug.file} {bug.harm}")]
    if arguments.list:
        for bug in bugs:
            print(f"{bug.place}: {bug.harm}")
        return 0
    to_run = [bug for bug in bugs if not bug.harmless]
    with _copied_trees(arguments.jobs) as trees:
        tests = sorted({test for bug in to_run for test in bug.tests})
        print(f"{len(to_run)} bugs; first the tests without any: {len(tests)} files and tests")
        spread = ["-n", str(len(trees)), "--dist", "loadfile"]
        seconds = 10 * _RUN_SECONDS
        if to_run and _run(trees[0], [*spread, *tests], seconds=seconds, quiet=False) != _PASSED:
            print("the tests do not pass as they are")
            return 2
        ends = _try_all(to_run, trees)
    survivors = [bug for bug, end in zip(to_run, ends, strict=True) if end != "killed"]
    print(f"{len(to_run) - len(survivors)} killed, {len(bugs) - len(to_run)} judged harmless")
    for bug in survivors:
        print(f"NOT KILLED {bug.place}: {bug.harm}\n    {bug.file}; {' '.join(bug.tests)}")
    return int(bool(survivors))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only",
        type=re.compile,
        default=re.compile(""),
        metavar="PATTERN",
        help="those in whose list's name, file or sentence this is found",
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="COUNT", help="bugs at a time")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    return parser.parse_args()


@contextmanager
def _copied_trees(count: int) -> Iterator[list[Path]]:
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
    print(f"{end:8} {time.monotonic() - began:5.1f} s  {bug.place}: {bug.harm}", flush=True)
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
    folders = _source_folders(tree)
    sys.path[:0] = folders
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    code = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(code)  # at once: after a test that failed with an open channel, gRPC may wait for ever


def _source_folders(tree: Path) -> list[str]:
    """Return where the packages lie: these come before the installed ones."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())
    return [str(tree / name) for name in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]


if __name__ == "__main__":
    sys.exit(main())
