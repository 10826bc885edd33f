"""Reads a body's JSON: counts its values, then parses it by its schema.

A parser makes an object of each value: 14 MB of empty lists become 700 MB, and block the event
loop for seconds, in which no generation continues. A useful large body has one long text, or its
token ids. So values and names are counted first, part by part, and other requests run between two
parts.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from paceline_gateway.bodies.fields import UNKNOWN_KIND
from paceline_gateway.bodies.json_pieces import outline, put_back, read_on
from paceline_gateway.bodies.text_changing import changes_text
from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MOST_NAMES = 65_536
"""Most names of fields in one body: a conversation of 20,000 messages has 40,000."""

MOST_CONTAINERS = 32_768
"""Most lists and objects in one body: they take a parser longest, half a microsecond each."""

HERE_BYTES = 64 << 10
"""Larger bodies are counted before they are parsed, and parsed on a thread."""

MOST_FAULTS = 8192
"""Most wrong and unknown fields of which each is looked at: some microseconds for each."""

_STEPS_A_TURN = 1024
_COUNTED_BYTES = 1 << 20
_FIRST_ITEMS = 64

_UNSUPPORTED = frozenset({"unsupported", "extra_forbidden", UNKNOWN_KIND})
_REASONS = {
    "missing": "is needed",
    "extra_forbidden": "is not supported",
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "string_type": "must be text",
}
_AFTER_VALIDATION = re.compile(r" after validation, not \d+$")
_BodyT = TypeVar("_BodyT", bound=BaseModel)


async def check_shape(content: bytes, *, most_values: int) -> None:
    """Check that a text has no more values and names than a request can have.

    A text that is not JSON passes: the parser reports it.

    Cost: a millisecond for each megabyte; some microseconds more for each string, if the marks in
        and outside of strings are too many together.

    Raises:
        RequestError: The text has more.
    """
    if await _has_few_marks(content, most_values=most_values):
        return
    values = names = containers = start = strings = 0
    while start < len(content):
        quote = content.find(b'"', start)
        end = len(content) if quote < 0 else quote
        opened = sum(content.count(mark, start, end) for mark in (b"[", b"{"))
        containers += opened
        values += opened + content.count(b",", start, end)
        names += content.count(b":", start, end)
        _check(values + strings, most_values, what="values")
        _check(names, MOST_NAMES, what="names")
        _check(containers, MOST_CONTAINERS, what="lists and objects")
        start, has_ended = end + 1, False
        while not has_ended:
            before = start
            start, has_ended = read_on(content, before)
            if not has_ended:
                if start == before:
                    return
                await asyncio.sleep(0)
        strings += 1
        if not strings % _STEPS_A_TURN:
            await asyncio.sleep(0)


async def _has_few_marks(content: bytes, *, most_values: int) -> bool:
    """Whether a text has not too much even if all marks in its strings counted."""
    opened = values = quotes = names = 0
    for start in range(0, len(content), _COUNTED_BYTES):
        part = content[start : start + _COUNTED_BYTES]
        opened += part.count(b"[") + part.count(b"{")
        values += part.count(b",")
        quotes += part.count(b'"')
        names += part.count(b":")
        await asyncio.sleep(0)
    values += opened + quotes // 2
    return opened <= MOST_CONTAINERS and names <= MOST_NAMES and values <= most_values


def _check(count: int, most: int, *, what: str) -> None:
    if count > most:
        raise RequestError(
            f"the body has more than {most} {what}, the most that is taken here",
            status=413,
            code="too_large",
        )


async def read(
    body_class: type[_BodyT], content: bytes, *, ignored: list[str] | None = None
) -> _BodyT:
    """Read a body as `parse` does, a large one on a thread: no other request waits for it.

    Raises:
        RequestError: See `parse`.
    """
    if len(content) <= HERE_BYTES:
        return parse(body_class, content, ignored=ignored)
    return await asyncio.to_thread(parse, body_class, content, ignored=ignored)


def parse(body_class: type[_BodyT], content: bytes, *, ignored: list[str] | None = None) -> _BodyT:
    """Read a body.

    Args:
        ignored: Takes the places of unknown fields, which are left out, and of what is left out of
            lenient schemas; None: they are refused.

    Raises:
        RequestError: The body is not JSON; a parameter is wrong, unknown or not supported; or
            more than `MOST_FAULTS` are.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    value = _parse_json(content)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    left_out: list[str] = []  # of schemas
    while True:
        left_out.clear()
        try:
            body = body_class.model_validate(value, context=left_out)
            break
        except ValidationError as error:
            if error.error_count() > MOST_FAULTS:
                raise _too_many_faults(body_class, value) from None
            problems = error.errors(include_url=False, include_context=False)
        unknown = [problem["loc"] for problem in problems if _may_be_left_out(problem)]
        if ignored is None or not unknown:
            raise _refusal(problems[0])
        for location in reversed(unknown):  # later ones first: the others keep their numbers
            _leave_out(value, location)
        ignored += [_path(location) for location in unknown]
    if left_out and ignored is None:
        raise RequestError(
            f"{left_out[0]}: cannot be enforced"[:1000],
            param=left_out[0][:200],
            code="unsupported_parameter",
        )
    if ignored is not None:
        ignored += left_out
    return body


