"""`paceline top`: reading pages, rates between two looks, and how a view looks."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from rich.console import Console

from paceline.errors import ConnectionLostError, InvalidFieldError
from paceline_cli.__main__ import main
from paceline_cli.top_view import draw, view
from paceline_cli.top_watch import Scrape, Snapshot, Watch
from paceline_local.metrics_pages import Page, Source, parse_sources
from paceline_local.metrics_samples import Readings, Samples, parse_page
from paceline_local.up_record import metrics_addresses, record_metrics_addresses
from paceline_serving.metrics_endpoint import MetricsEndpoint
from unit.cli.told_systems import a_server, a_system

PAGE = """\
# HELP paceline_queue_seconds x
# TYPE paceline_queue_seconds histogram
paceline_queue_seconds_bucket{le="0.5",role="target"} 4.0
paceline_queue_seconds_count{role="target"} 4.0
paceline_queue_seconds_sum{role="target"} 2.0
# HELP paceline_wasted_tokens_total x
# TYPE paceline_wasted_tokens_total counter
paceline_wasted_tokens_total{reason="rejected",role="target"} 3.0
paceline_wasted_tokens_total{reason="cancelled",role="target"} 4.0
"""


def samples(**values):
    """Values without labels."""
    return Samples({name: {frozenset(): float(value)} for name, value in values.items()})


# --- pages and rates ------------------------------------------------------------------------------


def test_a_page_is_read_without_the_buckets_of_its_histograms():
    page = parse_page(PAGE)
    assert "paceline_queue_seconds_bucket" not in page
    assert page.total("paceline_queue_seconds_count") == 4
    assert page.total("paceline_wasted_tokens_total") == 7
    assert page.total("paceline_wasted_tokens_total", reason="rejected") == 3
    assert page.total("paceline_wasted_tokens_total", reason="other") == 0
    assert page.total("other") == 0


def test_what_is_no_page_of_metrics_is_refused():
    with pytest.raises(ValueError, match=r".*"):
        parse_page("<html>it works</html>")


def test_a_rate_is_what_was_gained_over_the_time_between_two_looks():
    first, second = samples(x=10, y=1), samples(x=16, y=2)
    readings = Readings(second, second.since(first), 2.0)
    assert readings.rate("x") == 3
    assert readings.rate("x", "y") == 3.5
    assert Readings(first).rate("x") is None


def test_a_counter_that_went_back_began_anew():
    assert samples(x=4).since(samples(x=10)).total("x") == 4
    assert samples(x=4).since(samples()).total("x") == 4


def test_a_share_is_of_what_happened_lately_and_else_of_all():
    before, now = samples(a_sum=30, a_count=3), samples(a_sum=32, a_count=4)
    assert Readings(now, now.since(before), 1).mean("a") == 2
    assert Readings(now, now.since(now), 1).mean("a") == 8
    assert Readings(samples(a_sum=0, a_count=0)).mean("a") is None


def test_servers_are_added_up_and_a_new_one_counts_from_its_second_look():
    now = samples(x=5)
    together = Readings.sum([Readings(now, samples(x=2), 1.0), Readings(now)])
    assert together.now.total("x") == 10
    assert together.rate("x") == 2
    assert Readings.sum([]).rate("x") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu-1:9090", Source("", "gpu-1", 9090)),
        ("a=gpu-1:9090", Source("a", "gpu-1", 9090)),
        ("[::1]:9090", Source("", "::1", 9090)),
        ("https://gpu-1/m?a=b", Source("", "gpu-1", None, "https", "/m?a=b")),
        ("a=http://gpu-1:1/", Source("a", "gpu-1", 1)),
    ],
)
def test_a_place_of_metrics_is_an_address_or_a_url_with_or_without_a_name(text, expected):
    assert parse_sources([text]) == (expected,)


@pytest.mark.parametrize("text", ["gpu-1", "a=gpu-1", ":9090", "gpu-1:x", "ftp://gpu-1", "[::1:1"])
def test_a_place_that_is_neither_is_refused(text):
    with pytest.raises(InvalidFieldError, match="HOST:PORT, NAME=HOST:PORT or a URL"):
        parse_sources([text])


def test_the_address_of_a_page_is_one_that_can_be_asked():
    assert Page(Source("", "localhost", 9090), "::1").url == "http://[::1]:9090/metrics"
    assert Page(Source("", "h", None, "https", "/m"), "h").url == "https://h/m"


# --- looking --------------------------------------------------------------------------------------


class Server:
    """A target's page, on loopback."""

    def __init__(self, host="127.0.0.1", port=0, forwards=0, sessions=1):
        registry = CollectorRegistry()
        Gauge("paceline_sessions_active", "x", ["role"], registry=registry).labels("target").set(
            sessions
        )
        self.forwards = Counter("paceline_forwards", "x", registry=registry)
        self.forwards.inc(forwards)
        self.endpoint = MetricsEndpoint(f"{host}:{port}", registry=registry, pages={})
        self.address = self.endpoint.address
        self.port = int(self.address.rpartition(":")[2])


