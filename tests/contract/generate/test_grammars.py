"""Grammars through the whole service: every strategy says the same, and it follows the grammar."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from paceline import Grammar
from paceline.errors import InvalidFieldError, UnsupportedError
from paceline_contract.sampling import SAMPLING_PARAMETERS
from support.fake_text import continuation
from support.gateway import gateway_over
from support.in_process import system_of_pair
from support.orchestrating import PROMPT as FAKE_PROMPT
from support.orchestrating import a_drafter, orchestrating, targets
from support.tiny_models import build_tokenizer, tiny_pair

__all__ = ["tiny_pair"]

PROMPT = "import draft\n"
ROW = {"type": "integer", "minimum": 0, "maximum": 99}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "rows": {"type": "array", "items": ROW, "minItems": 2, "maxItems": 3},
        "of": {"enum": ["draft", "target"]},
    },
    "required": ["name", "rows", "of"],
    "additionalProperties": False,
}
REGEX = r"(draft|target)\([a-z]{1,8}(, [a-z]{1,8}){0,2}\)"
GRAMMARS = {
    "schema": Grammar(json_schema=SCHEMA),
    "regex": Grammar(regex=REGEX),
    "lark": Grammar(lark='start: "def " NAME "():"\nNAME: /[a-z]{3,6}/'),
    "choices": Grammar(choices=["import target", "import draft", "import draft, target"]),
}
WAYS = {
    "plain": {"strategy": "autoregressive"},
    "si": {"strategy": "speculative", "lookahead": 4},
    "si from the text": {"strategy": "speculative", "lookahead": 4, "drafter": "max_gram"},
    "si with trees": {"strategy": "speculative", "lookahead": 3, "width": 3, "branches": 2},
    "dsi": {"strategy": "distributed", "lookahead": 2},
    "dsi with trees": {"strategy": "distributed", "lookahead": 2, "width": 3, "branches": 2},
}


def follows(name: str, text: str) -> bool:
    match name:
        case "schema":
            value = json.loads(text)
            return (
                [*value] == ["name", "rows", "of"]
                and len(value["name"]) <= 12
                and 2 <= len(value["rows"]) <= 3
                and all(type(row) is int and 0 <= row <= 99 for row in value["rows"])
                and value["of"] in {"draft", "target"}
            )
        case "regex":
            return re.fullmatch(REGEX, text) is not None
        case "lark":
            return re.fullmatch(r"def [a-z]{3,6}\(\):", text) is not None
        case _:
            return text in GRAMMARS["choices"].choices


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_strategy_says_the_same_and_it_follows_the_grammar(tiny_pair, temperature):
    async with system_of_pair(tiny_pair) as system:
        for name, grammar in GRAMMARS.items():
            texts = {}
            for way, options in WAYS.items():
                done = await system.client.generate(
                    PROMPT,
                    max_tokens=160,
                    temperature=temperature,
                    seed=3,
                    grammar=grammar,
                    **options,
                ).collect()
                texts[way] = done.text
                assert done.finished.finish_reason == "eos"
                assert follows(name, done.text), (name, way, done.text)
            assert len({*texts.values()}) == 1, texts
        await system.settled()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_reasoning_has_as_many_tokens_as_it_may_with_every_strategy(tiny_pair, temperature):
    mark, most = 1, 21  # a token that this model hardly ever chooses by itself
    grammar = Grammar(lark=f'start: <[^0,{mark}]>{{0,{most}}} <[{mark}]> ("yes" | "no")')
    async with system_of_pair(tiny_pair) as system:
        answers = {}
        for way, options in WAYS.items():
            done = await system.client.generate(
                PROMPT, max_tokens=60, temperature=temperature, seed=3, grammar=grammar, **options
            ).collect()
            assert done.token_ids.index(mark) == most, way
            assert done.text.endswith(("yes", "no"))
            answers[way] = tuple(done.token_ids)
        assert len({*answers.values()}) == 1, answers


async def test_drafts_follow_the_grammar_too(tiny_pair):
    """A drafter that did not know it would be right at no place of such a text."""
    async with system_of_pair(tiny_pair) as system:
        done = await system.client.generate(
            PROMPT,
            max_tokens=40,
            strategy="speculative",
            lookahead=4,
            grammar=Grammar(regex="(Q|Z){40}"),
        ).collect()
        counts = done.finished.statistics
        assert counts.accepted_token_count > counts.rejected_token_count


@pytest.mark.parametrize("way", ["si", "si from the text", "dsi", "rejection"])
async def test_forced_tokens_are_drafts_with_a_source_of_their_own(tiny_pair, way):
    regex = "the name of (it|something else): [a-c]{2}, and that is the end"
    options = WAYS.get(way, {"strategy": "speculative", "rule": "rejection", "lookahead": 4})
    async with system_of_pair(tiny_pair) as system:
        done = await system.client.generate(
            PROMPT,
            max_tokens=100,
            temperature=1.0,
            seed=3,
            grammar=Grammar(regex=regex),
            include_timeline=True,
            **options,
        ).collect()
        assert re.fullmatch(regex, done.text)
        took = done.finished.statistics
        assert 20 < took.forced_accepted_token_count <= took.forced_drafted_token_count
        found = [
            (event.position + index, token_id, event.end_ns)
            for event in done.finished.timeline
            if event.kind == "drafted" and event.server == "grammar"
            for index, token_id in enumerate(event.token_ids)
        ]
        assert len(found) == took.forced_drafted_token_count
        output = {
            event.position: (event.token_ids, event.end_ns)
            for event in done.finished.timeline
            if event.kind in ("accepted", "corrected")
        }
        assert len(output) == len(done.token_ids)
        # On a busy machine a draft can come when its first tokens are there already.
        forced = {
            position
            for position, token_id, came_ns in found
            if position in output and output[position][0] == (token_id,)
            if came_ns < output[position][1]
        }
        assert len(forced) == took.forced_accepted_token_count
        # With a drafter the most are drafted without a forward; without one, few calls are needed.
        if way == "si from the text":
            assert took.target_forward_count < len(done.token_ids) / 2
        else:
            assert took.drafter_forward_count < took.drafted_token_count / 2
        await system.settled()


@pytest.mark.parametrize("way", ["plain", "dsi"])
async def test_a_resumed_answer_goes_on_along_the_grammar(tiny_pair, way):
    async with system_of_pair(tiny_pair) as system:

        async def ask(resumed=()):
            return await system.client.generate(
                PROMPT,
                max_tokens=160,
                temperature=1.0,
                seed=5,
                grammar=GRAMMARS["schema"],
                resume_token_ids=resumed,
                **WAYS[way],
            ).collect()

        whole = (await ask()).token_ids
        for received in (1, 5, len(whole) - 1):
            assert (await ask(whole[:received])).token_ids == whole[received:]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(json_schema={"not": {}}), "Unimplemented keys"),
        (Grammar(regex="["), "unclosed character class"),
        (Grammar(lark='start: "a" ('), "Expected token"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_before_any_token(tiny_pair, grammar, reason):
    async with system_of_pair(tiny_pair) as system:
        with pytest.raises(InvalidFieldError, match=reason) as refused:
            await system.client.generate(PROMPT, grammar=grammar).collect()
        assert refused.value.violations[0].field.startswith("sampling.grammar")
        # No server is given up for it.
        assert all(it.ready for it in (await system.client.info()).servers)
        assert (await system.client.generate(PROMPT, max_tokens=3).collect()).text


async def test_a_grammar_that_becomes_too_complex_is_the_requests_own_error(tiny_pair):
    properties = {f"p{number}": {} for number in range(1500)}
    grammar = Grammar(json_schema={"type": "object", "properties": properties})
    async with system_of_pair(tiny_pair) as system:
        other = system.client.generate(PROMPT, max_tokens=60, ignore_eos=True).collect()
        task = asyncio.create_task(other)
        begun = build_tokenizer(300).encode('{"p0":1,').ids
        with pytest.raises(InvalidFieldError, match="max is 2000"):
            await system.client.generate(
                PROMPT, max_tokens=200, grammar=grammar, resume_token_ids=begun
            ).collect()
        assert len((await task).token_ids) == 60


async def test_the_end_is_the_grammars(tiny_pair):
    async with system_of_pair(tiny_pair) as system:
        with pytest.raises(InvalidFieldError, match="ignore_eos"):
            await system.client.generate(
                PROMPT, grammar=GRAMMARS["choices"], ignore_eos=True
            ).collect()


async def test_an_answer_over_http_follows_its_schema(tiny_pair):
    async with (
        system_of_pair(tiny_pair) as system,
        gateway_over(orchestrators=(system.address,)) as gateway,
    ):
        asked = {
            "model": (await gateway.http.get("/v1/models")).json()["data"][0]["id"],
            "prompt": PROMPT,
            "max_tokens": 200,
            "temperature": 0,
        }
        answer = await gateway.http.post(
            "/v1/completions", json={**asked, "structured_outputs": {"json": SCHEMA}}
        )
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert follows("schema", choice["text"])
        refused = await gateway.http.post(
            "/v1/completions", json={**asked, "structured_outputs": {"json": {"not": {}}}}
        )
        assert refused.status_code == 400
        assert 'Unimplemented keys: ["not"]' in refused.json()["error"]["message"]


async def test_only_targets_that_enforce_grammars_alike_share_such_a_request():
    engines = ["llguidance 1", "llguidance 1", "llguidance 2", ""]
    each = [
        target
        for engine in engines
        for target in targets(1, samples_by=SAMPLING_PARAMETERS, grammar_engine=engine)
    ]
    asked = {"sampling": {"grammar": {"regex": "a"}}, "target_count": 4}
    async with orchestrating(drafters=[a_drafter()], targets=each) as system:
        received = await system.generate(**asked)
        assert received.token_ids == continuation(FAKE_PROMPT, 24)
        assert [bool(it.specs) for it in system.targets] == [True, True, False, False]
        assert not any(it.sampling.HasField("grammar") for it in system.drafters[0].specs)
    async with orchestrating(
        drafters=[], targets=targets(1, samples_by=SAMPLING_PARAMETERS)
    ) as system:
        with pytest.raises(UnsupportedError, match="grammar"):
            await system.generate(**asked)
