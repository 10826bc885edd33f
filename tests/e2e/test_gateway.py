"""OpenAI's own client, streaming and not, against a gateway over real processes and models."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from support.processes import GatewayProcess, running
from support.streams import kill_who_decodes
from support.system import MODELS, System, bundled_model
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
TEMPLATE = """\
{% for message in messages %}
# {{ message.role }}: {{ message.content }}
{% endfor %}
{% if add_generation_prompt %}
{{ eos_token }}def {% endif %}
"""
CHAT = [{"role": "user", "content": "a function that adds"}]
PROMPT = "def fibonacci(n):"
SAMPLED = {"seed": 7, "temperature": 0.8, "top_p": 0.9}
# A stream may be over before a busy machine has killed its orchestrator.
ATTEMPTS = 4


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """Two orchestrators over the bundled models, of which the target has a chat template."""
    directory = tmp_path_factory.mktemp("models") / "chatting"
    shutil.copytree(MODELS / "python-target", directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    system = System(
        drafters=[bundled_model("drafter")],
        targets=[bundled_model("target", index, directory=directory) for index in range(2)],
        orchestrator_count=2,
    )
    with system.running():
        yield system


@pytest.fixture(scope="module")
def gateway(chatting):
    with served(chatting) as process:
        yield process


@contextmanager
def served(system):
    addresses = ",".join(it.address for it in system.orchestrators)
    process = GatewayProcess(f"--orchestrators={addresses}")
    with running(process):
        yield process


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="-", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("sampling", [{"temperature": 0}, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_the_one_that_grpc_clients_get(chatting, client, sampling):
    with chatting.client() as direct:
        expected = direct.generate(PROMPT, max_tokens=48, **sampling).text()
    asked = {"model": "chatting", "prompt": PROMPT, "max_tokens": 48, **sampling}
    whole = client.completions.create(**asked)
    streamed = [it.choices[0].text for it in client.completions.create(**asked, stream=True)]
    assert whole.choices[0].text == "".join(streamed) == expected
    assert len(streamed) > 2
    assert whole.usage.completion_tokens == 48


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_says_where_its_text_begins(client, stream):
    asked = {"model": "chatting", "prompt": PROMPT, "max_tokens": 32, "temperature": 0}
    answer = client.completions.create(**asked, logprobs=1, stream=stream)
    parts = list(answer) if stream else [answer]
    told = [it.choices[0].logprobs for it in parts if it.choices and it.choices[0].logprobs]
    offsets = [offset for it in told for offset in it.text_offset]
    text = "".join(it.choices[0].text for it in parts if it.choices)
    # The text is plain ASCII, so each token has some of it.
    assert len(set(offsets)) == 32
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[-1] < len(text)) == (0, True)


@pytest.mark.parametrize("strategy", ["autoregressive", "speculative", "distributed"])
def test_a_chat_is_the_templates_prompt_continued_with_every_strategy(chatting, client, strategy):
    written = "# user: a function that adds\n<|endoftext|>def "
    with chatting.client() as direct:
        expected = direct.generate(
            written,
            max_tokens=32,
            stop="\n\n",
            add_special_tokens=False,
            parse_special_tokens=True,
            **SAMPLED,
        ).collect()
    asked = {
        "model": "chatting",
        "messages": CHAT,
        "max_completion_tokens": 32,
        "stop": ["\n\n"],
        "extra_body": {"paceline": {"strategy": strategy}},
        **SAMPLED,
    }
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True)
    streamed = "".join(it.choices[0].delta.content or "" for it in stream)
    assert whole.choices[0].message.content == streamed == expected.text
    assert whole.usage.prompt_tokens == expected.started.prompt_token_count
    assert whole.system_fingerprint == expected.started.model_fingerprint
    assert whole.model_extra["paceline"]["choices"][0]["strategy"] == strategy


def test_log_probabilities_are_the_targets(chatting, client):
    with chatting.client() as direct:
        chunks = direct.generate(PROMPT, max_tokens=8, logprobs=True, **SAMPLED).collect().chunks
    expected = [value for chunk in chunks for value in chunk.logprobs]
    ids = [f"token_id:{token_id}" for chunk in chunks for token_id in chunk.token_ids]
    asked = {"model": "chatting", "max_tokens": 8, **SAMPLED}
    create = client.completions.create
    by_number = {"return_tokens_as_token_ids": True}
    told = create(prompt=PROMPT, logprobs=0, extra_body=by_number, **asked).choices[0].logprobs
    assert told.tokens == ids
    assert told.token_logprobs == pytest.approx(expected, abs=1e-4)
    echoed = create(prompt=PROMPT, logprobs=0, echo=True, **asked).choices[0]
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.text.startswith(PROMPT)
    assert echoed.logprobs.token_logprobs[-8:] == pytest.approx(expected, abs=1e-4)
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, **asked)
    assert len(chat.choices[0].logprobs.content) == 8


def test_a_client_that_leaves_leaves_nothing_at_the_model_servers(chatting, client):
    stream = client.completions.create(
        model="chatting",
        prompt=PROMPT,
        max_tokens=900,
        stream=True,
        extra_body={"paceline": {"ignore_eos": True}},
    )
    next(iter(stream))
    stream.close()
    for server in chatting.models:
        for name in ("paceline_sessions_active", "paceline_calls_live"):
            eventually(
                lambda server=server, name=name: not server.metric(name),
                what=f"{server.name} has no more {name}",
            )


def test_an_orchestrator_that_is_killed_in_mid_stream_is_not_noticed(chatting):
    with chatting.client() as direct:
        expected = direct.generate(PROMPT, max_tokens=200, ignore_eos=True, **SAMPLED).text()
    with served(chatting) as process:
        resumed = 0
        for _ in range(ATTEMPTS):
            assert killed_in_mid_stream(chatting, process) == expected
            chatting.mend()
            resumed = process.metric("paceline_http_resumed_generations_total")
            if resumed:
                break
        assert resumed
        process.terminate()
        assert process.wait() == 0


def killed_in_mid_stream(system, process):
    """Return the text of a stream whose orchestrator is killed, unless it is over first."""
    with openai.OpenAI(base_url=f"{process.url}/v1", api_key="-", max_retries=0) as client:
        stream = client.completions.create(
            model="chatting",
            prompt=PROMPT,
            max_tokens=200,
            stream=True,
            extra_body={"paceline": {"ignore_eos": True}},
            **SAMPLED,
        )
        text = ""
        for count, event in enumerate(stream):
            text += event.choices[0].text
            if count == 5:
                kill_who_decodes(system)
    return text


def test_the_pages_python_example_streams_text(chatting, gateway):
    page = (ROOT / "docs" / "http.md").read_text()
    example, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "http://127.0.0.1:8000" in example
    ran = subprocess.run(
        (sys.executable, "-c", example.replace("http://127.0.0.1:8000", gateway.url)),
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    with chatting.client() as direct:
        assert ran.stdout == direct.generate("def fibonacci(n):", max_tokens=64).text()
