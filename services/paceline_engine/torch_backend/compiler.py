"""Compiles C files of our own into libraries, with the machine's C compiler, for this processor.

What a compiler or its assembler does not know shows when it compiles: instructions for tiles (AMX)
are left out then, and what cannot be left out is told in an error. Nothing is kept.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
"""The names of C compilers, in the order in which they are looked for."""
# Nothing may be contracted, so that each operation rounds as torch's operator does.
_FLAGS = (
    "-O3", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-ffp-contract=off",
    "-shared", "-fPIC",
)  # fmt: skip
_PRODUCT_FLAGS = ("-mavx512vnni",)
_TILE_FLAGS = ("-mamx-tile", "-mamx-int8")
# It takes compiler, assembler, linker and the C library's headers. It is never called.
_TRIED = """
#include <math.h>
#include <string.h>
void tried(float *sum) {
  __asm__("vpdpbusd %zmm0, %zmm0, %zmm0");
  *sum = fmaf(*sum, 2, lrintf(*sum));
}
"""
COMPILE_SECONDS = 60
"""How long a compiler may take."""


class StepsUnavailableError(Exception):
    """What is compiled cannot be used here; the message says why."""


@contextmanager
def compiled(
    source: Path, *, compilers: Sequence[str], seconds: float, products: bool
) -> Iterator[Path]:
    """Compile a C file for this processor into a library, which is there meanwhile.

    Args:
        compilers: Names of C compilers; the first one that is there is used.
        seconds: How long it may take.
        products: Whether it has products of whole numbers, for a processor with VNNI.

    Raises:
        StepsUnavailableError: there is no compiler; or it fails, also at what is done meanwhile.
    """
    with _compiling(compilers) as (compiler, directory):
        made = directory / f"{source.stem}.so"
        command = [compiler, str(source), "-o", str(made), *_FLAGS, "-lm"]
        if products:
            _compile_products(command, directory, seconds)
        else:
            _run(command, directory, seconds)
        yield made


def check_products_compile(
    compilers: Sequence[str] = COMPILERS, *, seconds: float = COMPILE_SECONDS
) -> None:
    """Check that what `compiled_products.py` needs can be compiled and loaded.

    Cost: 30 ms of a core.

    Raises:
        StepsUnavailableError: it cannot be; the message says why.
    """
    with _compiling(compilers) as (compiler, directory):
        source, made = directory / "tried.c", directory / "tried.so"
        source.write_text(_TRIED)
        command = [compiler, str(source), "-o", str(made), *_FLAGS, *_PRODUCT_FLAGS, "-lm"]
        _run(command, directory, seconds)
        ctypes.CDLL(str(made))


def has_tiles() -> bool:
    """Whether processor and system let this process multiply whole numbers in tiles (AMX)."""
    # This also asks the system for the right to use tiles; older torches do not know it.
    may_use = getattr(torch.cpu, "_init_amx", lambda: False)
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_int8")) and bool(may_use())


def _compile_products(command: Sequence[str], directory: Path, seconds: float) -> None:
    """Compile with tiles; without them if compiler or assembler do not know them, and tell it.

    Raises:
        StepsUnavailableError: neither compiles.
    """
    without: StepsUnavailableError | None = None
    if has_tiles():
        try:
            _run([*command, *_PRODUCT_FLAGS, *_TILE_FLAGS], directory, seconds)
        except StepsUnavailableError as error:
            without = error
        else:
            return
    _run([*command, *_PRODUCT_FLAGS], directory, seconds)
    if without is not None:
        _log.info("products are compiled without AMX, so many rows take longer: %s", without)


@contextmanager
def _compiling(compilers: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Find the compiler, and give a directory for what it makes.

    Raises:
        StepsUnavailableError: there is none; or it cannot be started, or takes too long.
    """
    compiler = next((path for each in compilers if (path := shutil.which(each))), None)
    if compiler is None:
        raise StepsUnavailableError(f"there is no C compiler ({', '.join(compilers)})")
    try:
        with tempfile.TemporaryDirectory(prefix="paceline-") as directory:
            yield compiler, Path(directory)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StepsUnavailableError(f"{compiler}: {error}") from error


def _run(command: Sequence[str], directory: Path, seconds: float) -> None:
    """Run a compiler, and end all that it started if it takes too long.

    Raises:
        StepsUnavailableError: it fails.
    """
    with subprocess.Popen(  # noqa: S603 - our own source
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(directory)},
        start_new_session=True,
    ) as running:
        try:
            _, errors = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
        if running.returncode != 0:
            said = errors.decode(errors="replace").strip().splitlines()
            wrong = [line for line in said if "error" in line.casefold()] or said
            raise StepsUnavailableError(f"{command[0]} fails: {wrong[:1]}")
