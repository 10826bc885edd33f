import json
import re
import subprocess
import sys

import openai
import psutil
import pytest

from support.certificates import Certificates

PACELINE = (sys.executable, "-m", "paceline_cli")
UP = (*PACELINE, "up", "--backend", "simulated", "--listen", "127.0.0.1:0")


@pytest.fixture
def up():
    """Run `paceline up` with stand-ins for models; yields the process and what it printed."""
    yield from running(*UP)


@pytest.fixture
def up_with_http():
    yield from running(*UP, "--http", "127.0.0.1:0")


def running(*command):
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    yield process, "".join(lines)
    process.kill()
    process.communicate()


def test_up_serves_generate_and_leaves_no_process_behind(up):
    process, printed = up
    servers = psutil.Process(process.pid).children(recursive=True)
    address = next(line.split()[1] for line in printed.splitlines() if "orchestrator" in line)
    assert f"paceline generate --address {address}" in printed

    command = (*PACELINE, "generate", "x", "--address", address, "--max-tokens", "20")
    ran = subprocess.run(command, capture_output=True, check=True, text=True, timeout=180)
    assert ran.stdout.strip()
    assert "20 tokens" in ran.stderr

    process.terminate()
    _, err = process.communicate(timeout=180)
    assert "stopping: running requests may end first; Ctrl-C again ends them at once" in err
    _, alive = psutil.wait_procs(servers, timeout=90)
    assert process.returncode == 0
    assert len(servers) == 4
    assert not alive


def test_up_with_http_serves_openais_interface(up_with_http):
    process, printed = up_with_http
    servers = psutil.Process(process.pid).children()
    their_own = psutil.Process(process.pid).children(recursive=True)
    (url,) = re.findall(r"curl (http\S+)/v1/models", printed)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt="x", max_tokens=8, temperature=0)
    assert whole.usage.completion_tokens == 8
    process.terminate()
    process.communicate(timeout=180)
    _, alive = psutil.wait_procs(their_own, timeout=90)
    assert len(servers) == 5
    assert not alive, "nor a process of a server, such as the one that renders templates"


def test_up_ends_with_the_last_words_of_a_server_that_died(up):
    process, _ = up
    servers = psutil.Process(process.pid).children(recursive=True)
    target = next(each for each in servers if "paceline_target" in each.cmdline())
    target.kill()
    _, err = process.communicate(timeout=180)
    _, alive = psutil.wait_procs(servers, timeout=90)
    assert process.returncode == 1
    assert "was killed by SIGKILL\nits last log lines:\n" in err
    assert not alive


def test_who_comes_without_tls_is_told_of_it_and_the_servers_log_has_json_alone(tmp_path):
    own = Certificates(tmp_path).issue("localhost")
    files = ("--tls-certificate", own.certificate, "--tls-key", own.key)
    places = ("--listen", "127.0.0.1:0", "--targets", "127.0.0.1:1")
    command = (*PACELINE, "serve", "orchestrator", *places, *files)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = json.loads(process.stdout.readline())["address"]
    ran = subprocess.run(
        (*PACELINE, "info", "--address", address), capture_output=True, text=True, timeout=180
    )
    process.terminate()
    _, log = process.communicate(timeout=180)
    assert ran.returncode == 1
    assert "--tls-authority" in ran.stderr
    assert {type(json.loads(line)) for line in log.splitlines()} == {dict}
