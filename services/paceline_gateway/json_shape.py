"""How much a large JSON text is made of, counted before it is parsed.

A parser makes an object of each value: 14 MB of empty lists are 700 MB, and hold up the event loop
for seconds, in which no text of anybody goes on. What a large body is for is one long text, or the
ids of one. So its values and names are counted first, a part at a time, between which others have
their turn.
"""

from __future__ import annotations

import asyncio
import re

from paceline_gateway.errors import RequestError

__all__ = ["MOST_NAMES", "check_shape"]

MOST_NAMES = 65_536
"""Names of objects' fields in one body: a conversation of 20,000 messages has 40,000."""

_STEPS_A_TURN = 4096
# The rest of a string, its end included. Nothing of it is tried in a second way.
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


async def check_shape(content: bytes, *, most_values: int) -> None:
    """Check that a text has no more values and names than a request can be made of.

    What is no JSON passes: the parser says what is wrong with it.

    Cost: some microseconds for each string in it.

    Raises:
        RequestError: It has more.
    """
    values = names = start = strings = 0
    while start < len(content):
        quote = content.find(b'"', start)
        end = len(content) if quote < 0 else quote
        values += sum(content.count(mark, start, end) for mark in (b",", b"[", b"{"))
        names += content.count(b":", start, end)
        _check(values + strings, most_values, what="values")
        _check(names, MOST_NAMES, what="names")
        string = _STRING.match(content, end + 1)
        if string is None:
            return
        start = string.end()
        strings += 1
        if not strings % _STEPS_A_TURN:
            await asyncio.sleep(0)


def _check(count: int, most: int, *, what: str) -> None:
    if count > most:
        raise RequestError(
            f"the body has more than {most} {what}, the most that is taken here",
            status=413,
            code="too_large",
        )
