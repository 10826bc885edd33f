"""A target that dies takes its LoRA adapters along: a request goes on where its adapter is."""

from __future__ import annotations

import pytest

from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.lora_folders import merge, write_lora
from support.processes import ServerProcess
from support.streams import at_work, disturbed
from support.system import System
from unit.engine.conftest import continuation

PROMPT = [5, 6, 7, 8, 9, 10, 11]
TOKENS = 300
# A busy machine may take so long to strike that the stream is over.
ATTEMPTS = 4


@pytest.fixture(scope="module")
def adapter(tiny_pair, tmp_path_factory):
    return write_lora(tmp_path_factory.mktemp("lora") / "law", tiny_pair.target)


@pytest.fixture(scope="module")
def text(tiny_pair, adapter, tmp_path_factory):
    folder = merge(tiny_pair.target, adapter, tmp_path_factory.mktemp("merged") / "law")
    model = ModelText(TransformersBackend(str(folder)), SessionSpec(400))
    return tuple(continuation(model, PROMPT, TOKENS))


@pytest.fixture(scope="module")
def whole(tiny_pair, adapter):
    """One target with the model alone, and two with the adapter; a drafter without it."""

    def server(role, index, *flags):
        model = f"--model={getattr(tiny_pair, role)}"
        return ServerProcess(role, model, *flags, name=f"{role}-{index}")

    system = System(
        drafters=[server("drafter", 0)],
        targets=[
            server("target", 0),
            *(server("target", index, f"--lora=law={adapter}") for index in (1, 2)),
        ],
    )
    with system.running():
        yield system


def test_a_target_killed_mid_stream_is_replaced_by_one_with_the_adapter(whole, text):
    whole.mend()
    plain, *able = whole.targets

    def strike():
        at_work(whole, able).kill()

    asked = {"lora": "law", "max_tokens": TOKENS, "ignore_eos": True, "timeout": 90}
    for _ in range(ATTEMPTS):
        with whole.client() as client:
            stream = client.generate(PROMPT, strategy="distributed", targets=1, **asked)
            done = disturbed(stream, strike, after=20)
        assert done.token_ids == text
        assert not plain.metric("paceline_sessions_opened_total")
        if done.finished.statistics.fallbacks.get("target_lost"):
            return
        whole.mend()
    pytest.fail(f"none of {ATTEMPTS} streams has felt it")