class Orchestrator:
    """Answers as it is told."""

    def __init__(self, *servers, running=0):
        self.answer = a_system(*servers, running_request_count=running)

    async def info(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@asynccontextmanager
async def watching(orchestrator, *texts):
    now = [0.0]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        watch = Watch(orchestrator, session, parse_sources(texts), clock=lambda: now[0])

        async def look_after(seconds):
            now[0] += seconds
            return view(await watch.snapshot())

        yield look_after


async def test_a_server_is_known_by_its_name_and_its_rates_come_with_the_second_look():
    server = Server(forwards=100)
    async with watching(Orchestrator(a_server("t")), f"t={server.address}") as look_after:
        (pool,) = (await look_after(0)).pools
        assert pool.figures["forwards_per_second"] is None
        server.forwards.inc(5)
        (pool,) = (await look_after(2)).pools
        (it,) = pool.servers
        assert (pool.role, pool.ready_count, it.name, it.state) == ("target", 1, "t", "ready")
        assert (it.figures["forwards_per_second"], it.figures["sessions"]) == (2.5, 1)
    server.endpoint.close()


async def test_a_server_that_vanishes_is_shown_as_gone_and_may_come_back():
    server = Server(forwards=100)
    async with watching(Orchestrator(), server.address) as look_after:
        await look_after(0)
        server.endpoint.close()
        ((gone,),) = [pool.servers for pool in (await look_after(3)).pools]
        assert (gone.role, gone.state, gone.gone_seconds) == ("target", "gone", 3)
        assert gone.note == "connection refused"
        assert gone.figures["sessions"] is None
        again = Server(port=server.port, forwards=8)
        ((back,),) = [pool.servers for pool in (await look_after(1)).pools]
        assert (back.state, back.figures["forwards_per_second"]) == ("up", 2)
        again.endpoint.close()


async def test_a_server_that_the_orchestrator_does_not_use_says_why():
    server = Server()
    told = a_server("t", ready=False, status="NOT_SERVING")
    async with watching(Orchestrator(told), server.address) as look_after:
        (pool,) = (await look_after(0)).pools
        assert (pool.ready_count, pool.servers[0].state) == (0, "not serving")
    server.endpoint.close()


async def test_the_word_on_each_server_is_shown_and_below_all_why_some_are_not_used():
    orchestrator = Orchestrator(
        a_server("t", standing="used", standing_detail="it takes chains alone"),
        a_server("s", standing="resting", standing_detail="it is a spare"),
        *(
            a_server(
                name,
                ready=False,
                standing="other_dtype",
                standing_detail="it computes in float16",
            )
            for name in ("odd-1", "odd-2")
        ),
    )
    async with watching(orchestrator) as look_after:
        seen = await look_after(0)
    (pool,) = seen.pools
    assert pool.ready_count == 2
    assert {it.name: it.state for it in pool.servers} == {
        "t": "used",
        "s": "resting",
        "odd-1": "other dtype",
        "odd-2": "other dtype",
    }
    shown = drawn(seen)
    whys = [f"{name} is not used: it computes in float16" for name in ("odd-1", "odd-2")]
    assert shown[-2:] == whys
    # What is not well comes first: a short terminal cuts off the end.
    names = [line.split()[0] for line in shown[-7:-2]]
    assert names == ["targets", "odd-1", "odd-2", "s", "t"]


def drawn(seen, *, width=120):
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(seen, title="x", console=console))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


