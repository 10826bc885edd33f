"""A proxy in front ends TLS, and knows nothing of the gateway but what its answers say."""

from __future__ import annotations

import pytest

from support.gateway import gateway_over

CHAT = [{"role": "user", "content": "hello"}]
# What a proxy sends that was asked over TLS.
PROXIED = {"host": "llm.example", "x-forwarded-proto": "https", "authorization": "Bearer k"}
ASKED = {
    "/v1/completions": {"prompt": "p", "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": "p", "max_output_tokens": 1},
    "/paceline/generate": {"prompt": "p", "max_tokens": 1},
}


@pytest.fixture
async def gateway(tmp_path):
    keys = tmp_path / "keys.yaml"
    digest = "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a"  # of k
    keys.write_text(f"- name: me\n  sha256: {digest}\n")
    async with gateway_over(api_keys=keys) as gateway:
        yield gateway


async def test_a_slash_at_the_end_is_no_other_path_and_nothing_is_redirected(gateway):
    paths = [
        *("/v1/models", "/v1/models/fake", "/paceline/info", "/health/live", "/health/ready"),
        *("/paceline/page/page.js", ""),
    ]
    for path in paths:
        for slashes in ("", "/", "//"):
            answer = await gateway.http.get(path + slashes or "/", headers=PROXIED)
            assert answer.status_code == 200, path + slashes
    for path, asked in ASKED.items():
        answer = await gateway.http.post(
            f"{path}/", json={"model": "fake", **asked}, headers=PROXIED
        )
        assert answer.status_code == 200, path
    for path in ("/nowhere", "/nowhere/", "/v1/", "/v1/completions/nowhere/"):
        answer = await gateway.http.get(path, headers=PROXIED)
        assert answer.status_code == 404
        assert "location" not in answer.headers


async def test_no_stream_is_held_back_by_a_proxy_until_there_is_much_of_it(gateway):
    for path, asked in ASKED.items():
        body = {"model": "fake", "stream": True, **asked}
        answer = await gateway.http.post(path, json=body, headers=PROXIED)
        assert answer.headers["content-type"].startswith("text/event-stream"), path
        assert answer.headers["x-accel-buffering"] == "no", path
        assert answer.headers["cache-control"] == "no-cache", path
