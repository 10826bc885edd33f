"""Any page in a browser can send requests to this machine; a gateway without keys takes its own."""

from __future__ import annotations

import json

import pytest

from paceline_gateway.errors import RequestError
from paceline_gateway.http.browsers import refuse_other_pages
from support.gateway import gateway_over
from support.keys import SECRET, entry

ASKED = json.dumps({"model": "fake", "prompt": "p"})
# What a browser sends without asking first.
SIMPLE = {"content-type": "text/plain"}
HERE = ["localhost", "localhost:8000", "LOCALHOST:8000", "127.0.0.1:8000", "127.8.0.1", "[::1]:80"]
ELSEWHERE = [
    "",
    "evil.example:8000",
    "localhost.evil.example",
    "10.0.0.1",
    "[::2]:80",
    "[",
    "x@y:z",
    "localhost:8000.evil.example",
    "user@localhost",
    "localhost.",
    "localhost:",
    "localhost:8000:8000",
    "127.0.0.1.evil.example",
    "evil.example.127.0.0.1",
    "127.1",
    "[127.0.0.1]",
    "[::1].evil.example",
    "[::1%25eth0]",
    "::1",
    "l\u00f6calhost",
]
OWN = ["http://localhost:8000", "http://LOCALHOST:8000"]
# Each is nearly http://localhost:8000.
NEAR_ORIGINS = [
    "http://localhost:8000.evil.example",
    "http://localhost.evil.example:8000",
    "http://evil.example/localhost:8000",
    "http://evil-localhost:8000",
    "http://localhost:80000",
    "http://localhost:800",
    "http://localhost",
    "http://localhost.:8000",
    "http://user@localhost:8000",
    "http://localhost:8000@evil.example",
    "http://localhost:8000/",
    "http://localhost:8000 http://evil.example",
    "http://[::1]:8000",
    "http://127.0.0.1:8000",
    "https://localhost:8000",
    "ftp://localhost:8000",
    "evil://localhost:8000",
    "localhost:8000",
    "//localhost:8000",
]


@pytest.mark.parametrize("host", HERE)
def test_this_machine_has_these_names(host):
    refuse_other_pages({"host": host}, is_local=True)
    refuse_other_pages({"host": host, "origin": f"http://{host.lower()}"}, is_local=True)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_another_name_is_refused_where_only_this_machine_can_reach_it(host):
    with pytest.raises(RequestError, match="not a name of this machine"):
        refuse_other_pages({"host": host}, is_local=True)
    refuse_other_pages({"host": host}, is_local=False)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:8001", ""])
@pytest.mark.parametrize("is_local", [True, False])
def test_another_origin_is_refused_everywhere(origin, is_local):
    with pytest.raises(RequestError, match="another site"):
        refuse_other_pages({"host": "localhost:8000", "origin": origin}, is_local=is_local)


@pytest.mark.parametrize("origin", NEAR_ORIGINS)
def test_a_name_that_nearly_is_this_ones_is_another_sites(origin):
    with pytest.raises(RequestError, match="another site"):
        refuse_other_pages({"host": "localhost:8000", "origin": origin}, is_local=True)


@pytest.mark.parametrize("host", ["localhost:8000.evil.example", "user@localhost:8000"])
def test_a_host_that_is_no_host_has_no_own_page(host):
    headers = {"host": host, "origin": f"http://{host}"}
    for is_local in (True, False):
        with pytest.raises(RequestError, match="another site"):
            refuse_other_pages(headers, is_local=is_local)


@pytest.mark.parametrize("origin", OWN)
def test_small_and_large_letters_and_the_usual_port_are_the_same_name(origin):
    refuse_other_pages({"host": "localhost:8000", "origin": origin}, is_local=True)
    refuse_other_pages({"host": "localhost:80", "origin": "http://localhost"}, is_local=True)


def test_behind_a_proxy_that_speaks_tls_the_own_page_is_https():
    headers = {"host": "paceline.example", "origin": "https://paceline.example"}
    refuse_other_pages(headers, is_local=False)
    refuse_other_pages(
        {"host": "localhost", "origin": "https://localhost"}, is_local=True, scheme="https"
    )


@pytest.mark.parametrize(
    "headers", [{"origin": "https://evil.example"}, {"host": "evil.example"}], ids=str
)
async def test_a_gateway_without_keys_does_nothing_for_another_sites_page(headers):
    async with gateway_over() as gateway:
        answer = await gateway.http.post("/v1/completions", content=ASKED, headers=SIMPLE | headers)
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "other_origin"
        assert not gateway.requests
        own = {"origin": gateway.url}
        answer = await gateway.http.post("/v1/completions", content=ASKED, headers=own)
        assert answer.status_code == 200


async def test_where_keys_are_demanded_who_has_one_may_come_from_anywhere(tmp_path):
    (tmp_path / "keys").write_text(entry())
    headers = {"origin": "https://app.example", "host": "gateway.example"}
    headers["authorization"] = f"Bearer {SECRET}"
    async with gateway_over(api_keys=tmp_path / "keys") as gateway:
        answer = await gateway.http.post("/v1/completions", content=ASKED, headers=headers)
    assert answer.status_code == 200
