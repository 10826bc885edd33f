"""A target of vLLM's in a whole system: every strategy says what plain decoding says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from on_vllm.conftest import MODEL, OPTIONS
from paceline import Strategy
from support.cells import SAMPLINGS, TOKENS, Cell, EqualityProof, Outcome
from support.equality import compare
from support.oracle import Oracle
from support.ports import free_address
from support.processes import ServerProcess
from support.system import System, bundled_model

SUITE = Path(__file__).parents[1] / "contract" / "model_servers"


def vllm_server(role, directory=MODEL, *, more=()):
    options = [f"--engine-option={each}" for each in (*OPTIONS, *more)]
    return ServerProcess(
        role,
        "--backend=vllm",
        f"--model={directory}",
        "--no-capture",
        "--debug-calls",
        *options,
        is_warm=False,
    )


@pytest.fixture(scope="module")
def system():
    target = vllm_server("target")
    drafter = bundled_model("drafter")
    with System(drafters=[drafter], targets=[target]).running() as system:
        yield system


@pytest.fixture(scope="module")
def proof(system, oracle, tokenizer):
    return EqualityProof(system, oracle, tokenizer)


@pytest.mark.parametrize("strategy", [Strategy.SPECULATIVE, Strategy.DISTRIBUTED])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_strategy_gives_the_tokens_of_plain_decoding(strategy, sampling, proof):
    outcome = Outcome()
    proof.run(Cell(strategy, 4, 1, sampling), ["def add(a, b):\n", "import os\n"], outcome)
    assert outcome.accepted
    assert outcome.positions


def test_streams_at_once_are_each_what_it_is_alone(system):
    prompts = [f"def function_{n}(x):\n" for n in range(8)]

    def text(prompt):
        with system.client() as client:
            return (
                client.generate(prompt, max_tokens=24, strategy=Strategy.AUTOREGRESSIVE)
                .collect()
                .text
            )

    alone = [text(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(text, prompts)) == alone


def test_a_vllm_server_keeps_the_contract_of_model_servers(system):
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *(SUITE, f"--target={system.targets[0].address}"),
            # Its block is longer than the texts of this model.
            "--deselect=tests/contract/model_servers/test_messages.py::test_the_longest_block_there_can_be_is_taken",
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 30


@pytest.fixture(scope="module")
def divisible(tmp_path_factory):
    """A small model with two heads, which two processes can have a part of."""
    return made_model(tmp_path_factory.mktemp("divisible"), seed=0)


def made_model(directory, *, seed):
    for file in MODEL.glob("*.json"):
        shutil.copy(file, directory)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def check_texts(target, directory):
    """Compare a target's texts, greedy and sampled, with those of plain decoding."""
    oracle = Oracle(directory)
    with System(drafters=[], targets=[target]).running() as system:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        proof = EqualityProof(system, oracle, tokenizer)
        for sampling, told in SAMPLINGS.items():
            prompt = "def add(a, b):\n"
            expected = [*oracle.decode(proof.ids(prompt), told, TOKENS)]
            actual = proof.plain(prompt, sampling)
            compare(oracle, proof.ids(prompt), told, expected=expected, actual=actual)


def test_a_model_that_is_divided_over_processes_is_decided_by_the_same_rule(divisible):
    """Rows are then decided in other processes, from which nothing but tokens comes back."""
    check_texts(vllm_server("target", divisible, more=("tensor_parallel_size=2",)), divisible)


@contextmanager
def ended(server):
    """End a server whatever happens."""
    try:
        yield server
    finally:
        server.stop()


def nodes(*directories):
    """Return the servers of a model over as many nodes; the first one serves."""
    port = free_address().rpartition(":")[2]
    count = len(directories)
    told = (f"nnodes={count}", "master_addr=127.0.0.1", f"master_port={port}")
    parts = (*told, f"tensor_parallel_size={count}")
    return [
        vllm_server("target", each, more=(*parts, f"node_rank={rank}"))
        for rank, each in enumerate(directories)
    ]


def test_a_model_over_two_nodes_is_decided_by_the_same_rule_and_its_nodes_end_together(divisible):
    leader, part = nodes(divisible, divisible)
    with ended(part.start()):
        check_texts(leader, divisible)
        assert '"event": "ready"' in part.log
        assert part.wait(60) == 1
        assert "the node that serves is gone" in part.log


def test_a_node_with_other_weights_computes_no_text(divisible, tmp_path):
    leader, part = nodes(divisible, made_model(tmp_path, seed=1))
    with ended(part.start()), ended(leader.start()):
        assert part.wait(120) == 1
        assert "they need the same files" in part.log
        assert leader.wait(60) == 1
