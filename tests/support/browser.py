"""A headless browser, driven by the DevTools protocol: Debian's Chromium, or another one's."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import aiohttp

from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)

_FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-proxy-server",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-sync",
)
_ANSWER_SECONDS = 60


class Tab:
    """One page.

    Attributes:
        problems: What the browser complained of: errors in scripts, on the console, refused by the
            page's policy, requests that failed.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loaded = asyncio.Event()
        self.problems: list[str] = []

    async def read(self) -> None:
        """Hand out answers, and keep complaints, until the socket is closed."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._waiting.pop(content["id"]).set_result(content)
            else:
                self._note(content["method"], content["params"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in {"error", "warning"}:
            self.problems.append(str([it.get("value") for it in told["args"]]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in {"error", "warning"}:
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_ANSWER_SECONDS):
            content = await answer
        assert "error" not in content, (method, content["error"])
        return content["result"]

    async def open(self, url: str) -> None:
        # By way of an empty page: to another fragment of the same one it would load nothing.
        for each in ("about:blank", url):
            self._loaded.clear()
            await self.call("Page.navigate", url=each)
            async with asyncio.timeout(_ANSWER_SECONDS):
                await self._loaded.wait()

    async def js(self, expression: str) -> Any:
        """Evaluate an expression in the page, and wait for it if it is a promise."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, (expression, told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, expression: str, *, within_seconds: float = 90.0) -> None:
        """Wait until an expression is true in the page."""
        ends = asyncio.get_running_loop().time() + within_seconds
        while not await self.js(f"Boolean({expression})"):
            if asyncio.get_running_loop().time() > ends:
                shown = await self.js("document.body.innerText")
                raise AssertionError(f"never: {expression}\n{self.problems}\n{shown}")
            await asyncio.sleep(0.02)

    async def click(self, selector: str) -> None:
        await self.js(f"document.querySelector({json.dumps(selector)}).click()")

    async def press(self, key: str, *, text: str = "", modifiers: int = 0) -> None:
        """Press a key as a keyboard does; modifiers: 2 is Ctrl, 8 is Shift."""
        codes = {"Tab": 9, "Enter": 13, " ": 32}
        shared = {"key": key, "modifiers": modifiers, "windowsVirtualKeyCode": codes.get(key, 0)}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """Return what is seen, all of the page's height, as PNG."""
        told = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(told["data"])


@asynccontextmanager
async def browsing(directory: Path) -> AsyncIterator[Tab]:
    """Run a browser with one tab; what it keeps is in the directory."""
    assert BROWSER is not None
    flags = [*_FLAGS, f"--user-data-dir={directory}"]
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # which Chromium refuses to set up as root
    process = await asyncio.create_subprocess_exec(
        *(BROWSER, *flags, "about:blank"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "HOME": str(directory)},
    )
    try:
        async with _attached(await _port(directory, process)) as tab:
            yield tab
            with suppress(aiohttp.ClientError, TimeoutError, AssertionError):
                await tab.call("Browser.close")
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _port(directory: Path, process: asyncio.subprocess.Process) -> int:
    told = directory / "DevToolsActivePort"
    await until(
        lambda: process.returncode is not None or (told.exists() and told.read_text().strip()),
        what="the browser listens",
    )
    assert process.returncode is None, "the browser could not start"
    return int(told.read_text().split()[0])


@asynccontextmanager
async def _attached(port: int) -> AsyncIterator[Tab]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [each for each in await answer.json() if each["type"] == "page"]
        address = pages[0]["webSocketDebuggerUrl"]
        async with session.ws_connect(address, max_msg_size=1 << 28) as socket:
            tab = Tab(socket)
            reading = asyncio.create_task(tab.read(), name="read a browser's answers")
            try:
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
            finally:
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading
