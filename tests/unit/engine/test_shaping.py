"""Shaping against plain Python, and against the library's own processors."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from paceline_contract.proposal import NOTHING, Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.shaping import Shaper
from paceline_engine.terms.calls import SessionSpec
from support.device import DEVICE
from support.plain_sampling import shaped

SIZE = 30
PROMPT = [3, 3, 7, 1, 3]
ENDS = (0, 2)
KINDS = {
    "bias": SamplingParameters(logit_bias=((1, 5.0), (7, -100.0))),
    "presence": SamplingParameters(presence_penalty=1.5),
    "frequency": SamplingParameters(frequency_penalty=-0.75),
    "repetition": SamplingParameters(repetition_penalty=1.3),
    "less repetition": SamplingParameters(repetition_penalty=0.7),
    "min_tokens": SamplingParameters(min_tokens=4),
    "all": SamplingParameters(
        logit_bias=((2, 3.0),),
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.2,
        min_tokens=3,
    ),
}


def logits_of(rows: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def shaper(parameters: SamplingParameters) -> Shaper:
    spec = SessionSpec(100, sampling=parameters, prompt_length=len(PROMPT), end_token_ids=ENDS)
    return Shaper(spec, vocabulary_size=SIZE)


def oracle(row: torch.Tensor, parameters: SamplingParameters, answer: list[int]) -> torch.Tensor:
    own = shaped(row.tolist(), parameters, prompt=PROMPT, answer=answer, end_ids=ENDS)
    return torch.tensor(own)


def text(answer: list[int]) -> array[int]:
    return array("I", [*PROMPT, *answer])


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_of_a_tree_is_shaped_by_its_own_path(kind):
    """One shaper, whose sequence grows, shrinks and turns elsewhere, as drafts come and go."""
    parameters, chance = KINDS[kind], random.Random(kind)
    own, answer = shaper(parameters), []
    for step in range(40):
        answer = answer[: chance.randrange(len(answer) + 1)]
        answer += [chance.randrange(SIZE) for _ in range(chance.randrange(4))]
        tokens = [chance.randrange(SIZE) for _ in range(chance.randrange(8))]
        parents = [chance.randrange(place + 1) for place in range(len(tokens))]
        tree = Proposal(tuple(tokens), tuple(parents) if step % 2 else ())
        rows = logits_of(len(tokens) + 1, seed=step)
        found = own.shape(rows.to(DEVICE), text(answer), tree).cpu()
        for row in range(len(tokens) + 1):
            path = [] if not row else [*tree.along(reversed([*tree.ancestors(row - 1)]))]
            torch.testing.assert_close(found[row], oracle(rows[row], parameters, [*answer, *path]))


def test_a_row_is_the_same_to_the_bit_alone_and_in_a_block():
    parameters = KINDS["all"]
    rows = logits_of(6).bfloat16()
    block = [4, 4, 9, 2, 11]
    together = shaper(parameters).shape(rows, text([]), Proposal(tuple(block)))
    for row in range(6):
        alone = shaper(parameters).shape(rows[row : row + 1], text(block[:row]), NOTHING)
        assert torch.equal(alone[0], together[row])


def test_the_ends_of_a_growing_draft_are_shaped_by_their_paths():
    parameters = KINDS["frequency"]
    found, due = Proposal((7, 1, 8, 9), (0, 0, 1, 2)), (3, 2)
    rows = logits_of(2)
    shaped_rows = shaper(parameters).shape_ends(rows, text([7]), found, due)
    for row, path in enumerate([[1, 9], [7, 8]]):
        torch.testing.assert_close(shaped_rows[row], oracle(rows[row], parameters, [7, *path]))
    first = shaper(parameters).shape_ends(rows[:1], text([7]), NOTHING, ())
    torch.testing.assert_close(first[0], oracle(rows[0], parameters, [7]))


def test_the_models_own_logits_stay_as_they_are():
    for rows in (logits_of(2), logits_of(2).double()):
        before = rows.clone()
        found = shaper(KINDS["all"]).shape(rows, text([5]), Proposal((7,)))
        assert torch.equal(rows, before)
        assert found.dtype == rows.dtype


@pytest.mark.parametrize(
    ("kind", "processor"),
    [
        ("repetition", RepetitionPenaltyLogitsProcessor(1.3)),
        ("bias", SequenceBiasLogitsProcessor({(1,): 5.0, (7,): -100.0})),
        ("min_tokens", MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [*ENDS])),
    ],
)
@pytest.mark.parametrize("answer", [[], [7, 7], [8, 9, 10, 11]])
def test_it_is_what_the_library_does(kind, processor, answer):
    rows = logits_of(1)
    ids = torch.tensor([[*PROMPT, *answer]])
    found = shaper(KINDS[kind]).shape(rows, text(answer), NOTHING)
    assert torch.equal(found, processor(ids, rows.clone()))
