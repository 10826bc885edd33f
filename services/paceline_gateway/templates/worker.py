"""`python -m paceline_gateway.templates.worker`: renders conversations in a separate process.

A chat template comes from a model's folder, and so from a stranger. Jinja's sandbox hides Python's
internals from it. But the sandbox does not prevent a power with a million digits, nested loops, or
gigabytes of spaces, and a thread cannot be ended. So templates run here. For each conversation this
process may use a second of processor time, and some memory beyond its own size; for a conversation
of many megabytes more of both, by its length. The kernel ends the process when the time is over,
and refuses more memory; then the gateway starts another process.

Standard input and output carry frames: a length (four bytes, the highest first), then JSON.

    in     {"source", "named_tokens", "messages", "add_generation_prompt", "most_bytes"}, without
           the source if it is the last one's; "tools" and "options", further names, may be there
    out    an empty frame first, which says that this process is ready; then for each question
           {"text"}, {"refusal"} in the template's words, {"fault"} of the template, or {"beyond"}

Standard input ends with the gateway, and then this process ends, too.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline_gateway.templates.environment import RefusalError, fault_of, template_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2 import Template

HEAD = struct.Struct(">I")
"""The head of each frame: its length in bytes."""

# Processor time of one conversation, which usually takes milliseconds, and of reading it.
_CPU_SECONDS = 1.0
_CPU_SECONDS_PER_BYTE = 1 / (4 << 20)

MOST_MEMORY_BYTES = 64 << 20
"""The memory of a conversation, beyond the process's own and beyond that of the read bytes."""

# A conversation is in memory as JSON, as text, in parts, as a prompt, and as JSON again.
_COPIES = 16
_MOST_REASON = 500  # characters


class _BeyondError(Exception):
    """A limit is reached; the text says which."""


def cpu_seconds(frame_bytes: int) -> float:
    """Return the allowed processor time of a question of so many bytes."""
    return round(_CPU_SECONDS + frame_bytes * _CPU_SECONDS_PER_BYTE, 1)


def main() -> None:
    """Answer frames until standard input ends."""
    own_bytes = _limit_this_process()
    frames_in, frames_out = sys.stdin.buffer, sys.stdout.buffer
    frames_out.write(HEAD.pack(0))
    frames_out.flush()
    compiled: Template | None = None
    while head := frames_in.read(HEAD.size):
        (frame_bytes,) = HEAD.unpack(head)
        _limit_memory(own_bytes, frame_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds(frame_bytes))
        try:
            asked = json.loads(frames_in.read(frame_bytes))
            if "source" in asked:
                compiled = None
                compiled = template_environment().from_string(asked["source"])
            assert compiled is not None
            answer = {"text": _render(compiled, asked)}
        except (MemoryError, _BeyondError) as error:
            answer = {"beyond": str(error) or f"{MOST_MEMORY_BYTES >> 20} MiB of memory"}
        except RefusalError as error:
            answer = {"refusal": str(error)[:_MOST_REASON]}
        except Exception as error:  # noqa: BLE001 - a stranger's template may raise anything
            answer = {"fault": fault_of(error)}
        content = json.dumps(answer).encode()
        frames_out.write(HEAD.pack(len(content)) + content)
        frames_out.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_this_process() -> int:
    """Limit the resources of this process; return the size of its memory."""
    own_bytes = 0
    with suppress(OSError, ValueError), open("/proc/self/statm") as file:  # noqa: PTH123 - no pathlib
        own_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the kernel ends the process in any case
    return own_bytes


def _limit_memory(own_bytes: int, frame_bytes: int) -> None:
    """Limit the memory for one conversation; some systems have no such limit."""
    if own_bytes:
        most = own_bytes + MOST_MEMORY_BYTES + _COPIES * frame_bytes
        with suppress(OSError, ValueError):
            _, hard = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _render(template: Template, asked: Mapping[str, Any]) -> str:
    """Render a conversation as a prompt.

    Raises:
        _BeyondError: The prompt is too long.
    """
    parts, total_bytes = [], 0
    names = {
        **asked["named_tokens"],  # also a stranger's: they cannot replace the names below
        **asked.get("options", {}),
        "messages": asked["messages"],
        "add_generation_prompt": asked["add_generation_prompt"],
        "tools": asked.get("tools") or None,
        "documents": None,
    }
    for part in template.generate(names):
        total_bytes += len(part.encode("utf-8", "surrogatepass"))
        if total_bytes > asked["most_bytes"]:
            raise _BeyondError(f"a prompt of {asked['most_bytes']} bytes")
        parts.append(part)
    return "".join(parts)


if __name__ == "__main__":
    main()
