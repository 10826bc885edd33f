"""A target that drafts for itself, over real gRPC: the tokens of plain decoding, in fewer calls.

A simulated target's token is a hash of the whole text before it, so one wrong token anywhere shows
in all that follow it.
"""

from __future__ import annotations

import pytest

from paceline import Strategy
from support.cells import SAMPLINGS
from support.equality import check_rarity, compare
from support.processes import ServerProcess, last_words
from support.streams import at_work, disturbed, mishaps
from support.system import MODELS, System, simulated_model
from support.tiny_adapters import write_adapter

RATES = "0.9,0.8,0.7,0.6"
TOKENS = 400
PROMPTS = ("one:", "two:", "three:")
# A stream may be over before a busy machine has killed who works for it.
ATTEMPTS = 4


@pytest.fixture(scope="module")
def system():
    servers = [
        simulated_model("target", index, seconds=0.005, simulated_self_rates=RATES)
        for index in range(2)
    ]
    with System(drafters=[], targets=servers).running() as system:
        yield system


@pytest.fixture(scope="module")
def texts(system):
    with system.client() as client:
        return [decode(client, prompt, Strategy.AUTOREGRESSIVE).token_ids for prompt in PROMPTS]


def decode(client, prompt, strategy, **options):
    return client.generate(prompt, strategy=strategy, max_tokens=TOKENS, **options).collect()


def test_every_token_is_that_of_plain_decoding_and_a_forward_gives_several(system, texts):
    with system.client() as client:
        done = [decode(client, prompt, Strategy.SELF_SPECULATIVE) for prompt in PROMPTS]
    assert [each.token_ids for each in done] == texts
    assert not mishaps(*done)
    # With the first guesses alone 1 + 0.9 + 0.9 * 0.8 + ... = 3.4, and the runners-up beside them.
    assert all(each.finished.statistics.target_forward_count < TOKENS / 2.5 for each in done)


def test_with_temperature_it_is_that_of_the_same_seed(system):
    sampled = {"temperature": 0.8, "seed": 7}
    with system.client() as client:
        plain = decode(client, PROMPTS[0], Strategy.AUTOREGRESSIVE, **sampled)
        own = decode(client, PROMPTS[0], Strategy.SELF_SPECULATIVE, **sampled)
    assert own.token_ids == plain.token_ids


def test_a_target_killed_mid_stream_costs_no_token(system, texts):
    lost = 0
    for _ in range(ATTEMPTS):
        with system.client() as client:
            generation = client.generate(
                PROMPTS[0], strategy=Strategy.SELF_SPECULATIVE, max_tokens=TOKENS, timeout=60
            )
            done = disturbed(generation, lambda: at_work(system, system.targets).kill(), after=20)
        system.mend()
        assert done.token_ids == texts[0]
        lost = done.finished.statistics.fallbacks.get("target_lost", 0)
        if lost:
            break
    assert lost


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("medusa", marks=pytest.mark.long),
        "streams",
        pytest.param("eagle", marks=pytest.mark.long),
    ],
)
def test_with_an_adapter_of_a_real_model_every_token_is_that_of_plain_decoding(kind, tmp_path):
    # Of weights changed at random some guesses are right and many are wrong.
    model, tree = MODELS / "python-target", [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    shape = {"token_ids": range(500)} if kind == "eagle" else None
    adapter = write_adapter(tmp_path / kind, model, kind=kind, tree=tree, shape=shape)
    flags = (f"--model={model}", f"--adapter={adapter}", "--dtype=float32", "--threads=1")
    target = ServerProcess("target", *flags, "--device=cpu", "--debug-calls", name="target-0")
    with System(drafters=[], targets=[target]).running() as system, system.client() as client:
        options = {"max_tokens": 40, "ignore_eos": True}
        for sampling in ({}, {"temperature": 0.8, "seed": 3}):
            plain, own = (
                client.generate("def area(", strategy=strategy, **options, **sampling).collect()
                for strategy in (Strategy.AUTOREGRESSIVE, Strategy.SELF_SPECULATIVE)
            )
            assert own.token_ids == plain.token_ids
            assert own.finished.statistics.drafted_token_count > 40


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["medusa", "streams"])
def test_long_texts_with_a_bundled_adapter_are_those_of_plain_decoding(
    kind, oracle, tokenizer, prompts
):
    model, adapter = MODELS / "python-target", MODELS / f"python-target-{kind}"
    flags = (f"--model={model}", f"--adapter={adapter}", "--dtype=float32", "--threads=1")
    target = ServerProcess("target", *flags, "--device=cpu", "--debug-calls", name="target-0")
    ties, forwards, positions = [], 0, 0
    with System(drafters=[], targets=[target]).running() as system, system.client() as client:
        for sampling in SAMPLINGS.values():
            for prompt in prompts[:4]:
                plain, own = (
                    client.generate(
                        prompt,
                        strategy=strategy,
                        max_tokens=160,
                        ignore_eos=True,
                        temperature=sampling.temperature,
                        top_p=sampling.top_p,
                        seed=sampling.seed,
                    ).collect()
                    for strategy in (Strategy.AUTOREGRESSIVE, Strategy.SELF_SPECULATIVE)
                )
                ids = tokenizer.encode(prompt).ids
                expected, actual = plain.token_ids, own.token_ids
                ties += compare(oracle, ids, sampling, expected=expected, actual=actual)
                forwards += own.finished.statistics.target_forward_count
                positions += len(actual)
    assert positions == 3 * 4 * 160
    check_rarity(ties, position_count=positions)
    assert forwards < 0.8 * positions


def test_an_adapter_for_another_model_is_one_clear_line_at_the_start():
    heads = MODELS / "python-target-medusa"
    words = last_words("target", f"--model={MODELS / 'python-drafter'}", f"--adapter={heads}")
    assert "is for a model 'python-target'" in words
