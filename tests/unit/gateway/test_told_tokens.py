"""Tokens over HTTP: texts, ids, and the prompt before its answer, in OpenAI's and vLLM's forms."""

from __future__ import annotations

import json

import pytest

from support.fake_orchestrator import FakeOrchestrator, Leg
from support.gateway import TEMPLATE, gateway_over

# The prompt is tokens 0 to 2. Together they are "The cité", and the tokens of the answer follow.
TEXTS = [b"The", b" cit\xc3", b"\xa9", b" of", b" light", b" is", b"<end>", b"", b""]
PROMPT = "The cité"
PART = "bytes:\\x20\\x63\\x69\\x74\\xc3"


def bytes_of(token_id):
    return TEXTS[token_id]


def an_orchestrator(count=8):
    legs = [Leg(bytes_of=bytes_of, word="{}", chunk_tokens=1) for _ in range(count)]
    return FakeOrchestrator(script=legs, chat_template=TEMPLATE)


async def chosen(gateway, path="/v1/completions", **body):
    answer = await gateway.post(path, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


async def test_what_lm_eval_sends_is_answered_with_the_prompt_and_its_log_probabilities():
    async with gateway_over(an_orchestrator()) as gateway:
        asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        for prompt in (PROMPT, [[0, 1, 2]]):
            choice = await chosen(gateway, prompt=prompt, **asked)
            assert choice["text"] == PROMPT + "3"
            told = choice["logprobs"]
            assert told["tokens"] == [
                "The",
                PART,
                "bytes:\\xa9",
                " of",
            ]
            assert told["token_logprobs"] == [None, -1, -2, -3]
            assert told["text_offset"] == [0, 3, 8, 8]
            assert told["top_logprobs"] == [
                None,
                {PART: -1, "bytes:\\xa9": -2},
                {"bytes:\\xa9": -2, " of": -3},
                {" of": -3, " light": -4},
            ]
        assert [it.prompt_logprobs for it in gateway.requests] == [1, 1]


async def test_a_prompt_alone_is_told_without_an_answer():
    async with gateway_over(an_orchestrator()) as gateway:
        choice = await chosen(gateway, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
        assert choice["text"] == PROMPT
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, -1, -2]
        assert choice["logprobs"]["top_logprobs"] is None
        choice = await chosen(gateway, prompt=[0, 1, 2], max_tokens=0, echo=True)
        assert (choice["text"], choice["logprobs"]) == (PROMPT, None)
        choice = await chosen(gateway, prompt=PROMPT, max_tokens=0, prompt_logprobs=0)
        assert (choice["text"], len(choice["prompt_logprobs"])) == ("", 3)
        assert [it.max_tokens for it in gateway.requests] == [0, 0, 0]
        refused = await gateway.post("/v1/completions", prompt=PROMPT, max_tokens=0)
        assert refused.json()["error"]["param"] == "max_tokens"
        assert len(gateway.requests) == 3


async def test_a_stream_begins_with_the_prompt():
    async with gateway_over(an_orchestrator()) as gateway:
        create = gateway.client.completions.create
        asked = {"model": "fake", "prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1}
        whole = (await create(**asked)).choices[0]
        text, tokens, offsets, logprobs = "", [], [], []
        async for event in await create(**asked, stream=True):
            for choice in event.choices:
                text += choice.text
                if choice.logprobs:
                    tokens += choice.logprobs.tokens
                    offsets += choice.logprobs.text_offset
                    logprobs += choice.logprobs.token_logprobs
        assert (text, tokens) == (whole.text, whole.logprobs.tokens)
        assert offsets == whole.logprobs.text_offset == [0, 3, 8, 8, 9]
        assert logprobs == whole.logprobs.token_logprobs


async def test_chat_tells_texts_and_bytes_and_numbers_where_they_are_asked_for():
    async with gateway_over(an_orchestrator()) as gateway:
        asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
        path = "/v1/chat/completions"
        (told,) = (await chosen(gateway, path, **asked, top_logprobs=1))["logprobs"]["content"]
        assert told == {
            "token": " of",
            "logprob": -3,
            "bytes": [*b" of"],
            "top_logprobs": [{"token": " light", "logprob": -4, "bytes": [*b" light"]}],
        }
        choice = await chosen(gateway, path, **asked, return_tokens_as_token_ids=True)
        (told,) = choice["logprobs"]["content"]
        assert (told["token"], told["bytes"]) == ("token_id:3", None)


async def test_numbers_stand_for_tokens_also_where_the_prompts_text_has_to_be_found():
    async with gateway_over(an_orchestrator()) as gateway:
        choice = await chosen(
            gateway, prompt=[0, 1, 2], max_tokens=1, echo=True, logprobs=1,
            return_tokens_as_token_ids=True,
        )  # fmt: skip
        assert choice["text"] == PROMPT + "3"
        assert choice["logprobs"]["tokens"] == [f"token_id:{it}" for it in range(4)]
        assert choice["logprobs"]["top_logprobs"][3] == {"token_id:3": -3, "token_id:4": -4}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_ids_and_log_probabilities_of_the_prompt_are_told_in_vllms_fields(path):
    async with gateway_over(an_orchestrator()) as gateway:
        is_chat = "chat" in path
        asked = {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": PROMPT}
        asked |= {"max_tokens": 2, "return_token_ids": True}
        answer = (await gateway.post(path, **asked, prompt_logprobs=1)).json()
        place = answer if is_chat else answer["choices"][0]
        assert place["prompt_token_ids"] == [0, 1, 2]
        assert answer["choices"][0]["token_ids"] == [3, 4]
        first, _, last = place["prompt_logprobs"]
        assert first is None
        assert last == {
            "2": {"logprob": -2, "rank": None, "decoded_token": "bytes:\\xa9"},
            "3": {"logprob": -3, "rank": 1, "decoded_token": " of"},
        }
        prompt, ids = [], []
        async with gateway.http.stream(
            "POST", path, json={"model": "fake", **asked, "stream": True}
        ) as events:
            async for line in events.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    for choice in event["choices"]:
                        prompt += (event if is_chat else choice).get("prompt_token_ids", [])
                        ids += choice.get("token_ids", [])
        assert (prompt, ids) == ([0, 1, 2], [3, 4])


async def test_it_is_counted_what_was_drafted_from_a_prediction_and_what_was_not():
    leg = Leg(predicted=(9, 4))
    async with gateway_over(FakeOrchestrator(script=[leg, leg, Leg()])) as gateway:
        said = {"type": "content", "content": "3 4 "}
        answer = (await gateway.post("/v1/completions", prompt=PROMPT, n=2, prediction=said)).json()
        assert answer["usage"]["completion_tokens_details"] == {
            "accepted_prediction_tokens": 8,
            "rejected_prediction_tokens": 10,
        }
        assert [it.predicted_text for it in gateway.requests] == ["3 4 ", "3 4 "]
        answer = (await gateway.post("/v1/completions", prompt=PROMPT)).json()
        assert "completion_tokens_details" not in answer["usage"]


async def test_a_long_prompt_is_told_whole_and_in_pieces():
    content = [b"a", b" \xc3", b"\xa9"] * 700
    orchestrator = FakeOrchestrator(
        script=[Leg(bytes_of=lambda it: content[it % 2100], prompt_length=2000) for _ in range(2)]
    )
    async with gateway_over(orchestrator) as gateway:
        create = gateway.client.completions.create
        asked = {"model": "fake", "prompt": [1], "max_tokens": 1, "echo": True, "logprobs": 2}
        whole = (await create(**asked)).choices[0]
        assert whole.text == b"".join(content[:2000]).decode(errors="replace") + "2000 "
        assert len(whole.logprobs.tokens) == 2001
        assert whole.logprobs.token_logprobs == [None, *(-it for it in range(1, 2001))]
        text, told, counts = "", {}, []
        async for event in await create(**asked, stream=True):
            for choice in event.choices:
                text += choice.text
                if choice.logprobs:
                    counts.append(len(choice.logprobs.tokens))
                    for name, values in choice.logprobs.to_dict().items():
                        told.setdefault(name, []).extend(values)
        assert (text, told) == (whole.text, whole.logprobs.to_dict())
        assert counts == [256] * 7 + [208, 1]
