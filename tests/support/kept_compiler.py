"""A C compiler that compiles each source of the engine once in a run of tests.

A server compiles what it computes between products at each load, for half a second of a core, or
for two with products in whole numbers; and tries whether it could, where it does not need to. A run
of tests loads hundreds of models.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")  # as the engine looks for them; to import it takes seconds

FOLDER_VARIABLE = "TESTS_KEPT_COMPILER"
"""Where the compiler is, for processes that a process of tests starts."""

# What came out for a source is found by all that the compiler can see: the arguments without the
# output's place, and all sources beside this one, which it may include.
_SCRIPT = """\
#!/bin/sh
source= output= previous= key=
for each in "$@"; do
  if [ "$previous" = -o ]; then output=$each
  else
    case "$each" in
      */torch_backend/*.c | */tried.c) source=$each ;;
      *) key="$key $each" ;;
    esac
  fi
  previous=$each
done
[ -n "$source" ] && [ -n "$output" ] || exec {real} "$@"
key=$({{ echo "$key ${{source##*/}}"; cat "${{source%/*}}"/*.c; }} | sha256sum)
key=${{key%% *}}
[ -n "$key" ] || exec {real} "$@"
kept={folder}/$key.so
[ -e "$kept" ] && exec cp "$kept" "$output"
{real} "$@" || exit
cp "$output" "$kept.$$" && mv "$kept.$$" "$kept"
"""


def keep_what_is_compiled(folder: Path) -> None:
    """Let this process, and all that it starts, find that compiler first."""
    real = next((path for each in _COMPILERS if (path := shutil.which(each))), None)
    if real is None:
        return
    compiler = folder / _COMPILERS[0]
    compiler.write_text(_SCRIPT.format(real=real, folder=folder))
    compiler.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"
    os.environ[FOLDER_VARIABLE] = str(folder)
