"""The record of `paceline up` about its servers, for `paceline top` on the same machine.

There is one file for each orchestrator's address, in a directory that belongs to the user.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.plain_files import read_plain_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_BYTES = 1 << 20


@contextmanager
def record_metrics_addresses(orchestrator: str, metrics: Mapping[str, str]) -> Iterator[None]:
    """Record a system's metrics addresses while it runs, if the directory can be used.

    Args:
        orchestrator: The orchestrator's address.
        metrics: The metrics addresses of all servers, by server name.
    """
    file = _file(orchestrator)
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(file.parent)
        file.write_text(json.dumps({"pid": os.getpid(), "metrics": dict(metrics)}))
    try:
        yield
    finally:
        with suppress(OSError):
            _check_owner(file.parent)
            file.unlink()


def metrics_addresses(orchestrator: str) -> dict[str, str]:
    """Return where the servers behind an orchestrator of this machine show metrics, by name.

    Empty if the user runs no such system with `paceline up`.
    """
    file = _file(orchestrator)
    try:
        _check_owner(file.parent)
        content = json.loads(read_plain_file(file, most_bytes=_MOST_BYTES))
        os.kill(content["pid"], 0)  # raises if the process was killed, and left its file
    except (OSError, ValueError):
        return {}
    return {str(name): str(address) for name, address in content["metrics"].items()}


def _check_owner(directory: Path) -> None:
    """Refuse another user's directory, which could have false records or links.

    Raises:
        PermissionError: The directory belongs to another user.
    """
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")


def _file(orchestrator: str) -> Path:
    own = os.environ.get("XDG_RUNTIME_DIR")
    shared = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    directory = Path(own) / "paceline" if own else shared
    return directory / f"{re.sub(r'[^A-Za-z0-9.]', '-', orchestrator)}.json"
