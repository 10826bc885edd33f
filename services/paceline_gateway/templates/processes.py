"""The processes that render templates: a few, started when needed, replaced when they end.

The gateway has threads of gRPC, so it never forks: each process is a program of its own
(`worker`), which talks to the gateway in JSON over two pipes. Its environment has only
Python's folder and the time zone, and its only files are the pipes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from paceline_gateway.templates.worker import HEAD, cpu_seconds

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Mapping

_log = logging.getLogger(__name__)

# A process has 20 MB, with a bad template 64 MiB more: all fit in the chart's memory limit.
_PROCESSES = 3
_START_SECONDS = 30.0  # Python takes a tenth of a second, and more on a busy machine
# Processor time is limited in the process; this limit ends a stopped or swapped-out process.
_ANSWER_SECONDS = 20.0
_QUEUE_SECONDS = 10.0
_ANSWER_BYTES_PER_BYTE = 8  # JSON writes one with six at most
_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL")


class BeyondLimitsError(Exception):
    """A template needs more than allowed; the text says of what."""


class NoProcessError(Exception):
    """No process can be started, or none is free; the text says why."""


class TemplateProcesses:
    """Some processes that render. Call `close` at the end.

    Cancellation:
        A caller that is cancelled during a rendering ends its process.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(_PROCESSES)
        self._idle: list[_Renderer] = []
        self._all: set[_Renderer] = set()
        self._is_closed = False

    async def prepare(self) -> None:
        """Start a process before the first conversation; log a failure."""
        try:
            async with self._renderer():
                pass
        except NoProcessError as error:
            _log.warning("conversations cannot be rendered: %s", error)

    async def render(self, asked: Mapping[str, Any], *, fingerprint: str) -> Mapping[str, Any]:
        """Render a conversation in a process; `worker` describes questions and answers.

        Args:
            asked: The question, with the template's source.
            fingerprint: The template's fingerprint; a process keeps its last template compiled.

        Raises:
            BeyondLimitsError: The template needs too much.
            NoProcessError: No process can be started, or all are busy for long.
        """
        async with self._renderer() as renderer:
            return await renderer.ask(asked, fingerprint=fingerprint)

    async def close(self) -> None:
        """End all processes, and wait until they are gone."""
        self._is_closed = True
        for renderer in tuple(self._all):
            await renderer.end()
            self._all.discard(renderer)

    @asynccontextmanager
    async def _renderer(self) -> AsyncIterator[_Renderer]:
        """Lend a process; end it if the work with it does not end normally."""
        try:
            async with asyncio.timeout(_QUEUE_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            raise NoProcessError("all processes that render templates are busy") from None
        try:
            renderer = self._waiting() or await self._start()
            is_whole = False
            try:
                yield renderer
                is_whole = True
            finally:
                if is_whole and not self._is_closed:
                    self._idle.append(renderer)
                else:
                    await asyncio.shield(renderer.end())
                    self._all.discard(renderer)
        finally:
            self._free.release()

    def _waiting(self) -> _Renderer | None:
        """Take an idle process, and forget processes that have ended by themselves."""
        while self._idle:
            renderer = self._idle.pop()
            if renderer.is_alive:
                return renderer
            self._all.discard(renderer)
        return None

    async def _start(self) -> _Renderer:
        if self._is_closed:
            raise NoProcessError("this gateway is shutting down")
        renderer = _Renderer(await _new_process())
        self._all.add(renderer)
        try:
            await renderer.until_ready()
        except BaseException:
            await asyncio.shield(renderer.end())
            self._all.discard(renderer)
            raise
        return renderer


class _Renderer:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._fingerprint: str | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process is not known to have ended: its pipe tells that before its code."""
        assert self._process.stdout is not None
        return self._process.returncode is None and not self._process.stdout.at_eof()

    async def until_ready(self) -> None:
        """Wait for the process's first frame.

        Raises:
            NoProcessError: The process ended before, or took too long.
        """
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._frame(0)
        except TimeoutError:
            raise NoProcessError(f"a process did not start within {_START_SECONDS:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._process.wait()
            raise NoProcessError(f"a process ended with code {code} at its start") from None

    async def ask(self, asked: Mapping[str, Any], *, fingerprint: str) -> Mapping[str, Any]:
        """Have the process render.

        Raises:
            BeyondLimitsError: The template needs too much. The process may be dead.
        """
        if fingerprint == self._fingerprint:
            asked = {name: value for name, value in asked.items() if name != "source"}
        self._fingerprint = None  # until the process has answered
        content = json.dumps(asked).encode()
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                self._process.stdin.write(HEAD.pack(len(content)) + content)
                await self._process.stdin.drain()
                frame = await self._frame(_ANSWER_BYTES_PER_BYTE * asked["most_bytes"])
                answer: Mapping[str, Any] = json.loads(frame)
        except TimeoutError:
            raise BeyondLimitsError(f"{_ANSWER_SECONDS:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._process.wait()
            raise BeyondLimitsError(_reason(code, frame_bytes=len(content))) from None
        if "beyond" in answer:
            raise BeyondLimitsError(answer["beyond"])
        if "text" in answer:
            self._fingerprint = fingerprint
        return answer

    async def end(self) -> None:
        """Kill the process, and wait until it is gone."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _frame(self, most_bytes: int) -> bytes:
        assert self._process.stdout is not None
        (length,) = HEAD.unpack(await self._process.stdout.readexactly(HEAD.size))
        if length > most_bytes:
            raise BeyondLimitsError(f"an answer of {most_bytes} bytes")
        return await self._process.stdout.readexactly(length)


def _reason(code: int, *, frame_bytes: int) -> str:
    """Name the limit that a template exceeded, from the exit code of its process."""
    if code == -signal.SIGPROF:
        return f"{cpu_seconds(frame_bytes):g} s of processor time"
    return f"its process can use (the process ended with code {code})"


async def _new_process() -> Process:
    """Start a process.

    Raises:
        NoProcessError: The system cannot start a process.
    """
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing in the working directory is imported
            "-m",
            "paceline_gateway.templates.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the gateway only
        )
    except (OSError, ValueError) as error:
        raise NoProcessError(f"no process can be started: {error}") from error
