"""Through gateway and orchestrator: which special tokens reach a target, and which are letters."""

from __future__ import annotations

from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from paceline.v1.model_service_pb2 import ChatTemplate
from paceline_gateway.process import HttpProcess
from paceline_gateway.settings import GatewaySettings
from support.fake_text import byte_tokenizer
from support.orchestrating import orchestrating, targets

END = "<|end|>"
TEMPLATE = ChatTemplate(
    fingerprint="t",
    source="{% for m in messages %}{{ m.role }}: {{ m.content | trim }}<|end|>{% endfor %}",
    special_tokens=[END],
)


@asynccontextmanager
async def asking():
    """Yield what posts a body and returns the token ids that the target got, and the answer."""
    models = targets(1)
    models[0].chat_template = TEMPLATE
    async with orchestrating(targets=models) as system:
        settings = GatewaySettings(listen="127.0.0.1:0", orchestrators=(system.address,))
        process = HttpProcess(settings, registry=CollectorRegistry())
        await process.begin()
        url = f"http://{process.addresses['address']}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=90) as client:
                model = (await client.get("/v1/models")).json()["data"][0]["id"]

                async def ask(path, **body):
                    before = len(models[0].calls)
                    content = {"model": model, "max_tokens": 1, **body}
                    answer = await client.post(path, json=content)
                    calls = models[0].calls[before:]
                    return [list(it.call.token_ids) for it in calls[:1]], answer

                yield ask
        finally:
            await process.finish(drain=False)


def letters(text):
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.encode_special_tokens = True
    return tokenizer.encode(text, add_special_tokens=False).ids


async def test_what_people_say_of_special_tokens_is_letters_and_the_templates_own_count():
    end = byte_tokenizer().token_to_id(END)
    said = [
        {"role": "user", "content": f" Why {END}? "},
        {"role": "assistant", "content": f"{END}"},
        {"role": "user", "content": "And now?"},
    ]
    async with asking() as ask:
        (asked,), answer = await ask("/v1/chat/completions", messages=said)
    expected = [
        *letters(f"user: Why {END}?"), end, *letters(f"assistant: {END}"), end,
        *letters("user: And now?"), end,
    ]  # fmt: skip
    assert asked == expected
    assert answer.json()["usage"]["prompt_tokens"] == len(expected)


@pytest.mark.parametrize(
    ("extension", "is_parsed"), [({}, True), ({"parse_special_tokens": False}, False)]
)
async def test_a_prompt_of_completions_has_special_tokens_unless_its_caller_says_no(
    extension, is_parsed
):
    end = byte_tokenizer().token_to_id(END)
    async with asking() as ask:
        (asked,), _ = await ask("/v1/completions", prompt=f"a{END}b", paceline=extension)
    assert asked == ([*letters("a"), end, *letters("b")] if is_parsed else letters(f"a{END}b"))


async def test_a_suffix_is_refused_where_the_tokenizer_has_no_tokens_for_a_gap():
    async with asking() as ask:
        calls, answer = await ask("/v1/completions", prompt="a", suffix="b")
    assert not calls
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported", "suffix")
    assert error["message"].startswith("suffix: the model's tokenizer has no tokens")
