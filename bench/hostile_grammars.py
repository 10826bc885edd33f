"""How long a stream waits while another client sends hostile grammars.

    paceline up --targets 1 --listen 127.0.0.1:50070
    python bench/hostile_grammars.py 127.0.0.1:50070

Each line: what is sent, and of the gaps between a stream's chunks meanwhile the median, the 99th
percentile and the longest, in ms; then how the other request ended. The other request asks for one
token, so that the wait is for its grammar and not for its text.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from paceline import AsyncClient, Grammar
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_FEWEST_GAPS = 20
_IDLE_SECONDS = 4.0


def _hostile() -> dict[str, Grammar]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    many = {f"p{it}": {"type": "string"} for it in range(1500)}
    doubled = {f"a{it}": {"allOf": [{"$ref": f"#/$defs/a{it + 1}"}] * 2} for it in range(14)}
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
    schemas: dict[str, dict[str, Any]] = {
        "enum of 6,000": {"enum": [f"v{it:05}" for it in range(6000)]},
        "1,500 properties": {"type": "object", "properties": many},
        "1,500 properties, no others": {
            "type": "object",
            "properties": many,
            "additionalProperties": False,
        },
        "maxLength 1e9": {"type": "string", "maxLength": 10**9},
        "depth 60": deep,
        "$ref to itself": {"$ref": "#"},
        "$ref circle": {"$defs": circle, "$ref": "#/$defs/a"},
        "allOf of 2^14": {"$defs": {**doubled, "a14": {"type": "object"}}, "$ref": "#/$defs/a0"},
        "400 patterns of names": {"patternProperties": {f"^a{it}.*b$": {} for it in range(400)}},
        "40 patterns of one text": {"allOf": [{"pattern": f"a{it}.*b"} for it in range(40)]},
    }
    rules = "".join(f'r{it}: r{it} "a" | r{(it + 1) % 400} "b" | "c"\n' for it in range(400))
    row = "".join(f"r{it}: r{it + 1}\n" for it in range(3000))
    terms = " & ".join(f"/.*[a-z]{{{it}}}.*/" for it in range(1, 30))
    larks = {
        "400 left-recursive rules": f"start: r0\n{rules}",
        "3,000 rules in a row": f'start: r0\n{row}r3000: "a"\n',
        "ambiguous": 'start: e\ne: e e | "a" | "aa" | "aaa" | ""\n',
        "any token, 100,000 times": "start: <[*]>{0,100000}",
        "29 patterns of one text": f"start: T\nT: {terms}",
        "60 KB that leave no choice": f'start: "{"ab c" * 15_000}"',
    }
    regexes = ("(a|b)*a(a|b){15}", "(x+x+)+y", r"\w{1,5000}", "(.*a){20}", "((a|b)*a){1000}")
    return {
        **{f"regex {it}": Grammar(regex=it) for it in regexes},
        **{name: Grammar(json_schema=it) for name, it in schemas.items()},
        **{name: Grammar(lark=it) for name, it in larks.items()},
    }


async def _measure(client: AsyncClient, work: Callable[[], Awaitable[str]]) -> tuple[str, str]:
    """Measure the gaps of a stream while something else is done."""
    gaps: list[float] = []
    has_enough = asyncio.Event()

    async def stream() -> None:
        seed = 0
        while True:
            last = None
            async with client.generate(
                "def main():\n", max_tokens=200, strategy="speculative", lookahead=4, seed=seed
            ) as generation:
                async for _ in generation:
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                        if len(gaps) >= _FEWEST_GAPS:
                            has_enough.set()
                    last = now
            seed += 1

    streaming = asyncio.create_task(stream())
    try:
        await has_enough.wait()
        gaps.clear()
        has_enough.clear()
        ended = await work()
        await has_enough.wait()
    finally:
        streaming.cancel()
    found = sorted(gaps)
    told = (found[len(found) // 2], found[int(len(found) * 0.99)], found[-1])
    return " | ".join(f"{it * 1000:.0f}" for it in told), ended


async def main(address: str) -> None:
    """Print a line for each grammar."""

    async def idle() -> str:
        await asyncio.sleep(_IDLE_SECONDS)
        return "-"

    async with AsyncClient(address) as client, AsyncClient(address) as other:

        async def send(grammar: Grammar | None) -> str:
            options: dict[str, Any] = {} if grammar is None else {"grammar": grammar}
            try:
                done = await other.generate("x", max_tokens=1, **options).collect()
            except PacelineError as error:
                return error.message[:80]
            return str(done.finished.finish_reason)

        cases: dict[str, Callable[[], Awaitable[str]]] = {"nothing": idle}
        cases["no grammar"] = lambda: send(None)
        for name, grammar in _hostile().items():
            cases[name] = lambda grammar=grammar: send(grammar)
        for name, work in cases.items():
            gaps, ended = await _measure(client, work)
            print(f"| {name} | {gaps} | {ended} |", flush=True)


asyncio.run(main(sys.argv[1]))
