"""`python leaving_client.py ADDRESS METHOD`: for each line, a number, leaves that many streams."""

from __future__ import annotations

import asyncio
import sys

import grpc

_AT_ONCE = 4


async def _leave(channel: grpc.aio.Channel, method: str) -> None:
    """Leave a stream with its first message."""
    call = channel.unary_stream(method)(b"request", timeout=60)
    await call.read()
    call.cancel()


async def _serve(address: str, method: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        while line := await asyncio.to_thread(sys.stdin.readline):
            for _ in range(0, int(line), _AT_ONCE):
                await asyncio.gather(*(_leave(channel, method) for _ in range(_AT_ONCE)))
            print("left", flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
