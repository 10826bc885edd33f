"""What a bare gRPC call costs here: an echo between two processes with nothing of ours in them.

The server sleeps as long as it is told, blocking, so that no thread or timer of an event loop adds
to the sleep; it can do nothing else meanwhile. That makes it the strictest floor: a server that
still hears of cancels during a forward needs a second thread.

What a call costs drifts with the machine, at times by a factor of two within minutes. So the sleeps
take turns, and whoever compares something with bare calls measures them before and after it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import grpc

from paceline_bench.report import spread

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterable,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Sequence,
    )

_SERVICE, _METHOD, _STREAM = "echo.Echo", "Sleep", "SleepInTurn"
_FEWEST_ROUNDS, _MOST_ROUNDS = 15, 101
_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class BareCall:
    """One call.

    Attributes:
        sleep_ns: What the server was asked to sleep.
        overhead_ns: How much longer the call took.
        one_way_ns: From the call to the server's handler.
        back_ns: From the handler's end to the answer.
    """

    sleep_ns: int
    overhead_ns: int
    one_way_ns: int
    back_ns: int


@dataclass(frozen=True, slots=True)
class Echo:
    """The bare call for one time of sleep.

    Attributes:
        sleep_ns: What the server was asked to sleep.
        overhead_ns: How much longer the call took: the median.
        overhead_low_ns: The first decile of that.
        overhead_high_ns: The last decile.
        one_way_ns: From the call to the server's handler: the median.
        back_ns: From the handler's end to the answer: the median.
        count: Calls measured.
    """

    sleep_ns: int
    overhead_ns: int
    overhead_low_ns: int
    overhead_high_ns: int
    one_way_ns: int
    back_ns: int
    count: int


async def time_echoes(sleeps_ns: Iterable[int], *, on_a_stream: bool = False) -> list[BareCall]:
    """Time bare calls with each of these sleeps, in turn; everything else should be idle.

    Args:
        sleeps_ns: The sleeps.
        on_a_stream: Whether a call is a message of one open stream, and its answer another one;
            otherwise it is an RPC.

    Cost: nine seconds at most, whatever the sleeps are.
    """
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, "serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        sleeps = map(str, sorted({*sleeps_ns}))
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, _STREAM if on_a_stream else _METHOD),
            *(str(port), *sleeps),
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await client.communicate()
    finally:
        server.kill()
        await server.wait()
    return [BareCall(*each) for each in json.loads(answer)]


def summarise_echoes(calls: Iterable[BareCall]) -> dict[int, Echo]:
    """Take the calls of each sleep together."""
    by_sleep = defaultdict(list)
    for call in calls:
        by_sleep[call.sleep_ns].append(call)
    return {sleep_ns: _summarise(own) for sleep_ns, own in by_sleep.items()}


def _summarise(calls: Sequence[BareCall]) -> Echo:
    overhead = spread([call.overhead_ns for call in calls])
    return Echo(
        sleep_ns=calls[0].sleep_ns,
        overhead_ns=round(overhead.median),
        overhead_low_ns=round(overhead.low),
        overhead_high_ns=round(overhead.high),
        one_way_ns=round(statistics.median(call.one_way_ns for call in calls)),
        back_ns=round(statistics.median(call.back_ns for call in calls)),
        count=overhead.count,
    )


def _round_count(sleeps_ns: Sequence[int]) -> int:
    return max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(_SECONDS * 1e9) // max(1, sum(sleeps_ns))))


async def _serve() -> None:
    async def sleep(request: bytes, _context: Any) -> bytes:
        arrived_ns = time.monotonic_ns()  # the machine's clock, the same in every process
        time.sleep(int(request) / 1e9)  # noqa: ASYNC251 - see above
        return f"{arrived_ns} {time.monotonic_ns()}".encode()

    async def sleep_in_turn(requests: AsyncIterable[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await sleep(request, context)

    server = grpc.aio.server()
    handlers = {
        _METHOD: grpc.unary_unary_rpc_method_handler(sleep),
        _STREAM: grpc.stream_stream_rpc_method_handler(sleep_in_turn),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent ends


async def _call(method: str, port: int, sleeps_ns: Sequence[int]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        path = f"/{_SERVICE}/{method}"
        if method == _STREAM:
            open_stream: Any = channel.stream_stream(path, None, None)
            call = _exchange(open_stream())
        else:
            call = channel.unary_unary(path, None, None)
        await call(b"0")  # connects
        calls = [
            await _time(call, sleep_ns)
            for _ in range(_round_count(sleeps_ns))
            for sleep_ns in sleeps_ns
        ]
    print(json.dumps([astuple(each) for each in calls]))


def _exchange(stream: Any) -> Callable[[bytes], Awaitable[bytes]]:
    async def call(request: bytes) -> bytes:
        await stream.write(request)
        answer: bytes = await stream.read()
        return answer

    return call


async def _time(call: Any, sleep_ns: int) -> BareCall:
    started_ns = time.monotonic_ns()
    answer = await call(str(sleep_ns).encode())
    ended_ns = time.monotonic_ns()
    arrived_ns, left_ns = map(int, answer.split())
    return BareCall(
        sleep_ns=sleep_ns,
        overhead_ns=ended_ns - started_ns - sleep_ns,
        one_way_ns=arrived_ns - started_ns,
        back_ns=ended_ns - left_ns,
    )


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve())
    else:
        asyncio.run(_call(sys.argv[1], int(sys.argv[2]), [int(it) for it in sys.argv[3:]]))
