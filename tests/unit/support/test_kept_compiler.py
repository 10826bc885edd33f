"""What a run of tests has compiled is what a compiler would have made."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

import pytest

from paceline_engine.torch_backend import compiler
from paceline_engine.torch_backend.compiler import check_products_compile
from support.kept_compiler import FOLDER_VARIABLE, keep_what_is_compiled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder like the engine's, and a compiler that keeps what it made apart from the run's."""
    path = os.environ["PATH"].split(os.pathsep)
    own = [each for each in path if each != os.environ.get(FOLDER_VARIABLE)]
    monkeypatch.setenv("PATH", os.pathsep.join(own))
    monkeypatch.setenv(FOLDER_VARIABLE, "none")
    folder = tmp_path / "torch_backend"
    for each in (folder, tmp_path / "kept"):
        each.mkdir()
    keep_what_is_compiled(tmp_path / "kept")
    (folder / "main.c").write_text('#include "part.c"\nint main_number(void) { return NUMBER; }\n')
    (folder / "part.c").write_text("#define NUMBER 1 + MORE\n")
    return folder


def number(sources, *, more=0, name="main.c"):
    made = sources.parent / f"{len(list(sources.parent.iterdir()))}.so"
    flags = ("-shared", "-fPIC", f"-DMORE={more}")
    subprocess.run(["cc", sources / name, "-o", made, *flags], check=True)
    return ctypes.CDLL(made).main_number()


def kept(sources):
    return len(list((sources.parent / "kept").glob("*.so")))


def test_the_same_source_is_compiled_once(sources):
    assert [number(sources), kept(sources)] == [1, 1]
    (only,) = (sources.parent / "kept").glob("*.so")
    before = only.stat().st_mtime_ns
    assert [number(sources), kept(sources)] == [1, 1]
    assert only.stat().st_mtime_ns == before


def test_another_source_or_flag_or_part_is_another_library(sources):
    assert number(sources) == 1
    assert number(sources, more=2) == 3
    (sources / "part.c").write_text("#define NUMBER 5 + MORE\n")
    assert number(sources) == 5
    (sources / "other.c").write_text("int main_number(void) { return 7; }\n")
    assert number(sources, name="other.c") == 7


def test_what_a_load_tries_is_compiled_once(sources, monkeypatch):
    try:
        check_products_compile(["cc"])
    except compiler.StepsUnavailableError as error:
        pytest.skip(str(error))  # another kind of processor
    check_products_compile(["cc"])
    assert kept(sources) == 1
    monkeypatch.setattr(compiler, "_TRIED", "no C\n")
    with pytest.raises(compiler.StepsUnavailableError):
        check_products_compile(["cc"])


def test_what_cannot_be_compiled_fails_each_time_and_is_not_kept(sources):
    (sources / "main.c").write_text("no C\n")
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            number(sources)
    assert kept(sources) == 0


def test_other_programs_are_left_to_the_compiler(sources, tmp_path):
    source = tmp_path / "own.c"
    source.write_text("int main(void) { return 3; }\n")
    subprocess.run(["cc", source, "-o", tmp_path / "own"], check=True)
    assert subprocess.run([tmp_path / "own"]).returncode == 3
    assert kept(sources) == 0
