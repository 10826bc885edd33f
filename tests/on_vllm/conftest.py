"""vLLM itself, with the bundled target: `make test-vllm`, in an environment of its own."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from support.oracle import Oracle
from support.system import MODELS

MODEL = MODELS / "python-target"
# Some 5,000 tokens of cache, and prompts in parts of at most 192 rows.
OPTIONS = ("max_model_len=1024", "kv_cache_memory_bytes=130000000", "max_num_batched_tokens=192")


@pytest.fixture(scope="session")
def backend():
    from paceline_engine.vllm_backend.load import load_vllm

    return load_vllm(str(MODEL), capture=False, options=OPTIONS)


@pytest.fixture
def outputs(backend, monkeypatch):
    """What vLLM has answered since the test began."""
    seen = []
    step = backend.engine.step

    def watched():
        found = step()
        seen.extend(found)
        return found

    monkeypatch.setattr(backend.engine, "step", watched)
    return seen


@pytest.fixture(scope="session")
def oracle():
    return Oracle(MODEL)


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))
