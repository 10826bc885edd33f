"""The shipped EAGLE head guesses what SmolLM2 says, and changes nothing of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import smollm2
from paceline_contract.sampling import SamplingParameters
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "smollm2"
PROMPT = "<|im_start|>user\nWrite a Python function that reverses a list.<|im_end|>\n"
TOKENS = 48


@pytest.fixture(scope="module")
def target():
    if smollm2.main(["--output", str(FOLDER)]):
        pytest.skip("SmolLM2 cannot be fetched here")
    (path,) = FOLDER.rglob("*.gguf")
    return TransformersBackend(str(path), adapter=str(ROOT / "models" / "smollm2-eagle"))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_forward_decides_more_than_one_token_and_none_is_another(target, temperature):
    assert target.tokenizer is not None
    tokenizer = Tokenizer.from_buffer(target.tokenizer)
    prompt = tokenizer.encode(f"{PROMPT}<|im_start|>assistant\n", add_special_tokens=False).ids
    spec = SessionSpec(512, SamplingParameters(temperature), seed=5)
    alone, guessing = ModelText(target, spec), ModelText(target, spec)
    plain: list[int] = []
    while len(plain) < TOKENS:
        plain.append(alone.judge([*prompt, *plain]).next_token)
    found: list[int] = []
    forwards, decoding = 0, guessing.decode(prompt, guesses=True)
    while len(found) < TOKENS:
        decided, _ = next(decoding)
        found += decided
        forwards += 1
    assert found[:TOKENS] == plain
    assert len(found) / forwards > 1.2
