"""`paceline bench pair` without services, and what it cannot measure."""

from __future__ import annotations

import json

import pytest
import torch

from paceline_bench.pair.command import _evenly_spaced
from paceline_cli.__main__ import main
from support.tiny_models import build_model, build_tokenizer, tiny_pair

__all__ = ["tiny_pair"]

torch.set_num_threads(1)
QUICK = (
    *("--latency-prompts=2", "--latency-tokens=3"),
    *("--acceptance-prompts=2", "--acceptance-tokens=12"),
    *("--contest-prompts=2", "--contest-tokens=8", "--repeats=1", "--lookaheads=2,4"),
)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def draft(prefix):\nimport target\nreturn prefix\n")
    return path


@pytest.fixture
def pair(tiny_pair, prompts):
    """The options that name a tiny pair and its prompts."""
    return [
        f"--target-model={tiny_pair.target}",
        f"--drafter-model={tiny_pair.drafter}",
        f"--prompts={prompts}",
    ]


def test_models_are_measured_compared_drawn_and_kept(pair, tmp_path, capsys):
    kept, drawn = tmp_path / "pair.json", tmp_path / "pair.png"
    parts = "--parts=acceptance,transformers,engine"
    code = main(["bench", "pair", *pair, *QUICK, parts, f"--json={kept}", f"--chart={drawn}"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "2 texts of 3 tokens" in printed
    assert "2 prompts" in printed
    assert "| generate, assisted, lookahead 4 |" in printed
    content = json.loads(kept.read_text())
    assert {row["identical"] for row in content["rows"]} == {True}
    assert [row["name"] for row in content["rows"]][:2] == ["bare loop", "generate"]
    assert len(content["acceptance"]["common_runs"]) == 2
    assert content["models"]["drafter"]["layers"] == 2
    assert drawn.stat().st_size > 10_000


def test_latencies_alone_can_be_had_for_random_weights(capsys):
    random = ["--random-target=3x128", "--random-drafter=1x64", "--latency-tokens=3"]
    assert main(["bench", "pair", *random, "--latency-prompts=2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("random 3x128 and random 1x64, float32 on cpu: ")
    assert "acceptance" not in printed


def test_a_text_that_differs_fails_the_command(pair, monkeypatch, capsys):
    def wrong(self, prompt, count, **options):
        *token_ids, last = self.bare_loop(prompt, count)
        return (*token_ids, (last + 1) % 300)

    monkeypatch.setattr("paceline_bench.pair.library.LibraryPair._generate", wrong)
    assert main(["bench", "pair", *pair, *QUICK, "--parts=transformers"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device=cuda:99"], "device 'cuda:99' cannot be used here"),
        (["--target-model=/nowhere"], "model '/nowhere': there is no such directory"),
        (["--prompts=/nowhere.txt"], "/nowhere.txt: No such file or directory"),
        (["--contest-tokens=600"], "exceed the models' context of 512"),
    ],
)
def test_what_cannot_be_measured_is_one_line(pair, capsys, options, message):
    assert main(["bench", "pair", *pair, *QUICK, *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_models_that_do_not_fit_are_one_line(pair, tmp_path, capsys):
    other = build_model(tmp_path / "other", build_tokenizer(280), layer_count=1, seed=9)
    assert main(["bench", "pair", *pair, *QUICK, f"--drafter-model={other}"]) == 1
    assert "--drafter-model: has another tokenizer than the target" in capsys.readouterr().err


def test_random_weights_on_a_device_that_is_not_there_are_one_line(capsys):
    random = ["--random-target=1x64", "--random-drafter=1x64", "--device=cuda:99"]
    assert main(["bench", "pair", *random]) == 1
    error = capsys.readouterr().err
    assert "device 'cuda:99' cannot be used here" in error
    assert error.count("\n") == 1


def test_some_prompts_are_taken_evenly():
    assert _evenly_spaced(list(range(10)), 3) == [0, 3, 6]
    assert _evenly_spaced([1, 2], 5) == [1, 2]
