"""What every ring of tests has: a run leaves no process behind."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import uuid
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports it, so that its assertions tell what they saw, too.
pytest.register_assert_rewrite("support")

from support.device import compute_there  # noqa: E402
from support.examples import DRAWN, SAME  # noqa: E402
from support.kept_compiler import FOLDER_VARIABLE, keep_what_is_compiled  # noqa: E402
from support.processes import RUN_VARIABLE, leftovers  # noqa: E402
from support.waiting import eventually  # noqa: E402

# No example is wrong for being slow: a busy machine would be called a bug. Everybody sees the same
# examples, so that a change is not blamed for what was there before it; `make test-random` draws.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(SAME, _PATIENT, derandomize=True)
settings.register_profile(DRAWN, _PATIENT, derandomize=False, print_blob=True)
settings.load_profile(SAME)
os.environ[RUN_VARIABLE] = uuid.uuid4().hex
# Torch's threads wait for each other in busy loops: with several processes on few cores, a forward
# of a small model took five times as long on two threads as on one. Servers inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a test asks for two
compute_there()
# What a shell starts in the background ignores Ctrl-C, and so would all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    group = parser.getgroup("paceline")
    for role in ("target", "drafter"):
        group.addoption(
            f"--{role}",
            metavar="HOST:PORT",
            help=f"hold this {role} (in plaintext) to the contract of tests/contract/"
            "model_servers, instead of our own servers",
        )
    group.addoption("--chaos-seed", type=int, default=1, help="draws a run of chaos")
    group.addoption("--chaos-tokens", type=int, default=3_000, help="how long that run is")
    group.addoption(
        "--rewrite-traces",
        action="store_true",
        help="write down what decoding methods do now (tests/unit/protocol/traces); read the diff",
    )
    group.addoption(
        "--rewrite-manifests",
        action="store_true",
        help="write down what the chart renders now (tests/chart/golden); read the diff",
    )
    group.addoption(
        "--rewrite-pages",
        action="store_true",
        help="write down what benchmarks print, publish and draw now (tests/unit/bench/golden);"
        " read the diff",
    )
    group.addoption("--chaos-history", metavar="FILE", help="where its history is written (JSON)")


def pytest_configure(config):
    if FOLDER_VARIABLE not in os.environ:  # the first process of a run has it for all
        folder = tempfile.TemporaryDirectory(prefix="paceline-tests-")
        config.add_cleanup(folder.cleanup)
        keep_what_is_compiled(Path(folder.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from support.spreading import ScheduledByServers  # only where xdist is

    return ScheduledByServers(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no garbage while tests are loaded: there is none, and it takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items):
    """Refuse a long test in a file that `make test-long` does not find by these words."""
    for path in {it.path for it in items if it.get_closest_marker("long")}:
        if "mark.long" not in path.read_text():
            raise pytest.UsageError(f"{path} has long tests and does not say mark.long")


def pytest_collection_finish():
    """Leave what all tests have loaded to no collector, as servers do.

    A full collection of it takes a second of whichever thread it comes to. Once it came to one
    whose time is limited. So its garbage, of which there is little, is kept, too.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left():
    yield
    try:
        eventually(lambda: not leftovers(), what="every process is gone", within_seconds=60)
    except AssertionError:
        pytest.fail(f"still running: {leftovers()}")
