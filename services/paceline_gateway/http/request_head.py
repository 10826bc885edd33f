"""Checks a request's head before it is parsed.

If two programs read one head differently, a request can hide in another one's body (request
smuggling), or one key behind another. h11 is not strict: it accepts bare line feeds and folded
lines, drops a repeated Content-Length, and prefers Transfer-Encoding to it. So a head that could be
read in two ways is refused here, and the connection ends.
"""

from __future__ import annotations

import re

_MOST_FIELDS = 128
_MOST_BYTES = 16 * 1024

# The form of a request to a proxy; the standard wants servers to understand it.
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<path>[/?][^#]*)?", re.IGNORECASE)
_REQUEST_LINE = re.compile(rb"[!-~]+ (?P<target>[!-~]+) HTTP/(?P<version>[0-9]\.[0-9])")
_VERSIONS = frozenset({b"1.0", b"1.1"})
_NUMBER = re.compile(rb"[0-9]{1,19}")
# Also for an incomplete head, whose last byte may be the first of a pair.
_STRAY_END_OF_LINE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_FOLD = re.compile(rb"\n[ \t]")
# The fields that this server uses: each must occur once.
_ONCE = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"host",
        b"origin",
        b"transfer-encoding",
        b"x-api-key",
    }
)


class HeadError(Exception):
    """A refused head; the text says why.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def end_of_head(received: bytes) -> int:
    """Return the offset of the head's end in the received bytes; their length if it is missing."""
    found = received.find(b"\r\n\r\n")
    return len(received) if found < 0 else found + 4


def path_of(target: bytes) -> bytes:
    """Return the path and the query of a checked target, which has one of two forms."""
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        return target
    path = found["path"] or b""
    return path if path.startswith(b"/") else b"/" + path


def check_head(head: bytes) -> None:
    """Check the received part of a head.

    Raises:
        HeadError: The head could be read in two ways, or asks for something that no gateway serves.
    """
    if _STRAY_END_OF_LINE.search(head):
        raise HeadError("a line of the head does not end with CR LF")
    if _FOLD.search(head):
        raise HeadError("a line of the head is folded")
    if len(head) > _MOST_BYTES:
        raise HeadError(f"the head has more than {_MOST_BYTES} bytes", status=431)
    if not head.endswith(b"\r\n\r\n"):
        return
    request_line, *lines = head[:-4].split(b"\r\n")
    version, host = _check_request_line(request_line)
    if len(lines) > _MOST_FIELDS:
        raise HeadError(f"the head has more than {_MOST_FIELDS} fields", status=431)
    _check_fields([line.partition(b":") for line in lines], version=version, host=host)


def _check_request_line(line: bytes) -> tuple[bytes, bytes | None]:
    """Return the version, and the host that the target names, if it does."""
    found = _REQUEST_LINE.fullmatch(line)
    if found is None:
        raise HeadError("the first line is not a request line")
    if found["version"] not in _VERSIONS:
        raise HeadError("only HTTP/1.0 and HTTP/1.1 are supported", status=505)
    if found["target"].startswith(b"/"):
        return found["version"], None
    if (absolute := _ABSOLUTE.fullmatch(found["target"])) is None:
        raise HeadError("the request's target must be a path, or http://HOST and a path")
    return found["version"], absolute["host"].lower()


def _check_fields(
    fields: list[tuple[bytes, bytes, bytes]], *, version: bytes, host: bytes | None
) -> None:
    values: dict[bytes, bytes] = {}
    for name, _, value in fields:
        known = name.lower()
        if known in values and known in _ONCE:
            raise HeadError(f"{known.decode('ascii')} is given twice")
        values[known] = value.strip(b" \t")
    if host is not None and values.get(b"host", host).lower() != host:
        raise HeadError("the request is for another host, and this server is not a proxy")
    length = values.get(b"content-length")
    if length is not None and not _NUMBER.fullmatch(length):
        raise HeadError("content-length is not a number")
    if (coding := values.get(b"transfer-encoding")) is None:
        return
    if length is not None:
        raise HeadError("content-length and transfer-encoding exclude each other")
    if version == b"1.0":
        raise HeadError("HTTP/1.0 has no transfer-encoding")
    if coding.lower() != b"chunked":
        raise HeadError("transfer-encoding must be chunked", status=501)
