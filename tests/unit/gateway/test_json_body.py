"""What a large body is made of is counted before anything is made of it."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from paceline_gateway.bodies.json_body import (
    HERE_BYTES,
    MOST_CONTAINERS,
    MOST_NAMES,
    check_shape,
    read,
)
from paceline_gateway.errors import RequestError
from support.gateway import gateway_over

KIND = {"content-type": "application/json"}
TEXTS = st.text(st.sampled_from('ab,:[]{}"\\\n\u6c34'))
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=20,
)


def counted(value):
    """Count a value with all in it: a string, and whatever follows a comma or is opened."""
    match value:
        case str():
            return 1
        case list():
            return 1 + max(0, len(value) - 1) + sum(map(counted, value))
        case dict():
            return 1 + max(0, len(value) - 1) + len(value) + sum(map(counted, value.values()))
        case _:
            return 0


@given(VALUES, st.booleans())
async def test_what_stands_in_a_string_does_not_count(value, escaped):
    content = json.dumps(value, ensure_ascii=escaped).encode()
    await check_shape(content, most_values=counted(value))
    if counted(value) > 1:
        with pytest.raises(RequestError, match="values"):
            await check_shape(content + b"[", most_values=counted(value))


@given(st.binary(max_size=50))
async def test_what_is_no_json_is_left_to_the_parser(content):
    await check_shape(content, most_values=100)


class Watched(BaseModel):
    """A body that says on which thread it was parsed."""

    text: str
    thread: int = Field(default_factory=threading.get_ident)


@pytest.mark.parametrize("size", [HERE_BYTES, HERE_BYTES + 1])
async def test_a_large_body_is_parsed_on_a_thread(size):
    content = b'{"text":"' + b"a" * (size - 11) + b'"}'
    assert len(content) == size
    is_here = (await read(Watched, content)).thread == threading.get_ident()
    assert is_here == (size <= HERE_BYTES)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b'{"prompt":[' + b"[]," * 400_000 + b"0]}", "values"),
        (b'{"prompt":[' + b"{}," * (MOST_CONTAINERS - 1) + b"0]}", "lists and objects"),
        (b'{"prompt":"p","user":{' + b'"":0,' * (MOST_NAMES + 1) + b" " * (1 << 20), "names"),
        (b'"",' * 400_000, "values"),
        (b'""' * 600_000, "values"),
    ],
    ids=["lists", "objects", "names", "strings", "strings without commas"],
)
async def test_a_large_body_of_many_small_things_is_refused_unparsed(content, what):
    async with gateway_over() as gateway:
        answer = await gateway.http.post("/v1/completions", content=content, headers=KIND)
    assert answer.status_code == 413
    assert f"{what}, the most that is taken" in answer.json()["error"]["message"]
