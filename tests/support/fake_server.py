"""A process that announces itself as the servers do, and serves nothing.

Told apart by further flags: --fails ends it before it is ready, --deaf ignores SIGTERM.
"""

import json
import os
import signal
import sys


def main() -> int:
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("loading", file=sys.stderr)
    if "--fails" in sys.argv:
        print("no such model", file=sys.stderr)
        return 3
    for event in ("listening", "ready"):
        listen = sys.argv[sys.argv.index("--listen") + 1].replace(":0", f":{os.getpid()}")
        print(json.dumps({"event": event, "pid": os.getpid(), "address": listen}), flush=True)
    while sys.stdin.read():
        pass
    return 1


if __name__ == "__main__":
    sys.exit(main())
