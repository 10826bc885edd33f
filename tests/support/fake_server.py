"""A process that announces itself as the servers do, and serves nothing.

Told apart by further flags: --fails ends it before it is ready, --deaf ignores SIGTERM,
--learns has a page of metrics with a ready target, and from the third look on a drafter.
--waits-for=PATH is not ready before there is that file; with --talks it logs a line now and then,
with --logs its log ends as a server's does when it has announced itself,
with --healthy its health says meanwhile that it is alive, else it says nothing.
"""

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path


def serve_metrics() -> str:
    """Serve the page from a thread; return its address. Each look is a line of the log."""
    looks = count(1)

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            look = next(looks)
            print(f"look {look}", file=sys.stderr, flush=True)
            ready = 1 if look > 2 else 0
            self.send_response(200)
            self.end_headers()
            for role, number in (("drafter", ready), ("target", 1)):
                for word, servers in (("other_dtype", number), ("loading", 1 - number)):
                    line = f'paceline_servers{{role="{role}",standing="{word}"}} {servers}\n'
                    self.wfile.write(line.encode())

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_port}"


def serve_health() -> tuple[object, str]:
    """Say by gRPC that this process is alive, as long as the server is kept; return the address."""
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    server = grpc.server(ThreadPoolExecutor())
    states = health.HealthServicer()
    states.set("liveness", health_pb2.HealthCheckResponse.SERVING)
    states.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(states, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


def wait_for_a_file() -> None:
    if "--logs" in sys.argv:
        print(
            "2026-11-27T12:00:00.000+00:00 INFO    listening address=a", file=sys.stderr, flush=True
        )
    paths = [it.partition("=")[2] for it in sys.argv if it.startswith("--waits-for=")]
    while paths and not Path(paths[0]).exists():
        if "--talks" in sys.argv:
            print("downloading", file=sys.stderr, flush=True)
        time.sleep(0.01)


def main() -> int:
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("loading", file=sys.stderr)
    if "--fails" in sys.argv:
        print("no such model", file=sys.stderr)
        return 3
    more = {"metrics_address": serve_metrics()} if "--learns" in sys.argv else {}
    if "--healthy" in sys.argv:
        _server, more["health_address"] = serve_health()
    for event in ("listening", "ready"):
        if event == "ready":
            wait_for_a_file()
        listen = sys.argv[sys.argv.index("--listen") + 1].replace(":0", f":{os.getpid()}")
        words = {"event": event, "pid": os.getpid(), "address": listen, **more}
        print(json.dumps(words), flush=True)
    while sys.stdin.read():
        pass
    return 1


if __name__ == "__main__":
    sys.exit(main())
