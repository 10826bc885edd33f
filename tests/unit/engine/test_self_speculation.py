"""Decoding with streams gives what plain decoding gives, whatever the guesses and the pruning."""

from __future__ import annotations

import pytest
import torch

from paceline_engine.terms.rank_paths import cartesian_tree
from paceline_training.continuations import Continuations, continue_greedily
from paceline_training.hit_rates import guess_ranks, tokens_per_forward
from support.self_speculation import StreamingDecoder
from support.tiny_adapters import random_adapter, tiny_model

PROMPT = [3, 1, 4, 1, 5]
COUNT = 24


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def plain(model):
    """Far enough for a forward that decides more than is asked for."""
    texts = continue_greedily(model, torch.tensor([PROMPT]), length=COUNT + 8)
    return texts.token_ids[0, len(PROMPT) :].tolist()


# All 40 tokens as first guess: so something is accepted in every forward, of random weights too.
@pytest.mark.parametrize("threshold", [None, 0.0, 0.01, 0.1, 1.1])
@pytest.mark.parametrize(
    ("reach", "layers", "widths"),
    [(1, 1, (40,)), (2, 2, (40, 3)), (3, 3, (40, 1, 1)), (3, 2, (2, 2, 2)), (4, 4, (1, 1, 1, 1))],
)
def test_the_output_is_that_of_plain_decoding(reach, layers, widths, threshold, model, plain):
    streams = random_adapter("streams", model, reach=reach, layers=layers)
    decoder = StreamingDecoder(model, streams, cartesian_tree(widths), threshold)
    tokens = decoder.decode(PROMPT, count=COUNT)
    assert tokens == plain[: len(tokens)]
    # What a layer holds is the text before the next root: nothing of any tree is left.
    assert set(decoder.lengths) == {len(PROMPT) + len(tokens) - 1}
    if threshold is not None and threshold > 1:
        assert decoder.forwards == len(tokens)
        assert set(decoder.row_counts) == {1}
    elif threshold in {None, 0.0} and widths[0] == 40:
        assert decoder.forwards <= (len(tokens) + 2) // 2


def test_forwards_are_as_many_as_the_measured_hit_rates_say(model, plain):
    streams = random_adapter("streams", model, reach=2)
    paths = cartesian_tree((40, 5))
    decoder = StreamingDecoder(model, streams, paths)
    tokens = decoder.decode(PROMPT, count=COUNT)
    # The first of them guesses nothing yet.
    decoded, forwards = len(tokens) - 1, decoder.forwards - 1
    text = torch.tensor([[*PROMPT, *plain[: len(tokens) + 1]]])
    ranks = guess_ranks(streams, model, Continuations(text, len(PROMPT)))[:, :decoded]
    assert tokens_per_forward(ranks, paths) == pytest.approx(decoded / forwards)
