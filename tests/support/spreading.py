"""Which tests run in one process, where several processes run tests."""

from __future__ import annotations

import re

from xdist.scheduler import LoadFileScheduling

# The fixtures of tests/e2e that start five servers, and keep what plain decoding said.
_SHARED = re.compile(r"[( ](bundled|proof)[,)]")


class ScheduledByServers(LoadFileScheduling):
    """The tests of a file stay together, and so do all files that use the same five servers.

    Else each process would start five more, and decode anew what it compares with: for that tests
    took another 90 seconds of a core.
    """

    def __init__(self, config, log):
        super().__init__(config, log)
        self._sharing = {
            path.relative_to(config.rootpath).as_posix()
            for path in (config.rootpath / "tests" / "e2e").glob("test_*.py")
            if _SHARED.search(path.read_text())
        }

    def _split_scope(self, nodeid):
        path = super()._split_scope(nodeid)
        return "tests/e2e" if path in self._sharing else path
