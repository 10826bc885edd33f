"""A real model in a GGUF file chats through real processes, and each strategy says the same.

The drafter is the one that is shipped for it.
"""

from __future__ import annotations

import json

import gguf
import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

import drafter_card
import smollm2
import smollm2_drafter
from paceline import AsyncClient, DrafterKind, Strategy
from paceline_engine.loading import LoadOptions, load_backend
from paceline_engine.model_files.files import find_model_files
from paceline_local.bundled import find_served_models
from paceline_local.models import NOTHING_KEPT
from paceline_local.system import LocalSystem, LocalSystemConfig
from support.smollm2_folder import smollm2_folder

CARD = smollm2_drafter.SHIPPED / smollm2_drafter.CARD
TURN = "<|im_start|>{}\n{}<|im_end|>\n"
SYSTEM = TURN.format(
    "system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
QUESTIONS = ["What is the capital of France?", "Write three words that rhyme with 'cat'."]
TOKENS = 24


HOW = [
    (Strategy.AUTOREGRESSIVE, None),
    (Strategy.SPECULATIVE, DrafterKind.MAX_GRAM),
    (Strategy.SPECULATIVE, DrafterKind.SERVER),
    (Strategy.DISTRIBUTED, DrafterKind.SERVER_AND_MAX_GRAM),
    (Strategy.AUTO, None),
]


@pytest.fixture(scope="module")
def model_folder():
    """Give the folder that `make smollm2` makes; skip where the model cannot be fetched."""
    return smollm2_folder()


def read(path):
    """Load the file's numbers into the library's model, by a way that has nothing of ours."""
    reader = gguf.GGUFReader(path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    stored = {each.name: each for each in reader.tensors}
    for name, weight in model.named_parameters():
        own = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        numbers = gguf.dequantize(stored[own].data, stored[own].tensor_type)
        if own.endswith(("attn_q.weight", "attn_k.weight")):
            # Row 2 i of a head is row i of its first half, row 2 i + 1 that of its second.
            heads = numbers.reshape(-1, 64, 576)
            numbers = np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(-1, 576)
        weight.data.copy_(torch.from_numpy(numbers.copy()))
    return model.eval()


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_each_strategy_answers_as_the_library_does(model_folder):
    tokenizer = Tokenizer.from_str(find_model_files(str(model_folder)).tokenizer.decode())
    reference = read(model_folder / smollm2.MODEL)
    prompts = [
        SYSTEM + TURN.format("user", question) + "<|im_start|>assistant\n" for question in QUESTIONS
    ]
    served = find_served_models(model_folder)
    options = ("--dtype=float32", NOTHING_KEPT)
    config = LocalSystemConfig(
        targets=2,
        drafters=1,
        target_arguments=(f"--model={served.target}", *options),
        drafter_arguments=(f"--model={served.drafter}", *options),
        gateway_listen="127.0.0.1:0",
    )
    async with (
        LocalSystem(config) as system,
        AsyncClient(system.orchestrator_address) as client,
    ):
        saved = 0
        for prompt, question in zip(prompts, QUESTIONS, strict=True):
            ids = tokenizer.encode(prompt).ids
            made = reference.generate(
                torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2
            )[0, len(ids) :].tolist()
            for strategy, kind in HOW:
                stream = client.generate(
                    prompt,
                    strategy=strategy,
                    drafter=kind,
                    max_tokens=TOKENS,
                    parse_special_tokens=True,
                )
                done = await stream.collect()
                assert done.token_ids == tuple(made), (strategy, kind)
                if kind is DrafterKind.SERVER:
                    saved += done.finished.statistics.accepted_token_count
            answered = await chat(system.gateway.address, question)
            message = answered["choices"][0]["message"]["content"]
            assert message == tokenizer.decode(made)
        assert (
            "Paris"
            in (await chat(system.gateway.address, QUESTIONS[0]))["choices"][0]["message"][
                "content"
            ]
        )
        assert saved >= TOKENS // 2, "the drafter knows what its target says"


@pytest.mark.long
def test_the_cards_numbers_hold_on_some_of_its_texts(model_folder):
    measured = json.loads(CARD.read_text())["measured"]
    models = [
        load_backend(LoadOptions(model=str(each), dtype="float32", threads=1))
        for each in (model_folder, model_folder / "drafter")
    ]
    for kind, prompts in drafter_card.read_prompts(str(model_folder)).items():
        row = drafter_card.measure(
            *models, prompts[:4], tokens=16, sampling=drafter_card.SAMPLINGS["greedy"]
        )
        card = measured[f"{kind}, greedy"]
        assert card["acceptance"] > 0.5
        # The standard deviation of 64 tokens is 0.06.
        assert row["acceptance"] == pytest.approx(card["acceptance"], abs=0.2)


async def chat(address, question):
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    async with httpx.AsyncClient(timeout=120) as browser:
        answer = await browser.post(f"http://{address}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text)
