"""What a server says of its model, and its tokenizer."""

from __future__ import annotations

import hashlib
from importlib import metadata

import pytest

from paceline.errors import UnsupportedError
from paceline.v1 import model_service_pb2, sampling_pb2
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.backend import ChatTemplate, TokenMemory
from paceline_model_server import loading
from paceline_model_server.settings import ModelServerSettings
from support.model_contract import a_host, connected
from support.model_servers import DRAFTER, TARGET, decoded


@pytest.mark.parametrize("role", [TARGET, DRAFTER], ids=lambda role: role.name)
async def test_a_server_describes_its_model_and_role(role):
    async with connected(role, a_host(session_limit=7, token_budget=900)) as client:
        assert client.info.role == role.wire
        assert (client.info.session_limit, client.info.token_budget) == (7, 900)
        assert client.info.fingerprint
        assert client.info.incarnation
        assert client.info.version == metadata.version("paceline")
        assert client.info.verification_rules == [sampling_pb2.VERIFICATION_RULE_EXACT]


async def test_a_server_says_the_token_budget_that_its_memory_allows():
    def load() -> SimulatedBackend:
        backend = SimulatedBackend(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
        memory = TokenMemory(free_bytes=1000, usable_share=0.5, bytes_per_token=5)
        backend.token_memory = lambda: memory
        return backend

    limits = HostLimits(warm_up_rounds=0, fits_memory=True)
    async with connected(TARGET, ModelHost(load, limits=limits)) as client:
        assert client.info.token_budget == 100


@pytest.mark.parametrize(
    ("settings", "token_budget", "fits_memory"),
    [
        ({"model": "somewhere"}, 1 << 20, True),
        ({"model": "somewhere", "token_budget": 1 << 22}, 1 << 22, False),
        ({"backend": "simulated"}, 1 << 17, False),
        ({"backend": "simulated", "token_budget": 5}, 5, False),
    ],
)
def test_memory_decides_the_token_budget_of_a_real_model_unless_it_is_said(
    settings, token_budget, fits_memory
):
    host = loading.new_host(ModelServerSettings(**settings), role="target", on_failure=print)
    assert (host.limits.token_budget, host.limits.fits_memory) == (token_budget, fits_memory)


async def test_the_tokenizer_comes_in_chunks_under_its_digest(target):
    request = model_service_pb2.GetTokenizerRequest()
    chunks = [chunk async for chunk in target.model.GetTokenizer(request, timeout=60)]
    content = b"".join(chunk.data for chunk in chunks)
    assert chunks[0].total_bytes == len(content)
    assert chunks[0].tokenizer_fingerprint == hashlib.sha256(content).hexdigest()
    assert chunks[0].tokenizer_fingerprint == target.info.tokenizer_fingerprint
    assert all(0 < len(chunk.data) <= 256 * 1024 for chunk in chunks)


async def test_a_large_tokenizer_is_cut_at_256_kibibytes():
    host = a_host(parts={"tokenizer": b"x" * (600 * 1024)})
    async with connected(TARGET, host) as target:
        request = model_service_pb2.GetTokenizerRequest()
        chunks = [chunk async for chunk in target.model.GetTokenizer(request, timeout=60)]
    assert [len(chunk.data) // 1024 for chunk in chunks] == [256, 256, 88]


async def test_a_chat_template_is_told_as_it_lies_beside_the_model():
    ids = {"<s>": 1, "</s>": 2, "<tool_call>": 7}
    template = ChatTemplate("name", "{{ bos_token }}", {"bos_token": "<s>"}, ("<s>", "</s>"), ids)
    host = a_host(parts={"chat_template": template})
    async with connected(TARGET, host) as target:
        response = await target.model.GetChatTemplate(
            model_service_pb2.GetChatTemplateRequest(), timeout=60
        )
    told = response.chat_template
    assert (told.fingerprint, told.source) == ("name", "{{ bos_token }}")
    assert (dict(told.named_tokens), [*told.special_tokens]) == (
        {"bos_token": "<s>"},
        ["<s>", "</s>"],
    )
    assert dict(told.added_token_ids) == ids


async def test_a_model_without_a_chat_template_says_so():
    async with connected(TARGET, a_host()) as target:
        with pytest.raises(UnsupportedError), decoded():
            await target.model.GetChatTemplate(
                model_service_pb2.GetChatTemplateRequest(), timeout=60
            )


async def test_a_model_without_a_tokenizer_says_so():
    host = a_host(parts={"tokenizer": None})
    async with connected(TARGET, host) as target:
        with pytest.raises(UnsupportedError), decoded():
            async for _ in target.model.GetTokenizer(
                model_service_pb2.GetTokenizerRequest(), timeout=60
            ):
                pass
