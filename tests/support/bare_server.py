"""A gRPC server without anything of ours, in this process or (`python bare_server.py`) another."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ECHO, HANG = "/test.Service/Echo", "/test.Service/Hang"
LIST, COUNT, FLOOD = "/test.Service/List", "/test.Service/Count", "/test.Service/Flood"


class BareServer:
    """Echoes, hangs, counts to three, counts to three and hangs, and writes without an end.

    Attributes:
        begun: Calls of the last three.
        cancelled: Those of them that were cancelled.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0

    @asynccontextmanager
    async def running(self, *interceptors: grpc.aio.ServerInterceptor) -> AsyncIterator[str]:
        """Serve; yield the address."""
        server = grpc.aio.server(interceptors=interceptors)
        server.add_generic_rpc_handlers((self._handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)

    async def _echo(self, request: bytes, _context: Any) -> bytes:
        return request

    async def _hang(self, _request: bytes, _context: Any) -> None:
        with self._noted():
            await asyncio.Event().wait()

    async def _list(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for number in b"123":
            yield bytes((number,))

    async def _count(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        with self._noted():
            for number in b"123":
                yield bytes((number,))
            await asyncio.Event().wait()

    async def _flood(self, _request: bytes, _context: Any) -> AsyncIterator[bytes]:
        with self._noted():
            while True:
                yield b"1"

    @contextmanager
    def _noted(self) -> Iterator[None]:
        self.begun += 1
        try:
            yield
        finally:
            self.cancelled += 1

    def _handlers(self) -> grpc.GenericRpcHandler:
        handlers = {
            ECHO: grpc.unary_unary_rpc_method_handler(self._echo),
            HANG: grpc.unary_unary_rpc_method_handler(self._hang),
            LIST: grpc.unary_stream_rpc_method_handler(self._list),
            COUNT: grpc.unary_stream_rpc_method_handler(self._count),
            FLOOD: grpc.unary_stream_rpc_method_handler(self._flood),
        }

        class Handlers(grpc.GenericRpcHandler):
            def service(self, details: Any) -> Any:
                return handlers.get(details.method)

        return Handlers()


async def _serve() -> None:
    """Say where it listens, and serve until standard input ends."""
    async with BareServer().running() as address:
        print(address, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve())
