import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_bench.pair.library import LibraryPair
from support.oracle import Oracle, Sampling

PROMPT = [5, 6, 7, 8, 9]
COUNT = 20


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return LibraryPair(
        str(tiny_pair.target),
        str(tiny_pair.drafter),
        dtype="float32",
        device="cpu",
        vocabulary_size=300,
    )


def saved_pair(model, tiny_pair, directory):
    """A pair of which both are this model."""
    model.save_pretrained(directory)
    shutil.copy(tiny_pair.target / "tokenizer.json", directory)
    return LibraryPair(
        str(directory), str(directory), dtype="float32", device="cpu", vocabulary_size=300
    )


@pytest.fixture(scope="module")
def oracle(tiny_pair):
    return tuple(Oracle(tiny_pair.target).decode(PROMPT, Sampling(), COUNT))


@pytest.mark.parametrize(
    "variant",
    [
        lambda pair: pair.bare_loop,
        lambda pair: pair.generate(),
        lambda pair: pair.assisted(2),
        lambda pair: pair.assisted(8),
        lambda pair: pair.prompt_lookup(),
    ],
    ids=["bare loop", "generate", "assisted 2", "assisted 8", "prompt lookup"],
)
def test_every_variant_gives_plain_decodings_tokens(pair, oracle, variant):
    assert variant(pair)(PROMPT, COUNT) == oracle


def test_forwards_of_the_target_are_counted(pair):
    before = pair.target_forward_count
    pair.bare_loop(PROMPT, 7)
    assert pair.target_forward_count == before + 7


def test_an_end_of_text_token_ends_no_text(tiny_pair, oracle, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target)
    model.generation_config.eos_token_id = oracle[2]
    pair = saved_pair(model, tiny_pair, tmp_path)
    assert pair.generate()(PROMPT, COUNT) == pair.assisted(4)(PROMPT, COUNT) == oracle


def test_a_token_beyond_the_tokenizer_is_never_chosen(tiny_pair, oracle, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_pair.target)
    with torch.no_grad():
        model.lm_head.weight[300:] = model.lm_head.weight[:20] * 10
    pair = saved_pair(model, tiny_pair, tmp_path)
    for variant in (pair.bare_loop, pair.generate(), pair.assisted(4)):
        assert variant(PROMPT, COUNT) == oracle
