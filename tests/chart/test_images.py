"""The images: linted, and installed and started as the Dockerfile says, without an engine."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from support.helm import CHART
from support.manifests import install

ROOT = CHART.parents[1]
DOCKERFILE = ROOT / "k8s" / "images" / "Dockerfile"
TOOLS = Path(sys.executable).parent
MODEL, ADAPTER = "model.safetensors", "adapter.safetensors"


def stages():
    """Return stage name to its instructions, each a pair of keyword and the rest."""
    found, name = {}, ""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            name = rest.split()[-1]
            found[name] = [("FROM", rest.split()[0])]
        elif name:
            found[name].append((keyword, rest))
    return found


def instructions(stage, keyword):
    return [rest for each, rest in stages()[stage] if each == keyword]


def weights(folder):
    """Return the name of the one file of weights in a folder of the bundle."""
    (file,) = (ROOT / folder).glob("*.safetensors")
    return file.name


def install_image(name, folder, *, requirements=None):
    """Do what the stages of an image do, in a folder: copy the sources, install; return it."""
    source, opt = folder / "src", folder / "opt"
    for copied in instructions("source", "COPY"):
        *files, target = copied.split()
        for file in files:
            to = source / target / Path(file).name if target.endswith("/") else source / target
            to.parent.mkdir(parents=True, exist_ok=True)
            copy_tree(ROOT / file, to)
    if requirements is not None:
        shutil.rmtree(source / "k8s" / "images" / "requirements")
        shutil.copytree(requirements, source / "k8s" / "images" / "requirements")
    (command,) = instructions(f"install-{name}", "RUN")
    words = command.replace("/opt/paceline", str(opt)).split()
    torch = "cpu" if "+cpu" in version("torch") else "cuda"  # as this machine can have it
    environment = {**os.environ, "TORCH": torch, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(words, cwd=source, env=environment, check=True)
    shutil.rmtree(source)
    return opt


def copy_tree(source, target):
    if source.is_file():
        shutil.copy2(source, target)
    else:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


def entry_point():
    (entry,) = instructions("runtime", "ENTRYPOINT")
    return json.loads(entry)


def environment_in(opt):
    """Return what the image's PATH is, and nothing else of this machine."""
    return {"PATH": f"{opt}/venv/bin:/usr/bin:/bin", "HOME": "/tmp"}


def run_image(opt, *arguments):
    """Start an image's entry point, and wait for its end."""
    return subprocess.run(
        [*entry_point(), *arguments],
        cwd=opt,
        env=environment_in(opt),
        capture_output=True,
        text=True,
        timeout=240,
    )


def python_in(opt, program):
    command = [f"{opt}/venv/bin/python", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=opt)


# --- what the Dockerfile says ---------------------------------------------------------------------


def test_the_dockerfile_and_the_scripts_lint():
    subprocess.run([TOOLS / "hadolint", DOCKERFILE], check=True)
    scripts = [ROOT / "k8s" / "images" / "install.sh", CHART / "files" / "test.sh"]
    subprocess.run([TOOLS / "shellcheck", "--shell=sh", *scripts], check=True)


