"""A target that drafts for itself dies: the next one makes the state that its head needs anew."""

from __future__ import annotations

import pytest

from paceline import Strategy
from support.mtp_checkpoints import build_with_module, let_it_guess_well
from support.processes import ServerProcess
from support.streams import at_work, disturbed
from support.system import System
from support.tiny_adapters import write_adapter

PROMPT = [5, 6, 7, 8, 9, 10, 11]
TOKENS = 240
# A busy machine may take so long to strike that the stream is over.
ATTEMPTS = 6
SAMPLED = {"temperature": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen3.5"
    build_with_module("qwen3.5", folder)
    let_it_guess_well("qwen3.5", folder)
    return folder


@pytest.fixture(scope="module", params=["module", "module, trees", "eagle, trees"])
def system(request, checkpoint, tiny_pair, tmp_path_factory):
    """Two targets; the model's text is the same on both."""
    model, adapter = checkpoint, "mtp"
    if "eagle" in request.param:
        folder = tmp_path_factory.mktemp("adapters") / "eagle"
        model = tiny_pair.target
        # A trained head's card says how often its guesses are right.
        rates = {"hit_rates": [[0.6, 0.2]] * 3}
        adapter = write_adapter(
            folder, model, kind="eagle", tree=((0,), (0, 0)), reach=3, training=rates
        )
    flags = [f"--model={model}", f"--adapter={adapter}"]
    if "trees" in request.param:
        flags.append("--guesses=16")
    targets = [ServerProcess("target", *flags, name=f"target-{index}") for index in range(2)]
    with System(drafters=[], targets=targets).running() as system:
        yield system


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_target_killed_mid_stream_costs_no_token(system, sampling):
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "timeout": 90, **sampling}
    with system.client() as client:
        plain = client.generate(PROMPT, strategy=Strategy.AUTOREGRESSIVE, **asked).collect()
    for _ in range(ATTEMPTS):
        with system.client() as client:
            stream = client.generate(PROMPT, strategy=Strategy.SELF_SPECULATIVE, **asked)
            done = disturbed(stream, lambda: at_work(system, system.targets).kill(), after=20)
        system.mend()
        assert done.token_ids == plain.token_ids
        assert done.finished.statistics.drafted_token_count > 100
        if done.finished.statistics.fallbacks.get("target_lost"):
            return
    pytest.fail(f"none of {ATTEMPTS} streams has felt it")
