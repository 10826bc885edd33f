"""Write the images' requirements: every package with its pinned version and allowed hashes.

`make lock` runs it after it wrote constraints.txt. It needs uv, and asks uv's index.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "k8s" / "images" / "requirements"
_CONSTRAINTS = ROOT / "constraints.txt"
# The servers need this package, and it need not be in a registry.
_CLIENT = "./clients/python"
# Packages that only torch for GPUs needs.
_CUDA = re.compile(r"torch|triton|(nvidia|cuda)-.*")
# The version that constraints-vllm.txt has for CPUs, and its tests run with.
_VLLM = "vllm==0.32.0"
_MACHINES = ("aarch64", "x86_64")
_HEAD = "# Written by `make lock`.\n"


def compiled(
    requirements: str, *, arguments: Sequence[str], constraints: Path = _CONSTRAINTS
) -> dict[str, str]:
    """Return package name to its requirement with hashes, of all that some requirements need.

    Hashes are of all files of a version, so that they hold for every architecture.

    Args:
        requirements: In pip's form.
        arguments: More of uv's.
        constraints: A file of pins.
    """
    ran = subprocess.run(  # noqa: S603 - nothing from outside
        [
            *("uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"),
            *("--generate-hashes", "--python-version", "3.11", "--python-platform", "linux"),
            *("--constraint", str(constraints), *arguments),
        ],
        input=requirements,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return blocks(ran.stdout)


def blocks(text: str) -> dict[str, str]:
    """Split a file into its requirements, by name."""
    found = re.findall(r"^[A-Za-z0-9].*(?:\n[ \t]+.*)*", text, re.MULTILINE)
    return {each.partition("==")[0].strip(): each for each in found}


def lists(*, uv_arguments: Sequence[str], pip_arguments: Sequence[str]) -> dict[str, str]:
    """Return file name to text; torch for CPUs only if pip's arguments name its index."""
    orchestrator = compiled(f"{_CLIENT}\n.[cli,gateway,tracing]", arguments=uv_arguments)
    server = compiled(f"{_CLIENT}\n.[server,tracing]", arguments=uv_arguments)
    cuda = {name: each for name, each in server.items() if _CUDA.fullmatch(name)}
    beyond = {name: server[name] for name in server.keys() - orchestrator.keys() - cuda.keys()}
    found = {
        "build.txt": compiled("hatchling", arguments=uv_arguments),
        "orchestrator.txt": orchestrator,
        "server.txt": beyond,
        "torch-cuda.txt": cuda,
        "torch-cpu.txt": torch_for_cpus(arguments=pip_arguments),
    }
    found["vllm.txt"] = vllm_beside(orchestrator, arguments=uv_arguments)
    return {name: _text(each) for name, each in found.items() if each}


def vllm_beside(orchestrator: Mapping[str, str], *, arguments: Sequence[str]) -> dict[str, str]:
    """Return what vLLM for GPUs needs beyond the orchestrator's packages, at their versions."""
    with NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{each.split()[0]}\n" for each in orchestrator.values())
        pins.flush()
        every = compiled(
            f"{_CLIENT}\n.[vllm-server,tracing]\n{_VLLM}",
            arguments=arguments,
            constraints=Path(pins.name),
        )
    return {name: each for name, each in every.items() if name not in orchestrator}


def torch_for_cpus(*, arguments: Sequence[str]) -> dict[str, str]:
    """Return torch with the hashes of its wheels for CPUs, which pip downloads."""
    (version,) = re.findall(r"^torch==(\S+)$", _CONSTRAINTS.read_text(), re.MULTILINE)
    hashes = [it for machine in _MACHINES if (it := _cpu_hash(version, machine, arguments))]
    lines = (f" \\\n    --hash=sha256:{each}" for each in hashes)
    return {"torch": "".join((f"torch=={version}", *lines))} if hashes else {}


def _cpu_hash(version: str, machine: str, arguments: Sequence[str]) -> str:
    """Return the hash of the wheel for one kind of machine; empty if pip finds none."""
    ran = subprocess.run(  # noqa: S603 - nothing from outside
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"),
            *("--ignore-installed", "--report=-", "--only-binary=:all:", "--target=unused"),
            *("--python-version=3.11", f"--platform=manylinux_2_28_{machine}", *arguments),
            f"torch=={version}",
        ],
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(ran.stdout)["install"] if ran.returncode == 0 else []
    cpu = [it for it in found if it["metadata"]["version"] == f"{version}+cpu"]
    return cpu[0]["download_info"]["archive_info"]["hashes"]["sha256"] if cpu else ""


def _text(requirements: Mapping[str, str]) -> str:
    return _HEAD + "".join(f"{requirements[name]}\n" for name in sorted(requirements))


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv-args", default="", help="passed on to uv, such as another index")
    parser.add_argument("--pip-args", default="", help="passed on to pip, for torch for CPUs")
    options = parser.parse_args()
    texts = lists(uv_arguments=options.uv_args.split(), pip_arguments=options.pip_args.split())
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
