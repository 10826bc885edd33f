"""The Python clients' conformance driver: one JSON request a line in, one JSON answer a line out.

`python_driver.py` drives `Client`, `python_driver.py --asyncio` drives `AsyncClient`. What the
lines say is in tests/contract/vectors/clients/README.md. It acts and reports; it judges nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from contextlib import aclosing, closing
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import AsyncClient, Client, Grammar, PacelineError, Tls
from paceline.errors import ClientCancelledError
from paceline.generation import Chunk, TimelineEvent
from paceline.request import GenerateOptions

if TYPE_CHECKING:
    from collections.abc import Callable


class UnsupportedError(Exception):
    """The request asks for what this driver does not know."""


@dataclass
class Reading:
    """What is read of one stream."""

    chunks: list[Chunk] = field(default_factory=list)
    events: list[TimelineEvent] = field(default_factory=list)
    error: PacelineError | None = None
    cancelled: bool = False
    first_chunk_seconds: float | None = None
    generation: Any = None

    def add(self, event: Chunk | TimelineEvent, *, seconds: float) -> None:
        if isinstance(event, TimelineEvent):
            self.events.append(event)
            return
        if self.first_chunk_seconds is None:
            self.first_chunk_seconds = seconds
        self.chunks.append(event)

    def extend(self, other: Reading) -> None:
        """Put what a second reader of the same generation read behind what the first one did."""
        self.chunks += other.chunks
        self.error = other.error

    def fail(self, error: PacelineError, *, cancelled: bool = False) -> None:
        if cancelled and isinstance(error, ClientCancelledError):
            self.cancelled = True
        else:
            self.error = error

    def told(self) -> dict[str, Any]:
        generation = self.generation
        return {
            "chunks": [_plain(chunk) for chunk in self.chunks],
            "text": "".join(chunk.text for chunk in self.chunks),
            "prompt_chunks": [_plain(it) for it in generation.prompt_chunks] if generation else [],
            "started": generation and _plain(generation.started),
            "finished": generation and _finished(generation.finished),
            "error": _error(self.error),
        }


@dataclass
class Blocking:
    """Drives `Client`."""

    client: Client

    def read(self, generation: Any, request: dict[str, Any]) -> Reading:
        reading, began = Reading(generation=generation), time.monotonic()
        cancel = request.get("cancel") or {}
        alarm = threading.Timer(cancel.get("after_seconds", 0), generation.close)
        if "after_seconds" in cancel:
            alarm.start()
        try:
            with closing(_events(generation, request)) as events:
                for event in events:
                    reading.add(event, seconds=time.monotonic() - began)
                    if len(reading.chunks) == cancel.get("after_chunks"):
                        reading.cancelled = True
                        break
                    if request.get("second_reader") and len(reading.chunks) == 1:
                        reading.extend(self.read(generation, {}))
                    time.sleep(request.get("pause_seconds", 0))
        except PacelineError as error:
            reading.fail(error, cancelled=bool(cancel))
        finally:
            alarm.cancel()
        return reading

    def generate(self, request: dict[str, Any]) -> Any:
        return self.client.generate(**_call(request))

    def resume(self, generation: Any) -> Any:
        return self.client.resume(generation)

    def info(self, metadata: Any) -> Any:
        return self.client.info(metadata=metadata)

    def close(self) -> None:
        self.client.close()


@dataclass
class Asyncio:
    """Drives `AsyncClient`, on a loop of its own."""

    client: AsyncClient
    runner: asyncio.Runner

    def read(self, generation: Any, request: dict[str, Any]) -> Reading:
        return self.runner.run(self._read(generation, request))

    async def _read(self, generation: Any, request: dict[str, Any]) -> Reading:
        reading, began = Reading(generation=generation), time.monotonic()
        cancel = request.get("cancel") or {}
        try:
            async with (
                asyncio.timeout(cancel.get("after_seconds")),
                aclosing(_events(generation, request)) as events,
            ):
                async for event in events:
                    reading.add(event, seconds=time.monotonic() - began)
                    if len(reading.chunks) == cancel.get("after_chunks"):
                        reading.cancelled = True
                        break
                    if request.get("second_reader") and len(reading.chunks) == 1:
                        reading.extend(await self._read(generation, {}))
                    await asyncio.sleep(request.get("pause_seconds", 0))
        except TimeoutError:
            reading.cancelled = True
        except PacelineError as error:
            reading.fail(error, cancelled=bool(cancel))
        return reading

    def generate(self, request: dict[str, Any]) -> Any:
        return self.client.generate(**_call(request))

    def resume(self, generation: Any) -> Any:
        return self.client.resume(generation)

    def info(self, metadata: Any) -> Any:
        return self.runner.run(self.client.info(metadata=metadata))

    def close(self) -> None:
        self.runner.run(self.client.close())


class Driver:
    """Answers requests, and keeps the clients that they name."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self._runner = runner
        self._clients: dict[str, Blocking | Asyncio] = {}
        self._held: list[Any] = []  # generations: letting go of one must not be what cancels it

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        told = {
            **Reading().told(),
            "case": request.get("case"),
            "events": [],
            "cancelled": False,
            "resumed": None,
            "system": None,
            "first_chunk_seconds": None,
        }
        try:
            told |= self._do(request)
        except PacelineError as error:
            told["error"] = _error(error)
        except UnsupportedError as why:
            return {"case": request.get("case"), "unsupported": str(why)}
        return {**told, "elapsed_seconds": time.monotonic() - began}

    def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "generate":
                return self._generate(request)
            case "system_info":
                metadata = _metadata(request.get("metadata"))
                return {"system": asdict(self._client(request).info(metadata))}
            case "close":
                client = self._clients.pop(request["client"], None)
                if client is not None:
                    client.close()
                self._held.clear()
                return {}
            case other:
                raise UnsupportedError(f"do {other!r}")

    def _generate(self, request: dict[str, Any]) -> dict[str, Any]:
        client = self._client(request)
        generation = client.generate(request)
        self._held.append(generation)
        reading = client.read(generation, request)
        told = reading.told()
        told["events"] = [_plain(event) for event in reading.events]
        told["cancelled"] = reading.cancelled
        told["first_chunk_seconds"] = reading.first_chunk_seconds
        if request.get("then_resume") and (reading.error or reading.cancelled):
            self._held.append(client.resume(generation))
            rest = client.read(self._held[-1], {})
            told["resumed"] = rest.told()
        return told

    def _client(self, request: dict[str, Any]) -> Blocking | Asyncio:
        name = request["client"]
        if name not in self._clients:
            self._clients[name] = self._connect(request)
        return self._clients[name]

    def _connect(self, request: dict[str, Any]) -> Blocking | Asyncio:
        settings = {
            "tls": _tls(request.get("tls"), from_memory=request.get("tls_from_memory", False)),
            "insecure": request.get("insecure", False),
            "metadata": _metadata(request.get("client_metadata")),
            "token": _token(request.get("tokens")),
        }
        if "client_timeout_seconds" in request:
            settings["timeout"] = _number(request["client_timeout_seconds"])
        address = request.get("addresses") or request["address"]
        if self._runner is None:
            if None in (request.get("tokens") or ()):
                raise UnsupportedError("this client's callback for tokens blocks")
            return Blocking(Client(address, **settings))
        return Asyncio(AsyncClient(address, **settings), self._runner)


