"""One system of real processes with the bundled models, for all tests of this ring."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from support.cells import EqualityProof
from support.oracle import Oracle
from support.system import MODELS, bundled_system
from support.tiny_models import sixteen_token_model, tiny_pair

__all__ = ["sixteen_token_model", "tiny_pair"]


@pytest.fixture(scope="session")
def bundled():
    with bundled_system(target_count=3).running() as system:
        yield system


@pytest.fixture(scope="session")
def oracle():
    return Oracle(MODELS / "python-target")


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_file(str(MODELS / "python-target" / "tokenizer.json"))


@pytest.fixture(scope="session")
def proof(bundled, oracle, tokenizer):
    """Ways of decoding against plain decoding, which runs once for each text and sampling."""
    return EqualityProof(bundled, oracle, tokenizer)


@pytest.fixture(scope="session")
def prompts():
    """Prompts from files that the models were not trained on."""
    lines = (MODELS / "prompts.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]
