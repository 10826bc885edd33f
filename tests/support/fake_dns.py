"""A name server that knows one name, and is told where it leads."""

from __future__ import annotations

import socket
import struct
import threading
from typing import Self

_HEADER = struct.Struct("!6H")
_A, _IN = 1, 1
_ANSWER, _AUTHORITATIVE = 0x8000, 0x0400
_TTL_SECONDS = 0


class FakeDns:
    """Answers every question about an IPv4 address with the one that it was told, over UDP.

    Attributes:
        leads_to: That address.
        authority: Where it listens.
        answer_count: How often it has told the address.
    """

    def __init__(self, leads_to: str) -> None:
        self.leads_to = leads_to
        self.answer_count = 0

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.authority = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, name="name server")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            question, asker = self._socket.recvfrom(4096)
            if not question:
                return
            self._socket.sendto(self._answer(question), asker)

    def _answer(self, question: bytes) -> bytes:
        number, flags, *_ = _HEADER.unpack_from(question)
        end = question.index(b"\0", _HEADER.size) + 1
        (kind,) = struct.unpack_from("!H", question, end)
        told = b""
        if kind == _A:
            self.answer_count += 1
            address = socket.inet_aton(self.leads_to)
            # The name is where it was in the question.
            told = struct.pack("!HHHIH", 0xC000 | _HEADER.size, _A, _IN, _TTL_SECONDS, 4) + address
        flags |= _ANSWER | _AUTHORITATIVE
        header = _HEADER.pack(number, flags, 1, 1 if told else 0, 0, 0)
        return header + question[_HEADER.size : end + 4] + told
