import asyncio
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import psutil
import pytest

from paceline_cli import health
from paceline_local import server as local_server
from paceline_local import system as local_system
from paceline_local.running import running_system
from paceline_local.system import (
    LocalSystem,
    LocalSystemConfig,
    ServerExitedError,
    reachable,
)
from unit.cli.conftest import run

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fake_servers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    for role in ("DRAFTER", "TARGET", "ORCHESTRATOR"):
        monkeypatch.setattr(local_system, f"_{role}", "support.fake_server")


async def test_all_servers_run_inside_the_block_and_none_after_it():
    ready = []
    config = LocalSystemConfig(targets=2, drafters=1)
    async with LocalSystem(config, on_ready=lambda server: ready.append(server.name)) as system:
        names = ["drafter-0", "target-0", "target-1", "orchestrator"]
        assert [server.name for server in system.servers] == names
        assert sorted(ready) == sorted(names)
        pids = [server.pid for server in system.servers]
        assert all(map(psutil.pid_exists, pids))
        assert system.orchestrator_address == f"127.0.0.1:{system.orchestrator.pid}"
        logs = system.orchestrator.log_file.parent
    assert not any(map(psutil.pid_exists, pids))
    assert not logs.exists()


async def test_the_orchestrator_is_told_of_all_model_servers():
    config = LocalSystemConfig(targets=1, more_targets=("far:1",), more_drafters=("near:2",))
    async with LocalSystem(config) as system:
        command = psutil.Process(system.orchestrator.pid).cmdline()
        assert f"--targets=target-0={system.targets[0].address},far:1" in command
        assert f"--drafters=drafter-0={system.drafters[0].address},near:2" in command


async def test_it_is_up_only_when_the_orchestrator_has_a_word_on_all(monkeypatch):
    config = LocalSystemConfig(targets=1, orchestrator_arguments=("--learns",))
    async with LocalSystem(config) as system:
        assert "look 3" in system.orchestrator.last_log_lines()
        assert system.not_used == {("drafter", "other_dtype"): 1, ("target", "other_dtype"): 1}
    monkeypatch.setattr(local_system, "_KNOWN_SECONDS", 0.2)
    one_is_not_well = LocalSystemConfig(
        targets=1, more_targets=("far:1",), orchestrator_arguments=("--learns",)
    )
    async with LocalSystem(one_is_not_well) as system:
        assert system.orchestrator.exit_code is None


async def test_a_server_that_cannot_start_is_named_with_its_last_words():
    config = LocalSystemConfig(targets=2, target_arguments=("--fails",))
    before = psutil.Process().children()
    with pytest.raises(ServerExitedError) as caught:
        await LocalSystem(config).__aenter__()
    assert str(caught.value) == (
        "target-0 exited with 3\nits last log lines:\n    loading\n    no such model"
    )
    assert not set(psutil.Process().children()) - set(before)


def test_why_a_server_did_not_start_is_the_first_line_of_what_a_command_prints(capsys, monkeypatch):
    log = "INFO listening\nfailed to start: the model \x1b[2Jis broken\nold\x9bwords\n"

    def fails(_arguments):
        raise ServerExitedError("target-0", code=1, log=log)

    monkeypatch.setattr(health, "main", fails)
    code, _, err = run(capsys, "health")
    assert code == 1
    assert err == (
        "paceline: target-0 failed to start: the model \\x1b[2Jis broken\n"
        "its last log lines:\n    INFO listening\n    old\\x9bwords\n"
    )


class Looks:
    """A clock that goes on by half a minute with each look after the target, once all listen."""

    def __init__(self, config, loaded=None):
        self.loaded = loaded
        self.now = 0.0
        self.system = LocalSystem(config, on_wait=self)

    def monotonic(self):
        return self.now

    def __call__(self, server, seconds):
        assert seconds <= self.now
        orchestrator = getattr(self.system, "orchestrator", None)
        if server.name == "target-0" and orchestrator is not None and orchestrator.addresses:
            self.now += 30
        if self.loaded is not None and self.now > 600:
            self.loaded.touch()


@pytest.mark.parametrize("way", ["--talks", "--healthy"])
async def test_a_server_that_loads_for_long_is_waited_for_while_it_says_that_it_is_alive(
    monkeypatch, tmp_path, way
):
    loaded = tmp_path / "loaded"
    flags = (f"--waits-for={loaded}", way)
    looks = Looks(LocalSystemConfig(targets=1, drafters=0, target_arguments=flags), loaded)
    monkeypatch.setattr(local_system, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(local_system, "time", looks)
    async with looks.system as system:
        assert system.targets[0].exit_code is None
    assert looks.now > 600


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("--logs", "is still loading its model"),
        ("--talks", "is still loading its model: downloading"),
    ],
)
async def test_a_start_that_takes_long_is_told_of_the_model_and_not_of_who_waits_for_it(
    capsys, monkeypatch, tmp_path, way, words
):
    loaded = tmp_path / "loaded"
    looks = Counter()

    async def is_heard(server):
        looks[server.name] += 1
        if looks["target-0"] > 1 and looks["orchestrator"] > 1:
            loaded.touch()
            monkeypatch.setattr(local_system, "_LOOK_SECONDS", 90)
        return True

    monkeypatch.setattr(local_server.LocalServer, "is_heard", is_heard)
    monkeypatch.setattr(local_system, "_LOOK_SECONDS", 0.1)
    waits = f"--waits-for={loaded}"
    config = LocalSystemConfig(
        targets=1, drafters=0, target_arguments=(waits, way), orchestrator_arguments=(waits,)
    )
    async with running_system(config):
        pass
    told = [line.strip() for line in capsys.readouterr().err.splitlines() if "still" in line]
    loading = [line for line in told if "loading" in line]
    assert all(re.fullmatch(rf"target-0 {words} \(\d+ s\)", line) for line in loading)
    assert loading
    assert all(line.startswith("target-0 is still starting") for line in {*told} - {*loading})