def _parse_json(content: bytes) -> Any:
    if len(content) > HERE_BYTES:
        with suppress(ValueError):  # the whole text's parser says it better
            short, values = outline(content)
            return put_back(_parse_whole(short), values)
    try:
        return _parse_whole(content)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None


def _parse_whole(content: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: It is none.
        RequestError: There are two values of one name.
    """
    value = from_json(content, allow_inf_nan=False)
    # This parser takes the last of two values with one name; other parsers take the first.
    json.loads(content, object_pairs_hook=_without_repeats)
    return value


def _refusal(problem: ErrorDetails) -> RequestError:
    param = _path(problem["loc"])
    return RequestError(
        f"{param}: {_reason(problem['type'], problem['msg'])}"[:1000],
        param=param[:200],
        code="unsupported_parameter" if problem["type"] in _UNSUPPORTED else None,
    )


def _too_many_faults(body_class: type[BaseModel], value: dict[str, Any]) -> RequestError:
    """Name a fault among the first items of lists, or say that there are too many."""
    first = {it: v[:_FIRST_ITEMS] if isinstance(v, list) else v for it, v in value.items()}
    try:
        body_class.model_validate(first)
    except ValidationError as error:
        if error.error_count() <= MOST_FAULTS:
            for problem in error.errors(include_url=False, include_context=False):
                # A fault of a whole list may be one only of its first items.
                if len(problem["loc"]) > 1 and not _may_be_left_out(problem):
                    return _refusal(problem)
    return RequestError(f"the body has more than {MOST_FAULTS} wrong and unknown fields")


def _may_be_left_out(problem: ErrorDetails) -> bool:
    """Whether a fault is an unknown field without which the answer is the same, or a tool.

    A tool of an unknown kind is one that the model does not have, and need not.
    """
    if problem["type"] == UNKNOWN_KIND:
        return True
    is_unknown = problem["type"] == "extra_forbidden"
    return is_unknown and not changes_text(problem["loc"][-1], problem["input"])


def _leave_out(value: Any, location: tuple[int | str, ...]) -> None:
    *parents, name = location
    for part in parents:
        value = value[part]
    del value[name]


def _without_repeats(pairs: list[tuple[str, Any]]) -> None:
    """Refuse two values of one name.

    Raises:
        RequestError: There are two values.
    """
    names = set()
    for name, _ in pairs:
        if name in names:
            raise RequestError(f"{name[:200]}: is given twice", param=name[:200])
        names.add(name)


def _reason(kind: str, message: str) -> str:
    """Return the library's words as ours: it speaks of its own types, and of inputs."""
    if kind in _REASONS:
        return _REASONS[kind]
    about, should, words = message.partition(" should ")
    return f"must {_AFTER_VALIDATION.sub('', words)}" if should and " " not in about else message


def _path(location: tuple[int | str, ...]) -> str:
    """Write a value's place as OpenAI does: messages[0].content."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