async def test_a_server_that_the_orchestrator_works_with_is_there_without_metrics_too():
    server = Server()
    orchestrator = Orchestrator(a_server("t"))
    async with watching(orchestrator, f"t={server.address}") as look_after:
        await look_after(0)
        server.endpoint.close()
        (pool,) = (await look_after(2)).pools
        (it,) = pool.servers
        assert (it.state, it.note) == ("ready", "no metrics, connection refused")
        orchestrator.answer = Orchestrator(a_server("t", ready=False, status="NOT_REACHED")).answer
        (pool,) = (await look_after(2)).pools
        assert (pool.servers[0].state, pool.servers[0].gone_seconds) == ("gone", 4)


async def test_without_metrics_there_is_what_the_orchestrator_knows():
    orchestrator = Orchestrator(a_server("t"), a_server("d", role="drafter"), running=3)
    async with watching(orchestrator) as look_after:
        seen = await look_after(0)
    assert [pool.role for pool in seen.pools] == ["target", "drafter"]
    assert {it.note for pool in seen.pools for it in pool.servers} == {"no metrics"}
    assert seen.totals["running"] == 3


async def test_without_the_orchestrator_there_is_what_the_metrics_say():
    orchestrator, server = Orchestrator(), Server()
    orchestrator.answer = ConnectionLostError("it is away")
    async with watching(orchestrator, server.address) as look_after:
        seen = await look_after(0)
    assert seen.problem == "it is away"
    assert seen.pools[0].servers[0].state == "up"
    server.endpoint.close()


TARGETS_PAGE = Samples({"paceline_sessions_active": {frozenset({("role", "target")}): 1.0}})
ORCHESTRATORS_PAGE = samples(paceline_incoming_requests_total=1)
GATEWAYS_PAGE = samples(paceline_http_in_flight=3)


@pytest.mark.parametrize(
    ("page", "name", "addresses", "owner"),
    [
        (TARGETS_PAGE, "", ["h:1"], "server 1"),
        (TARGETS_PAGE, "", ["[h]:1", "i:1"], "server 1"),
        (TARGETS_PAGE, "", ["h:1", "h:2"], "h:9090"),
        (TARGETS_PAGE, "", ["i:1"], "h:9090"),
        (TARGETS_PAGE, "server 2", ["h:1", "i:1"], "server 2"),
        (TARGETS_PAGE, "other", ["h:1"], "other"),
        (ORCHESTRATORS_PAGE, "", ["h:1"], "h:9090"),
        (GATEWAYS_PAGE, "", ["h:1"], "h:9090"),
    ],
    ids=[
        *("the one server there", "the one there, as IPv6", "one of two there", "one elsewhere"),
        *("a name that is known", "a name that is not", "an orchestrator's", "a gateway's"),
    ],
)
def test_a_page_is_that_of_the_server_with_its_name_or_of_the_only_one_there(
    page, name, addresses, owner
):
    servers = [a_server(f"server {at}", address=each) for at, each in enumerate(addresses, 1)]
    scrape = Scrape(Page(Source(name, "h", 9090), "h"), Readings(page))
    seen = view(Snapshot((scrape,), Orchestrator(*servers).answer))
    names = {it.name: it.note for pool in seen.pools for it in pool.servers}
    assert names == {**{it.name: "no metrics" for it in servers}, owner: ""}


