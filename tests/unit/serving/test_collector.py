"""What a server has loaded costs no collection, and keeps none from coming."""

from __future__ import annotations

import subprocess
import sys

SERVER = """
import gc, weakref
from paceline_serving.process import leave_to_no_collector

class Request:
    pass

loaded = [[] for _ in range(1_000_000)]
leave_to_no_collector()
assert gc.get_freeze_count() > 1_000_000
request = Request()
request.own = request
gc.collect(1)  # it has survived the collections of what is young, as long requests do
gone = weakref.ref(request)
del request
later = [[] for _ in range(150_000)]
assert gone() is None, "no full collection came"
"""


def test_what_requests_leave_is_collected_however_much_is_loaded():
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
