"""Generate the Python code from the protos, or check that the committed code is fresh.

protoc is told proto paths that are Python paths, so the output needs no patching.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROTO_ROOT = Path(__file__).parent


@dataclass(frozen=True)
class Package:
    """One directory of protos.

    Attributes:
        protos: Where they are, below protos/.
        python: The Python package that is generated.
        root: The source root that holds it.
    """

    protos: str
    python: str
    root: str


PACKAGES = (
    Package("paceline/v1", "paceline/v1", "clients/python"),
    # In the orchestrator's own package: a stranger's may be called as KEDA's.
    Package("externalscaler", "paceline_orchestrator/scaling/externalscaler", "orchestrator"),
)


def generate(package: Package, output: Path) -> None:
    """Write *_pb2 modules, gRPC stubs and their type stubs below `output`."""
    directory = PROTO_ROOT / package.protos
    sources = sorted(directory.glob("*.proto"))
    services = [source for source in sources if "\nservice " in source.read_text()]
    path_of = f"-I{package.python}={directory}"
    common = [sys.executable, "-m", "grpc_tools.protoc", path_of]
    # protoc finds the mypy plugins of this environment on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for command in (
        [*common, f"--python_out={output}", f"--mypy_out=quiet:{output}", *map(str, sources)],
        [
            *common,
            f"--grpc_python_out={output}",
            f"--mypy_grpc_out=quiet:{output}",
            *map(str, services),
        ],
    ):
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})  # noqa: S603
    init = output / package.python / "__init__.py"
    init.write_text(f'"""Generated from protos/{package.protos}."""\n')


def stale_files(package: Package, committed: Path) -> list[str]:
    """Name the files below `committed` that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(package, Path(scratch))
        fresh, old = Path(scratch) / package.python, committed / package.python
        names = {path.name for directory in (fresh, old) for path in directory.glob("*.py*")}
        _, different, missing = filecmp.cmpfiles(fresh, old, sorted(names), shallow=False)
        return [str(old / name) for name in sorted(different + missing)]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="the tree that holds the source roots")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if not arguments.check:
        for package in PACKAGES:
            generate(package, arguments.tree / package.root)
        return 0
    stale = [
        name for package in PACKAGES for name in stale_files(package, arguments.tree / package.root)
    ]
    if stale:
        print("Generated code is stale; run `make protos`:", *stale, sep="\n  ")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
