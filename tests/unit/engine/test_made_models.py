"""The folders that tests make are what the library takes them for, and say their text."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline_contract.sampling import SamplingParameters
from paceline_engine.model_files.files import find_model_files
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.made_models import KINDS, make


@pytest.fixture(params=KINDS)
def made(request, tmp_path):
    return make(request.param, tmp_path / "model")


def prompt_ids(made):
    return made.tokenizer.encode(made.prompt, add_special_tokens=False).ids


def test_the_library_says_the_text_and_ends_there(made):
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    prompt = prompt_ids(made)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=[*made.end_ids]
    )
    *text, end = output[0, len(prompt) :].tolist()
    assert tuple(text) == made.token_ids
    assert end in made.end_ids


def test_our_backend_says_the_text_and_knows_its_ends(made):
    backend = TransformersBackend(str(made.folder))
    text = ModelText(backend, SessionSpec(sampling=SamplingParameters(), reserve_length=64))
    told = text.draft_chain(prompt_ids(made), count=len(made.token_ids) + 1)
    assert tuple(told[:-1]) == made.token_ids
    assert {*backend.description.eos_token_ids} == made.end_ids
    assert told[-1] in made.end_ids


def test_names_template_and_tokenizer_are_those_that_the_library_finds(made):
    files = find_model_files(str(made.folder))
    library = AutoTokenizer.from_pretrained(made.folder)
    # A class of the library may have a name for a token that this tokenizer does not have.
    vocabulary = made.tokenizer.get_vocab()
    known = {name: it for name, it in library.special_tokens_map.items() if it in vocabulary}
    assert files.tokens.named == known
    expected = library.get_chat_template() if library.chat_template else None
    assert (files.chat_template and files.chat_template.source) == expected
    assert library(made.prompt, add_special_tokens=False).input_ids == prompt_ids(made)
