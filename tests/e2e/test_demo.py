"""`make demo`, shortened: what everybody runs first."""

from __future__ import annotations

import os
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import widen
from support.gguf_files import GgufParts, write_gguf
from support.smollm2_folder import smollm2_folder
from support.tiny_models import build_tokenizer

# It starts many processes; beside other tests, which also do, it takes ten times as long as alone.
_SECONDS = 800
pytestmark = pytest.mark.timeout(_SECONDS + 100)

QUESTION = "What is the capital of France, and what is it known for?"


def demo(models, output, *options):
    """Run the demo, check what it always shows, and return its output."""
    command = [sys.executable, "-m", "paceline_cli", "demo", "--max-tokens=8", *options]
    shown = subprocess.run(
        [*command, f"--models={models}", f"--output-directory={output}"],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    race = f"up --http 127.0.0.1:8000 --models {models}"
    for part in ("1. Real models", "2. SIMULATED", race, "Every output was identical to plain"):
        assert part in shown.stdout
    for name in ("timeline.svg", "timeline-simulated.svg"):
        assert ET.parse(output / name).getroot().tag.endswith("svg")
    return shown.stdout


@pytest.mark.long
def test_the_demo_streams_compares_and_draws(tmp_path):
    models = tmp_path / "models"
    widen.main(["--output", str(models)])
    shown = demo(models, tmp_path, "--prompts=1")
    assert "2 targets of 115 million weights (python-target), and a drafter of 1 million" in shown


@pytest.mark.long
@pytest.mark.parametrize("template", [None, "{{ messages[0]['content'] }}<|end|>"])
def test_the_demo_of_one_model_asks_by_its_template_and_continues_a_text(template, tmp_path):
    torch.manual_seed(1)
    tokenizer = build_tokenizer(300)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    parts = GgufParts(values={"tokenizer.chat_template": template})
    shown = demo(write_gguf(tmp_path / "tiny.gguf", model, tokenizer, parts), tmp_path)
    assert "2 targets of 0 million weights (tiny.gguf), and drafts from the text itself" in shown
    assert (QUESTION in shown) == (template is not None)
    assert shown.count("-> 8 tokens, the same; tokens/s: non-SI ") == (4 if template else 1)
    assert '{"name": "Grace",' in shown


@pytest.mark.long
def test_the_demo_of_a_real_model_answers(tmp_path):
    shown = demo(smollm2_folder(), tmp_path, "--prompts=1")
    assert f"{QUESTION}\nThe capital of France is Paris." in shown
    targets = "2 targets of 135 million weights (smollm2)"
    has_room = (os.cpu_count() or 1) > 2  # else a drafter would take the targets' time
    drafts = (
        "a drafter of 35 million weights beside Max-Gram" if has_room else "drafts from the text"
    )
    assert f"{targets}, and {drafts}" in shown
