"""Any page in a browser can send requests to this machine; a gateway without keys takes its own."""

from __future__ import annotations

import json

import pytest

from paceline_gateway.browsers import refuse_other_pages
from paceline_gateway.errors import RequestError
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
]


@pytest.mark.parametrize("host", HERE)
def test_this_machine_has_these_names(host):
    refuse_other_pages({"host": host}, is_local=True)
    refuse_other_pages({"host": host, "origin": f"http://{host.lower()}"}, is_local=True)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_another_name_is_refused_where_only_this_machine_can_reach_it(host):
    with pytest.raises(RequestError, match="no name of this machine"):
        refuse_other_pages({"host": host}, is_local=True)
    refuse_other_pages({"host": host}, is_local=False)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:8001", ""])
@pytest.mark.parametrize("is_local", [True, False])
def test_another_origin_is_refused_everywhere(origin, is_local):
    with pytest.raises(RequestError, match="another site"):
        refuse_other_pages({"host": "localhost:8000", "origin": origin}, is_local=is_local)


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