def _tls(files: dict[str, str] | None, *, from_memory: bool) -> Tls | None:
    if files is None:
        return None
    if from_memory:
        return Tls(**{name: Path(path).read_bytes() for name, path in files.items()})
    return Tls(**{f"{name}_file": path for name, path in files.items()})


def _metadata(metadata: dict[str, str] | None) -> dict[str, str | bytes] | None:
    """Read metadata, in which bytes are hexadecimal digits."""
    return metadata and {
        name: bytes.fromhex(value) if name.endswith("-bin") else value
        for name, value in metadata.items()
    }


def _token(tokens: list[str | None] | None) -> Callable[[], Any] | None:
    """Tell one token after the other, and the last one again and again; None never comes."""
    if tokens is None:
        return None
    left = list(tokens)

    def token() -> Any:
        told = left.pop(0) if len(left) > 1 else left[0]
        return asyncio.Event().wait() if told is None else told

    return token


def _events(generation: Any, request: dict[str, Any]) -> Any:
    if request.get("events"):
        return generation.events()
    return iter(generation) if hasattr(generation, "__iter__") else generation.__aiter__()


def _call(request: dict[str, Any]) -> dict[str, Any]:
    """Read the arguments of `generate`."""
    options = dict(request.get("options") or {})
    unknown = options.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise UnsupportedError(f"options {', '.join(sorted(unknown))}")
    options = {name: _number(value) for name, value in options.items()}
    if "logit_bias" in options:  # JSON's keys are texts
        biases = options["logit_bias"]
        options["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    if "grammar" in options:
        options["grammar"] = Grammar(**options["grammar"])
    if isinstance(options.get("seed"), str):
        options["seed"] = int(options["seed"])
    prompt = request["prompt"]
    return {
        "prompt": prompt["text"] if "text" in prompt else prompt["token_ids"],
        "timeout": _number(request.get("timeout_seconds")),
        "resume_attempts": request.get("resume_attempts", 0),
        "metadata": _metadata(request.get("metadata")),
        **options,
    }


def _number(value: Any) -> Any:
    """Read what JSON has no number for."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _plain(record: Any) -> Any:
    """Turn the client's data into JSON's, with enums by their names."""
    return record and json.loads(json.dumps(_named(asdict(record))))


def _named(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_named(each) for each in value]
    return value


def _finished(finished: Any) -> Any:
    told = _plain(finished)
    if told:
        told["timeline_length"] = len(told.pop("timeline"))
    return told


def _error(error: PacelineError | None) -> dict[str, Any] | None:
    return error and {
        "kind": type(error).__name__.removesuffix("Error"),
        "code": error.code,
        "reason": error.reason,
        "message": error.message,
        "metadata": error.metadata,
        "violations": [asdict(violation) for violation in error.violations],
        "retry_after_seconds": error.retry_after_seconds,
    }


def main() -> None:
    """Answer each line of stdin on stdout."""
    with asyncio.Runner() as runner:
        driver = Driver(runner if "--asyncio" in sys.argv[1:] else None)
        for line in sys.stdin:
            print(json.dumps(driver.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