@pytest.mark.parametrize("torch", ["cpu", "cuda"])
def test_a_model_server_has_the_compiler_that_it_starts_at_its_start(torch, tmp_path):
    """With the headers of the C library; what installs it runs here with programs that only say."""
    for program in ("apt-get", "rm"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (tmp_path / program).chmod(0o755)
    (command,) = instructions("model-server", "RUN")
    environment = {"PATH": str(tmp_path), "TORCH": torch}
    said = subprocess.run(
        ["/bin/sh", "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    (installed,) = [line for line in said.stdout.splitlines() if "apt-get install" in line]
    assert {"gcc", "libc6-dev"} <= {*installed.split()}


@pytest.mark.parametrize("image", ["orchestrator", "model-server"])
def test_an_image_runs_as_a_number_that_is_not_root(image):
    assert instructions(image, "FROM") == ["runtime"]
    assert instructions("runtime", "USER") == ["10001:10001"]


def test_pods_start_what_the_images_would_start_by_themselves():
    for pod in install().pods:
        if pod.role != "test":
            assert pod.server["command"] == [*entry_point(), pod.role]


def test_the_bundled_models_are_where_the_chart_looks_for_them():
    (folder,) = instructions("runtime", "WORKDIR")
    copied = [rest.split() for rest in instructions("model-server", "COPY") if "--from" not in rest]
    models = {f"{folder}/{target}" for source, target in copied if weights(source) == MODEL}
    adapters = [source for source, _ in copied if weights(source) == ADAPTER]
    assert len(models) + len(adapters) == len(copied)
    served = {pod.flag("model") for pod in install().pods if "default" in pod.name}
    assert models - served == {f"{folder}/models/python-tiny"}, "it only drafts for a drafter"


def test_what_is_copied_is_all_that_the_build_context_has():
    ignored = (ROOT / ".dockerignore").read_text().split()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        word.rstrip("/")
        for stage in stages()
        for rest in instructions(stage, "COPY")
        if "--from" not in rest
        for word in rest.split()[:-1]
    }
    assert copied == allowed


def test_the_chart_and_the_package_have_one_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


# --- what it makes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orchestrator(tmp_path_factory):
    return install_image("orchestrator", tmp_path_factory.mktemp("orchestrator"))


def test_the_orchestrators_image_has_neither_torch_nor_pip(orchestrator):
    program = "import importlib.util as u; print([u.find_spec(n) for n in ('torch', 'pip')])"
    assert python_in(orchestrator, program).stdout == "[None, None]\n"


def test_the_orchestrators_image_has_the_pinned_versions_and_nothing_beside(orchestrator):
    program = "from importlib.metadata import distributions as d; [print(i.name, i.version) for i in d()]"  # fmt: skip  # noqa: E501
    installed = dict(line.split() for line in python_in(orchestrator, program).stdout.splitlines())
    ours = installed.pop("paceline"), installed.pop("paceline-client")
    assert len(set(ours)) == 1
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert installed.items() <= pins.items()


def test_a_package_with_another_hash_is_not_installed(tmp_path):
    requirements = tmp_path / "requirements"
    shutil.copytree(ROOT / "k8s" / "images" / "requirements", requirements)
    listed = requirements / "orchestrator.txt"
    listed.write_text(re.sub("sha256:[0-9a-f]{8}", "sha256:00000000", listed.read_text()))
    with pytest.raises(subprocess.CalledProcessError):
        install_image("orchestrator", tmp_path / "image", requirements=requirements)


def test_the_orchestrators_image_starts_and_names_what_is_wrong(orchestrator):
    assert "Decode for clients" in run_image(orchestrator, "orchestrator", "--help").stdout
    wrong = run_image(orchestrator, "orchestrator", "--insecure", "--listen=0.0.0.0:0")
    assert wrong.returncode == 2
    assert "--targets is needed" in wrong.stderr


def test_the_orchestrators_image_serves_gateways_too(orchestrator):
    assert "OpenAI's HTTP interface" in run_image(orchestrator, "gateway", "--help").stdout
    wrong = run_image(orchestrator, "gateway", "--insecure", "--listen=0.0.0.0:0")
    assert wrong.returncode == 2
    assert "--orchestrators is needed" in wrong.stderr


def test_the_command_line_works_in_the_orchestrators_image(orchestrator):
    command = [f"{orchestrator}/venv/bin/paceline", "health", "--help"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.full
@pytest.mark.timeout(1800)  # it downloads torch
def test_the_model_servers_image_serves_a_bundled_model_and_can_fetch_others(tmp_path):
    opt = install_image("model-server", tmp_path)
    # What fetches a model before a server starts.
    fetches = [opt / "venv" / "bin" / "python", "-c", "import huggingface_hub"]
    assert subprocess.run(fetches, env=environment_in(opt)).returncode == 0
    command = [
        *entry_point(),
        "target",
        f"--model={ROOT}/models/python-target",
        "--drain-seconds=5",
    ]
    with subprocess.Popen(
        command, cwd=opt, env=environment_in(opt), stdout=subprocess.PIPE, text=True
    ) as server:
        events = (json.loads(line)["event"] for line in server.stdout)
        assert [next(events), next(events)] == ["listening", "ready"]
        server.terminate()
        assert server.wait(60) == 0