async def test_a_server_that_says_nothing_is_not_waited_for_for_ever(monkeypatch, tmp_path):
    flags = (f"--waits-for={tmp_path / 'never'}",)
    looks = Looks(LocalSystemConfig(targets=1, drafters=0, target_arguments=flags))
    monkeypatch.setattr(local_system, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(local_system, "time", looks)
    with pytest.raises(TimeoutError, match=r"target-0 is not ready.* nothing for 180 s") as caught:
        await looks.system.__aenter__()
    assert "loading" in str(caught.value)
    assert 180 <= looks.now <= 300


async def test_an_orchestrator_that_cannot_start_is_no_exception_group():
    config = LocalSystemConfig(orchestrator_arguments=("--fails",))
    with pytest.raises(ServerExitedError, match="orchestrator exited"):
        await LocalSystem(config).__aenter__()


async def test_a_killed_server_can_be_started_again_at_its_address():
    async with LocalSystem(LocalSystemConfig(targets=1)) as system:
        target = system.targets[0]
        address, pid = target.address, target.pid
        await target.kill()
        ended = await system.wait_for_exit()
        assert ended is target
        assert target.exit_code == -signal.SIGKILL
        await target.restart()
        assert target.exit_code is None
        assert target.address == address
        assert target.pid != pid


async def test_a_server_that_does_not_stop_is_killed(monkeypatch):
    monkeypatch.setattr(local_server, "_STOP_SECONDS", 0.1)
    arguments = ("--deaf", "--drain-seconds=0")
    async with LocalSystem(LocalSystemConfig(targets=1, target_arguments=arguments)) as system:
        target = system.targets[0]
    assert target.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ((), 25),
        (("--drain-seconds=60", "--model", "x"), 60),
        (("--drain-seconds", "0", "--drain-delay-seconds=2"), 2),
    ],
)
def test_a_server_may_take_as_long_to_stop_as_it_was_told_to_drain(arguments, seconds):
    assert local_server._drain_seconds(arguments) == seconds


async def test_impatience_ends_it_at_once_and_leaves_no_process(monkeypatch):
    stopping = asyncio.Event()
    stop = local_server.LocalServer.stop

    async def told(server):
        stopping.set()
        await stop(server)

    monkeypatch.setattr(local_server.LocalServer, "stop", told)
    running: asyncio.Queue[LocalSystem] = asyncio.Queue()

    async def use():
        config = LocalSystemConfig(targets=1, orchestrator_arguments=("--deaf",))
        async with AsyncExitStack() as stack:
            running.put_nowait(await stack.enter_async_context(LocalSystem(config)))
            await asyncio.Event().wait()

    user = asyncio.create_task(use())
    system = await running.get()
    user.cancel()
    await stopping.wait()
    user.cancel()
    with pytest.raises(asyncio.CancelledError):
        await user
    servers = []
    for server in system.servers:
        with suppress(psutil.NoSuchProcess):
            servers.append(psutil.Process(server.pid))
    _, alive = psutil.wait_procs(servers, timeout=90)
    assert not alive


async def test_servers_do_not_inherit_settings(monkeypatch):
    monkeypatch.setenv("PACELINE_LISTEN", "127.0.0.1:1")
    async with LocalSystem(LocalSystemConfig()) as system:
        assert "PACELINE_LISTEN" not in psutil.Process(system.orchestrator.pid).environ()


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "[::1]:1"),
        ("10.0.0.0:1", "10.0.0.0:1"),
        ("[fd00::]:1", "[fd00::]:1"),
        ("unix:/run/a", "unix:/run/a"),
    ],
)
def test_who_listens_everywhere_is_reached_here_and_others_where_they_are(listen, address):
    assert reachable(listen) == address


def test_no_server_outlives_a_killed_parent():
    program = textwrap.dedent("""
        import asyncio, sys
        from paceline_local import system as local_system
        local_system._DRAFTER = local_system._TARGET = "support.fake_server"
        local_system._ORCHESTRATOR = "support.fake_server"

        async def main():
            async with local_system.LocalSystem(local_system.LocalSystemConfig()) as system:
                print(*(server.pid for server in system.servers), flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs(children, timeout=90)
    assert len(children) == 4
    assert not alive
