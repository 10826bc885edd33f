"""LoRA adapters over HTTP and on the command line, with real processes."""

from __future__ import annotations

import json
import subprocess
import sys

import openai
import pytest
from tokenizers import Tokenizer

from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.lora_folders import merge, write_lora
from support.processes import GatewayProcess, ServerProcess, last_words, running
from support.system import System
from support.tiny_models import tiny_pair
from unit.engine.conftest import continuation

__all__ = ["tiny_pair"]

PROMPT = "def draft(prefix)"
TOKENS = 24


@pytest.fixture(scope="module")
def folders(tiny_pair, tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    return {
        name: write_lora(root / name, tiny_pair.target, seed=seed)
        for seed, name in enumerate(("law", "verse"))
    }


@pytest.fixture(scope="module")
def texts(tiny_pair, folders, tmp_path_factory):
    """What the model says with each adapter, and as "target" without one."""
    root = tmp_path_factory.mktemp("merged")
    tokenizer = Tokenizer.from_file(str(tiny_pair.target / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    models = {name: merge(tiny_pair.target, it, root / name) for name, it in folders.items()}

    def text(folder):
        model = ModelText(TransformersBackend(str(folder)), SessionSpec(200))
        ids = continuation(model, prompt, TOKENS)
        return tokenizer.decode([*prompt, *ids]).removeprefix(tokenizer.decode(prompt))

    return {name: text(it) for name, it in {**models, "target": tiny_pair.target}.items()}


@pytest.fixture(scope="module")
def system(tiny_pair, folders):
    lora = [f"--lora={name}={folder}" for name, folder in folders.items()]
    system = System(
        drafters=[ServerProcess("drafter", f"--model={tiny_pair.drafter}", name="drafter-0")],
        targets=[ServerProcess("target", f"--model={tiny_pair.target}", *lora, name="target-0")],
    )
    with system.running():
        yield system


def test_over_http_the_model_of_a_request_is_the_adapter(system, texts):
    gateway = GatewayProcess(f"--orchestrators={system.orchestrators[0].address}")
    with (
        running(gateway),
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0) as client,
    ):
        assert [it.id for it in client.models.list()] == ["target", "law", "verse"]
        for name, text in texts.items():
            done = client.completions.create(
                model=name,
                prompt=PROMPT,
                max_tokens=TOKENS,
                temperature=0,
                extra_body={"paceline": {"ignore_eos": True}},
            )
            assert (done.model, done.choices[0].text) == (name, text)
        with pytest.raises(openai.NotFoundError, match="there is no model 'prose' here"):
            client.completions.create(model="prose", prompt=PROMPT)
    assert len({*texts.values()}) == 3


def test_on_the_command_line_a_request_names_its_adapter(system, texts):
    def run(*arguments):
        address = system.orchestrators[0].address
        command = (sys.executable, "-m", "paceline_cli", *arguments, "--address", address)
        return subprocess.run(command, capture_output=True, text=True, timeout=90)

    asked = ("generate", PROMPT, f"--max-tokens={TOKENS}", "--ignore-eos")
    for name in ("law", "verse"):
        assert texts[name] in run(*asked, "--lora", name).stdout
    lost = run(*asked, "--lora", "prose")
    assert lost.returncode
    assert "no target has a LoRA adapter 'prose'" in lost.stderr
    assert json.loads(run("info", "--json").stdout)["lora_adapters"].keys() == {"law", "verse"}
    assert "adapters    law, verse" in run("info").stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora=target={lora}",), "an adapter is called 'target', as the model is"),
        (("--lora={lora}",), "is not NAME=DIR"),
        (("--lora=a={lora}", "--backend=simulated"), "--lora needs --backend transformers"),
        (("--lora=a={lora}", "--then=max-gram"), "--lora and --then do not go together"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(tiny_pair, folders, flags, words):
    given = [it.format(lora=folders["law"]) for it in flags]
    assert words in last_words("target", f"--model={tiny_pair.target}", *given)
