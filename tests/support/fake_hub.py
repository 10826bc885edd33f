"""A model hub on this machine: what `huggingface_hub` asks for when it downloads a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMIT = "c0ffee" + 34 * "0"


class FakeHub:
    """Serves directories as repositories, and remembers which files were fetched.

    Args:
        repositories: Directory by id, such as "owner/model".
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self._repositories = repositories
        self.fetched: list[str] = []

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Serve, and tell the address."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        thread = threading.Thread(target=server.serve_forever, name="fake hub")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, path: str) -> tuple[bytes, dict[str, str]] | None:
        """Return body and headers, or None for what there is not."""
        for name, directory in self._repositories.items():
            if path.startswith(f"/api/models/{name}/tree/"):
                return _json([_entry(file, directory) for file in _files(directory)])
            if path.startswith(f"/api/models/{name}/"):
                siblings = [
                    {"rfilename": str(it.relative_to(directory))} for it in _files(directory)
                ]
                return _json({"id": name, "sha": COMMIT, "siblings": siblings})
            if path.startswith(f"/{name}/resolve/{COMMIT}/"):
                file = directory / path.partition(f"{COMMIT}/")[2]
                self.fetched.append(file.name)
                content = file.read_bytes()
                return content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        return None


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            found = hub.answer(self.path.partition("?")[0])
            body, headers = found or (b"", {"X-Error-Code": "RepoNotFound"})
            self.send_response(200 if found else 404)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _entry(file: Path, directory: Path) -> dict[str, object]:
    content = file.read_bytes()
    path = str(file.relative_to(directory))
    return {"type": "file", "path": path, "size": len(content), "oid": _digest(content)}


def _json(content: object) -> tuple[bytes, dict[str, str]]:
    return json.dumps(content).encode(), {"Content-Type": "application/json"}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