@pytest.mark.skipif(sys.platform != "linux", reason="needs the whole of 127.0.0.0/8")
async def test_a_name_stands_for_all_its_addresses_and_loses_them_one_by_one(monkeypatch):
    one = Server("127.0.0.1")
    two = Server("127.0.0.2", one.port)
    hosts = ["127.0.0.1", "127.0.0.2"]

    def lookup(host, port, *_args, **_named):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (it, port)) for it in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    async with watching(Orchestrator(), f"pods.test:{one.port}") as look_after:
        (pool,) = (await look_after(0)).pools
        assert [it.name for it in pool.servers] == [one.address, two.address]
        hosts[:] = ["127.0.0.1"]
        (pool,) = (await look_after(5)).pools
        assert [it.state for it in pool.servers] == ["up", "gone"]
        (pool,) = (await look_after(60)).pools
        assert [it.state for it in pool.servers] == ["up"]
    one.endpoint.close()
    two.endpoint.close()


async def test_while_a_name_cannot_be_looked_up_its_servers_are_where_they_were(monkeypatch):
    server = Server()
    answers = [[(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]]

    def lookup(*_args, **_named):
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure")
        return answers.pop()

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    async with watching(Orchestrator(), f"pods.test:{server.port}") as look_after:
        await look_after(0)
        server.forwards.inc(4)
        (pool,) = (await look_after(2)).pools
        assert (pool.servers[0].state, pool.figures["forwards_per_second"]) == ("up", 2)
    async with watching(Orchestrator(), f"pods.test:{server.port}") as look_after:
        (pool,) = (await look_after(0)).pools
        assert pool.servers[0].note == "temporary failure"
    server.endpoint.close()


async def test_an_address_that_never_answered_is_shown_too():
    async with watching(Orchestrator(), "x=127.0.0.1:1") as look_after:
        (pool,) = (await look_after(0)).pools
    assert (pool.role, pool.servers[0].state) == ("unknown", "no answer")


def test_a_gateway_is_shown_with_the_requests_that_it_works_on_and_nothing_that_it_has_not():
    pages = (Page(Source("", host, 9090), host) for host in ("h", "i"))
    scrapes = tuple(Scrape(page, Readings(GATEWAYS_PAGE)) for page in pages)
    (pool,) = view(Snapshot(scrapes, Orchestrator().answer)).pools
    assert (pool.role, pool.ready_count) == ("gateway", 2)
    told = {name: number for name, number in pool.figures.items() if number is not None}
    assert told == {"running": 6}


async def test_a_server_of_a_role_that_is_new_is_shown_as_unknown():
    async with watching(Orchestrator(a_server("new", role="role 12"))) as look_after:
        (pool,) = (await look_after(0)).pools
    assert (pool.role, pool.servers[0].name) == ("unknown", "new")


# --- drawing --------------------------------------------------------------------------------------


def test_a_narrow_terminal_cuts_off_the_last_columns():
    page = parse_page('paceline_sessions_active{role="target"} 4\n')
    scrapes = [
        Scrape(Page(Source(name, "127.0.0.1", 1), "127.0.0.1"), Readings(page), problem, 7.0)
        for name, problem in (("target-0", ""), ("target-1", "connection refused"))
    ]
    seen = view(Snapshot(tuple(scrapes), Orchestrator().answer))
    wide, narrow = drawn(seen), drawn(seen, width=60)
    assert [line.split() for line in wide[-3:]] == [
        ["targets", "1", "of", "2", "0", "0", "4", "0%"],
        ["target-1", "gone", "7", "s:", "connection", "refused", "-", "-", "-", "-"],
        ["target-0", "up", "0", "0", "4", "0%"],
    ]
    assert "waiting" in narrow[-4]
    assert "memory" not in narrow[-4]
    assert max(map(len, narrow)) <= 60
    assert "this terminal 60: columns on the right are cut off" in " ".join(narrow)
    assert "cut off" not in " ".join(wide)


def test_what_servers_say_cannot_move_the_cursor():
    orchestrator = Orchestrator(a_server("a\x1b[2Jb", ready=False, status="X\x07Y"))
    shown = drawn(view(Snapshot((), orchestrator.answer)))
    assert all(it.isprintable() for it in shown)
    assert any(r"a\x1b[2Jb" in it and r"x\x07y" in it for it in shown)
    lines = "a\n  forged  up"
    shown = drawn(view(Snapshot((), a_system(a_server(lines)))))
    (server,) = (it for it in shown if "forged" in it)
    assert r"a\n  forged  up" in server


# --- the command ----------------------------------------------------------------------------------


def test_a_look_without_a_terminal_is_plain_text_and_the_end(capsys, fake):
    assert main(["top", "--address", fake.address, "--interval", "0.1"]) == 0
    out = capsys.readouterr().out
    assert "no metrics: --metrics says where" in out
    assert "  target-0" in out
    assert "\x1b" not in out


def test_json_has_what_the_view_has(capsys, fake):
    server = Server(sessions=5)
    place = f"target-0={server.address}"
    arguments = ["--metrics", place, "--interval", "0.1", "--once", "--json"]
    assert main(["top", "--address", fake.address, *arguments]) == 0
    seen = json.loads(capsys.readouterr().out)
    (pool,) = seen["pools"]
    assert pool["servers"][0]["figures"]["sessions"] == 5
    assert seen["model_name"] == "fake"
    server.endpoint.close()


def test_where_nobody_answers_it_says_so_and_fails(capsys):
    assert main(["top", "--address", "127.0.0.1:1", "--once"]) == 1
    assert "`paceline up` starts a system" in capsys.readouterr().err


def test_a_place_that_makes_no_sense_fails_at_once(capsys):
    assert main(["top", "--metrics", "nowhere"]) == 1
    assert "'nowhere' must be HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_live_view_and_leaves_the_terminal_as_it_was(number, code, fake):
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = (sys.executable, "-m", "paceline_cli", "top", "--address", fake.address)
    process = subprocess.Popen(
        (*command, "--timeout-seconds", "60"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    os.close(theirs)
    shown = b""
    while b"target-0" not in shown:
        shown += os.read(ours, 4096)
    process.send_signal(number)
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # the terminal's other end is closed
    os.close(ours)
    assert process.wait(60) == code
    assert shown.index(b"\x1b[?1049h") < shown.index(b"\x1b[?1049l")  # the alternate screen
    assert b"Traceback" not in shown


# --- beside `paceline up` -------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["XDG_RUNTIME_DIR", "TMPDIR"])
def test_a_system_leaves_word_of_its_metrics_while_it_runs(variable, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    here = "127.0.0.1:50050"
    with record_metrics_addresses(here, {"target-0": "127.0.0.1:1"}):
        assert metrics_addresses(here) == {"target-0": "127.0.0.1:1"}
        assert metrics_addresses("127.0.0.1:50051") == {}
        (directory,) = tmp_path.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
    assert metrics_addresses(here) == {}


def test_nobody_elses_word_is_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    uid = os.getuid()
    with record_metrics_addresses("h:1", {"target-0": "127.0.0.1:1"}):
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        assert metrics_addresses("h:1") == {}


def test_the_word_of_a_system_that_was_killed_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with record_metrics_addresses("h:1", {"target-0": "127.0.0.1:1"}):
        (file,) = (tmp_path / "paceline").iterdir()
        file.write_text(json.dumps({**json.loads(file.read_text()), "pid": ended.pid}))
        assert metrics_addresses("h:1") == {}


def test_nothing_is_written_into_a_directory_of_someone_else(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "paceline").mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with record_metrics_addresses("h:1", {"target-0": "127.0.0.1:1"}):
        assert list((tmp_path / "paceline").iterdir()) == []


def test_a_system_runs_also_where_no_word_can_be_left(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with record_metrics_addresses("h:1", {}):
        assert metrics_addresses("h:1") == {}
