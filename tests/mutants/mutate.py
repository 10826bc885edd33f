"""Changes operators, numbers and conditions one at a time, and lists the changes that no test sees.

    PYTHONPATH=tests python -m mutants.mutate FILE [FILE ...] --tests TEST [TEST ...]

Cosmic Ray makes the changes, in a copy of the tree. It has an environment of its own, build/mutate:
`make mutate` installs it there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mutants.run import ROOT, copied_trees, source_folders

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOOLS = ROOT / "build/mutate/bin"
_TEST_SECONDS = 120
# One or two changes of an operator are enough. A | joins types, of which no test can see anything.
_OPERATORS_LEFT_OUT = [
    "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_FloorDiv|Div_Mul|FloorDiv_Mul|Mod_Mul)",
    "core/ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is)(?!LtE?_LtE?|GtE?_GtE?)",
    "core/(RemoveDecorator|ExceptionReplacer|Variable)",
]


def main() -> None:
    """Make the changes, and print those that survive."""
    arguments = _arguments()
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    pytest += ["-m", "not full and not long", *arguments.tests]
    with tempfile.TemporaryDirectory(prefix="paceline-mutate-") as folder, copied_trees(1) as trees:
        config, session = Path(folder) / "config.toml", Path(folder) / "session.sqlite"
        config.write_text(
            f"""
            [cosmic-ray]
            module-path = {arguments.files}
            timeout = {_TEST_SECONDS}
            test-command = '''{shlex.join(pytest)}'''
            distributor.name = "local"
            [cosmic-ray.filters]
            operators-filter.exclude-operators = {_OPERATORS_LEFT_OUT}
            git-filter.branch = "{arguments.since}"
            """
        )
        _call("cosmic-ray", "init", config, session)
        _call("cr-filter-operators", session, config)
        if arguments.since:
            _call("cr-filter-git", session, "--config", config)
        folders = source_folders(trees[0])
        _call("cosmic-ray", "baseline", config, cwd=trees[0], folders=folders)
        _call("cosmic-ray", "exec", config, session, cwd=trees[0], folders=folders)
        _call("cr-report", "--surviving-only", "--show-diff", session)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="what is changed")
    parser.add_argument(
        "--tests", nargs="+", required=True, metavar="TEST", help="what has to fail"
    )
    parser.add_argument(
        "--since", metavar="COMMIT", help="change only lines that differ from this commit's"
    )
    return parser.parse_args()


def _call(tool: str, *arguments: str | Path, cwd: Path = ROOT, folders: Sequence[str] = ()) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run([_TOOLS / tool, *arguments], cwd=cwd, env=environment, check=True)


if __name__ == "__main__":
    main()
