"""The clients' conformance drivers: one process for each language, asked line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[3]
_PYTHON_DRIVER = "tests/clients/drivers/python_driver.py"


@dataclass(frozen=True)
class Language:
    """A client to test: how its driver is started, and which file has to be built before."""

    name: str
    command: tuple[str, ...]
    built: str
    make: str

    @property
    def is_built(self) -> bool:
        return (ROOT / self.built).exists()


LANGUAGES = (
    Language("python", (sys.executable, _PYTHON_DRIVER), _PYTHON_DRIVER, "install"),
    Language(
        "python-asyncio", (sys.executable, _PYTHON_DRIVER, "--asyncio"), _PYTHON_DRIVER, "install"
    ),
    Language(
        "typescript",
        ("node", "clients/typescript/dist/conformance.js"),
        "clients/typescript/dist/conformance.js",
        "client-typescript",
    ),
    Language("go", ("clients/go/bin/conformance",), "clients/go/bin/conformance", "client-go"),
    Language(
        "cpp", ("clients/cpp/build/conformance",), "clients/cpp/build/conformance", "client-cpp"
    ),
)


class Driver:
    """One language's driver process; started by the first request, and again after its death."""

    def __init__(self, language: Language, *, environment: Mapping[str, str] | None = None) -> None:
        self.language = language
        self._environment = {**os.environ, **(environment or {})}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the driver
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any], *, within_seconds: float) -> dict[str, Any]:
        """Send one request and return its answer; a driver that is late is killed."""
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(within_seconds, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            was_in_time = late.is_alive()
            late.cancel()
        if not line:
            process.wait(10)
            what = "ended" if was_in_time else f"gave no answer within {within_seconds:g} s"
            raise AssertionError(f"the {self.language.name} driver {what}:\n{self._said()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end as it should: at the end of its input, with 0."""
        if self._process is None or self._process.poll() is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(10)
        assert code == 0, f"the {self.language.name} driver ended with {code}:\n{self._said()}"

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                self.language.command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                encoding="utf-8",
                env=self._environment,
            )
        return self._process

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]
