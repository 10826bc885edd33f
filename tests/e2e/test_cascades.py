"""A drafter that is a stack of models: the output stays the target's, and all of the stack ran."""

from __future__ import annotations

from functools import cache

import pytest

from paceline import Strategy
from support.processes import ServerProcess, last_words
from support.streams import mishaps
from support.system import MODELS, System

TOKENS = 40
STAGE_FORWARDS = "paceline_stage_forwards_total"
MATRIX = "[[4,3,4],[0,2,6],[0,0,6]]"
VERTICAL = "[[1,0,0],[0,3,6],[0,0,6]]"


OF_THE_TARGET = ("python-target", "python-drafter")
BUNDLED = ("python-drafter", "python-tiny")


def stack(models: tuple[str, str], *, cascade: str, leniency: float = 1) -> ServerProcess:
    """Return a drafter with two models, and Max-Gram below them."""
    largest, smaller = models
    return ServerProcess(
        "drafter",
        f"--model={MODELS / largest}",
        f"--then={MODELS / smaller}",
        "--then=max-gram",
        f"--cascade={cascade}",
        f"--leniency={leniency}",
        name="drafter-0",
    )


@pytest.fixture(
    scope="module",
    params=[
        (OF_THE_TARGET, VERTICAL, 1),
        pytest.param((BUNDLED, MATRIX, 3), marks=pytest.mark.long),
        pytest.param((BUNDLED, "auto", 1), marks=pytest.mark.long),
    ],
    ids=lambda param: f"{param[0][0]}-{param[1]}-{param[2]}".replace(",", ""),
)
def cascade(request, bundled):
    models, matrix, leniency = request.param
    drafter = stack(models, cascade=matrix, leniency=leniency)
    system = System(drafters=[drafter], targets=bundled.targets[:2])
    with system.running():
        yield system, models, matrix


@pytest.fixture(scope="module")
def plain(bundled):
    """Return what plain decoding gives; a text is decoded once."""

    @cache
    def decoded(prompt, **options):
        with bundled.client() as client:
            return client.generate(prompt, strategy="autoregressive", **options).collect()

    return decoded


@pytest.mark.parametrize(
    ("strategy", "temperature"), [(Strategy.SPECULATIVE, 0.8), (Strategy.DISTRIBUTED, 0.0)]
)
def test_with_a_stack_as_drafter_the_tokens_are_those_of_plain_decoding(
    cascade, strategy, temperature, prompts, plain
):
    system, models, matrix = cascade
    options = {"max_tokens": TOKENS, "temperature": temperature, "seed": 3, "ignore_eos": True}
    with system.client() as client:
        for prompt in prompts[:2]:
            expected = plain(prompt, **options)
            done = client.generate(
                prompt, strategy=strategy, lookahead=4, targets=2, **options
            ).collect()
            assert done.token_ids == expected.token_ids
            assert expected.finished.statistics.walltime_improvement > 0
            assert done.started.strategy is strategy
            assert not mishaps(done)
            drafted = done.finished.statistics
            if strategy is Strategy.SPECULATIVE:
                # In DSI a drafter that is no faster than the target is overtaken again and again.
                assert drafted.accepted_token_count > 0
                ran = {each.model_name: each.forward_count for each in drafted.drafter_models}
                # Where the drafter comes late the text drafts until then, which may be to the end.
                assert list(ran) in ([], [*models])
                assert sum(ran.values()) == drafted.drafter_forward_count
            if matrix == VERTICAL:
                of_text = (
                    drafted.max_gram_drafted_token_count - drafted.max_gram_accepted_token_count
                )
                assert drafted.rejected_token_count <= of_text, (
                    "it drafts what its largest model says"
                )


def test_each_model_of_the_stack_ran(cascade):
    system, _, matrix = cascade
    page = system.drafters[0].page("/metrics").splitlines()
    ran = [line for line in page if line.startswith(STAGE_FORWARDS)]
    page = system.orchestrators[0].page("/metrics").splitlines()
    told = [line for line in page if line.startswith("paceline_drafter_forwards_total")]
    # By what is measured, the smaller one may not be worth its time.
    enough = max if matrix == "auto" else min
    for lines in (ran, told):
        assert len(lines) == 2
        assert enough(float(line.rsplit(" ")[-1]) for line in lines) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--then=max-gram", "--cascade=[[1]]"), "needs 2 rows of 2"),
        (("--then=max-gram", "--leniency=0.5"), "--leniency"),
        (("--then=max-gram", f"--then={MODELS / 'python-drafter'}"), "max-gram comes last"),
        (("--then={tiny}",), "has another tokenizer than"),
        (("--leniency=2",), "need --then"),
    ],
)
def test_a_stack_that_cannot_be_is_one_clear_line_at_the_start(flags, said, tiny_pair):
    words = refusal("drafter", *(flag.format(tiny=tiny_pair.drafter) for flag in flags))
    assert said in words


def test_a_target_takes_no_stack():
    assert "only a drafter drafts with a stack" in refusal("target", "--then=max-gram")


def refusal(role: str, *flags: str) -> str:
    return last_words(role, f"--model={MODELS / 'python-target'}", *flags)
