"""Pages of listed origins may read answers; no others, and never with a browser's credentials."""

from __future__ import annotations

import pytest

from paceline_gateway.http.cors import check_origins
from support.gateway import gateway_over
from support.keys import SECRET, entry

APP, EVIL = "https://app.example", "https://evil.example"
ASKED = {"model": "fake", "prompt": "p"}
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def allowed(answer):
    return answer.headers.get("access-control-allow-origin")


async def test_a_listed_page_may_ask_and_read_and_another_may_not():
    async with gateway_over(cors_origin=(APP, "http://localhost:3000")) as gateway:
        for origin in (APP, "http://localhost:3000"):
            before = await gateway.http.options(
                "/v1/completions", headers={"origin": origin, **PREFLIGHT}
            )
            assert (before.status_code, allowed(before)) == (200, origin)
            assert "x-stainless-lang" in before.headers["access-control-allow-headers"]
            answer = await gateway.http.post(
                "/v1/completions", json=ASKED, headers={"origin": origin}
            )
            assert (answer.status_code, allowed(answer)) == (200, origin)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            refused = await gateway.http.post(
                "/v1/completions", json={}, headers={"origin": origin}
            )
            assert (refused.status_code, allowed(refused)) == (400, origin)
        count = len(gateway.requests)
        before = await gateway.http.options(
            "/v1/completions", headers={"origin": EVIL, **PREFLIGHT}
        )
        assert (before.status_code, allowed(before)) == (400, None)
        answer = await gateway.http.post("/v1/completions", json=ASKED, headers={"origin": EVIL})
        assert (answer.status_code, allowed(answer)) == (403, None)
        assert len(gateway.requests) == count


async def test_a_stream_is_readable_too():
    async with (
        gateway_over(cors_origin=(APP,)) as gateway,
        gateway.http.stream(
            "POST", "/v1/completions", json={**ASKED, "stream": True}, headers={"origin": APP}
        ) as answer,
    ):
        assert allowed(answer) == APP
        assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


async def test_without_a_list_nothing_is_said_of_origins():
    async with gateway_over() as gateway:
        before = await gateway.http.options("/v1/completions", headers={"origin": APP, **PREFLIGHT})
        assert (before.status_code, allowed(before)) == (405, None)


async def test_all_pages_may_ask_where_keys_are_demanded_and_none_with_a_browsers_credentials(
    tmp_path,
):
    (tmp_path / "keys").write_text(entry())
    async with gateway_over(api_keys=tmp_path / "keys", cors_origin=("*",)) as gateway:
        for headers in ({"authorization": f"Bearer {SECRET}"}, {}):
            answer = await gateway.http.post(
                "/v1/completions", json=ASKED, headers={"origin": EVIL, **headers}
            )
            assert answer.status_code == (200 if headers else 401)
            assert allowed(answer) == "*"
            assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "app.example",
        "https://app.example/",
        "https://App.example",
        "https://*.example",
        "https://app.example:443",
        "http://app.example:80",
        "https://user@app.example",
        "https://app.example, https://b.example",
    ],
)
def test_what_no_browser_calls_an_origin_is_refused_at_the_start(origin):
    with pytest.raises(ValueError, match="is no origin"):
        check_origins([APP, origin], needs_keys=True)


def test_all_origins_need_keys():
    check_origins(["*", "tauri://localhost", "http://[::1]:3000"], needs_keys=True)
    with pytest.raises(ValueError, match="needs --api-keys"):
        check_origins(["*"], needs_keys=False)
