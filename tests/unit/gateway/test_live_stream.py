"""What feeds the page: a generation's events as they happen; and the page's files themselves."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from paceline import Strategy, errors
from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import gateway_over

PATH = "/paceline/generate"


def events(response):
    """Return what a stream told, as names and contents."""
    assert response.headers["content-type"].startswith("text/event-stream")
    told = []
    for block in response.text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        told.append((fields.get("event", "message"), json.loads(fields["data"])))
    return told


async def test_a_stream_has_the_start_the_chunks_what_happened_between_and_the_end():
    async with gateway_over() as gateway:
        response = await gateway.post(PATH, prompt="p", max_tokens=2, seed=9)
    told = events(response)
    assert [name for name, _ in told] == [
        *("started", "chunk", "timeline", "chunk", "timeline", "finished")
    ]
    started, chunk, event, finished = told[0][1], told[1][1], told[2][1], told[-1][1]
    assert (started["seed"], started["strategy"]) == (9, "distributed")
    origins = ["accepted_draft"]
    said = {"position": 3, "token_ids": [3], "text": "3 ", "text_lengths": [2]}
    assert chunk == {**said, "origins": origins}
    assert (event["kind"], event["server"]) == ("drafted", "drafter-0")
    assert {"branch_token_count", "is_branch"} <= event.keys()
    assert finished["usage"]["completion_token_count"] == 2
    assert "timeline" not in finished
    assert gateway.requests[0].stream_timeline


async def test_strategy_and_limits_are_the_orchestrators_to_follow():
    settings = {"strategy": "speculative", "lookahead": 3, "targets": 2, "ignore_eos": True}
    settings |= {"width": 4, "branches": 3}
    async with gateway_over() as gateway:
        await gateway.post(PATH, prompt="p", temperature=0, top_p=0.5, paceline=settings)
    (request,) = gateway.requests
    assert (request.strategy, request.lookahead, request.target_count) == (3, 3, 2)
    assert (request.width, request.branches) == (4, 3)
    assert (request.sampling.temperature, request.sampling.top_p) == (0, 0.5)
    assert request.ignore_eos
    assert request.max_tokens == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["p"]}, "prompt"),
        ({"prompt": "p", "n": 2}, "n"),
        ({}, "messages"),
        ({"prompt": "p", "messages": [{"role": "user", "content": "q"}]}, "messages"),
        ({"messages": [{"role": "poet", "content": "q"}]}, "messages[0].role"),
        ({"prompt": "p", "stream": False}, "stream"),
        ({"prompt": "p", "paceline": {"strategy": "telepathy"}}, "paceline.strategy"),
        ({"prompt": "p", "seed": -2}, "seed"),
        ({"prompt": "p", "paceline": {"width": 17}}, "paceline.width"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(body, param):
    async with gateway_over() as gateway:
        response = await gateway.post(PATH, **body)
        other = await gateway.http.post(PATH, json={"model": "another", "prompt": "p"})
        assert gateway.requests == []
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert other.status_code == 404


async def test_a_conversation_is_written_by_the_models_template():
    async with gateway_over() as gateway:
        said = [{"role": "user", "content": "q"}]
        told = events(await gateway.post(PATH, messages=said, max_tokens=2, seed=9))
        await gateway.post("/v1/chat/completions", messages=said, max_tokens=2, seed=9)
    assert [name for name, _ in told if name != "timeline"] == [
        *("started", "chunk", "chunk", "finished")
    ]
    watched, chatted = gateway.requests
    assert watched.stream_timeline
    prompts = [
        (it.text, it.add_special_tokens, it.parse_special_tokens) for it in (watched, chatted)
    ]
    assert prompts == [("<s><user>q<assistant>", False, True)] * 2


async def test_a_model_that_only_continues_texts_says_so_and_refuses_conversations():
    async with gateway_over(FakeOrchestrator()) as gateway:
        told = (await gateway.http.get("/paceline/info")).json()
        refused = await gateway.post(PATH, messages=[{"role": "user", "content": "q"}])
    assert told["chats"] is False
    assert refused.status_code == 400
    assert "no chat template" in refused.json()["error"]["message"]


async def test_an_error_is_a_status_before_the_first_event_and_an_event_after_it():
    early = Leg(error=errors.UnsupportedError("no such method here"), refuses=True)
    late = Leg(error=errors.InvariantViolatedError("secret"), chunks=1)
    fake = FakeOrchestrator(script=[early, late])
    async with gateway_over(fake) as gateway:
        refused = await gateway.post(PATH, prompt="p")
        broken = events(await gateway.post(PATH, prompt="p"))
    assert refused.status_code == 400
    assert "no such method here" in refused.json()["error"]["message"]
    assert [name for name, _ in broken] == ["started", "chunk", "timeline", "message"]
    assert "secret" not in broken[-1][1]["error"]["message"]


async def test_a_generation_that_is_resumed_begins_anew_without_a_gap():
    dies = FakeOrchestrator(script=[Leg(error=errors.DrainingError("bye"), chunks=2)])
    async with gateway_over(dies) as gateway:
        told = events(await gateway.post(PATH, prompt="p", max_tokens=4))
    texts = [content["text"] for name, content in told if name == "chunk"]
    assert texts == ["3 ", "4 ", "5 ", "6 "]
    names = [name for name, _ in told if name != "timeline"]
    assert names == ["started", "chunk", "chunk", "started", "chunk", "chunk", "finished"]


async def test_what_there_is_is_told_without_addresses():
    async with gateway_over() as gateway:
        told = (await gateway.http.get("/paceline/info")).json()
    assert told["model"] == "fake"
    assert told["chats"] is True
    assert told["servers"] == [{"name": "target-0", "role": "target", "ready": True}]
    names = {each["name"] for each in told["strategies"]}
    assert names == {it.value for it in Strategy} - {"auto", "unknown", "self_speculative"}
    assert {"name": "distributed", "abbreviation": "DSI"} in told["strategies"]


async def test_a_key_is_demanded_of_all_but_the_pages_files_and_pays_for_the_tokens(tmp_path):
    path = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"sesame").hexdigest()
    path.write_text(f"- {{name: ali, sha256: {digest}, tokens_per_minute: 5}}")
    asked = {"headers": {"authorization": "Bearer sesame"}}
    body = {"json": {"model": "fake", "prompt": "p", "max_tokens": 3}}
    async with gateway_over(api_keys=path) as gateway:
        assert (await gateway.http.get("/")).status_code == 200
        assert (await gateway.http.get("/paceline/info")).status_code == 401
        assert (await gateway.post(PATH, prompt="p")).status_code == 401
        assert (await gateway.http.get("/paceline/info", **asked)).status_code == 200
        # 3 of the prompt, 3 of the text
        assert (await gateway.http.post(PATH, **body, **asked)).status_code == 200
        assert (await gateway.http.post(PATH, **body, **asked)).status_code == 429


async def test_the_page_may_load_its_own_files_and_nothing_else():
    async with gateway_over() as gateway:
        page = await gateway.http.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        named = re.findall(r'(?:href|src)="([^"]+)"', page.text)
        assert len(named) == 3
        for name in named:
            assert not name.startswith(("/", "http"))  # so that it works below a path, too
            found = await gateway.http.get(f"/{name}")
            assert found.status_code == 200
            assert found.headers["content-security-policy"] == policy
        # Nothing that the policy would refuse: the browser would only complain on its console.
        assert not re.search(r"\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", page.text)
        assert (await gateway.http.get("/paceline/page/../page.py")).status_code == 404


async def test_the_page_can_be_left_out():
    async with gateway_over(page=False) as gateway:
        for path in ("/", "/paceline/page/page.js"):
            assert (await gateway.http.get(path)).status_code == 404
