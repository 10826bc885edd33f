"""Which tests run in one process, and when, where several processes run tests."""

from __future__ import annotations

import re

from xdist.scheduler import LoadFileScheduling

# The fixtures of tests/e2e that start five servers, and keep what plain decoding said.
_SHARED = re.compile(r"[( ](bundled|proof)[,)]")
_TOGETHER = "tests/e2e"
# Where tests wait for nothing.
_COMPUTING = "tests/unit/"


class ScheduledByServers(LoadFileScheduling):
    """The tests of a file stay together, and so do all files that use the same five servers.

    Else each process would start five more, and decode anew what it compares with: for that tests
    took another 90 seconds of a core.

    These come first, since they take longest. Of the others, a third of the processes get tests
    that only compute, and two thirds get tests that wait for servers most of the time: they use a
    third of a core each. In the order of the files, all processes would wait at the same time at
    first, and leave cores idle; later all would compute at the same time, and share the cores.
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
        return _TOGETHER if path in self._sharing else path

    def _assign_work_unit(self, node):
        self.workqueue.move_to_end(self._next_scope(node), last=False)
        super()._assign_work_unit(node)

    def _next_scope(self, node):
        """Return what this process should do next; of each kind in the order of the files."""
        if _TOGETHER in self.workqueue:
            return _TOGETHER
        others = [[*work] for other, work in self.assigned_work.items() if other is not node]
        computing = sum(scopes[-1].startswith(_COMPUTING) for scopes in others if scopes)
        wanted = computing < len(self.assigned_work) // 3
        of_the_kind = (it for it in self.workqueue if it.startswith(_COMPUTING) == wanted)
        return next(of_the_kind, next(iter(self.workqueue)))
