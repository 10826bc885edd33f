"""What a bare gRPC call costs here: an echo between two processes with nothing of ours in them.

The server sleeps as long as it is told, blocking, so that no thread or timer of an event loop adds
to the sleep; it can do nothing else meanwhile. That makes it the strictest floor: a server that
still hears of cancels during a forward needs a second thread.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Echo", "measure_echoes"]

_SERVICE, _METHOD = "echo.Echo", "Sleep"
_FEWEST, _MOST = 21, 101
_SECONDS_PER_SLEEP = 2.0


@dataclass(frozen=True, slots=True)
class Echo:
    """The bare call for one time of sleep.

    Attributes:
        sleep_ns: What the server was asked to sleep.
        overhead_ns: How much longer the call took: the median.
        one_way_ns: From the call to the server's handler: the median.
        back_ns: From the handler's end to the answer: the median.
        count: Calls measured.
    """

    sleep_ns: int
    overhead_ns: int
    one_way_ns: int
    back_ns: int
    count: int


async def measure_echoes(sleeps_ns: Iterable[int]) -> dict[int, Echo]:
    """Measure the bare call for each of these sleeps; everything else should be idle.

    Cost: about two seconds for each.
    """
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__, "serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())
        plan = [[sleep_ns, _call_count(sleep_ns)] for sleep_ns in sorted({*sleeps_ns})]
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __name__, "call", str(port), json.dumps(plan)),
            stdout=asyncio.subprocess.PIPE,
        )
        answer, _ = await client.communicate()
    finally:
        server.kill()
        await server.wait()
    echoes = [Echo(**each) for each in json.loads(answer)]
    return {echo.sleep_ns: echo for echo in echoes}


def _call_count(sleep_ns: int) -> int:
    return max(_FEWEST, min(_MOST, int(_SECONDS_PER_SLEEP * 1e9 / max(1, sleep_ns))))


async def _serve() -> None:
    async def sleep(request: bytes, _context: Any) -> bytes:
        arrived_ns = time.monotonic_ns()  # the machine's clock, the same in every process
        time.sleep(int(request) / 1e9)  # noqa: ASYNC251 - see above
        return f"{arrived_ns} {time.monotonic_ns()}".encode()

    server = grpc.aio.server()
    handlers = {_METHOD: grpc.unary_unary_rpc_method_handler(sleep)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the parent ends


async def _call(port: int, plan: Sequence[tuple[int, int]]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(f"/{_SERVICE}/{_METHOD}", None, None)
        await call(b"0")  # connects
        echoes = []
        for sleep_ns, count in plan:
            times = [await _time(call, sleep_ns) for _ in range(count)]
            overhead, one_way, back = (
                round(statistics.median(each)) for each in zip(*times, strict=True)
            )
            echoes.append(Echo(sleep_ns, overhead, one_way, back, count))
    print(json.dumps([asdict(echo) for echo in echoes]))


async def _time(call: Any, sleep_ns: int) -> tuple[int, int, int]:
    """Call once; return how much longer than the sleep it took, the way there, and the way back."""
    started_ns = time.monotonic_ns()
    answer = await call(str(sleep_ns).encode())
    ended_ns = time.monotonic_ns()
    arrived_ns, left_ns = map(int, answer.split())
    return ended_ns - started_ns - sleep_ns, arrived_ns - started_ns, ended_ns - left_ns


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.run(_serve())
    else:
        asyncio.run(_call(int(sys.argv[2]), json.loads(sys.argv[3])))
