"""Generate the Python code from the protos, or check that the committed code is fresh.

The proto path is the Python path, so the output needs no patching.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO_ROOT = Path(__file__).parent
PACKAGE = Path("paceline/v1")


def generate(output: Path) -> None:
    """Write *_pb2 modules, gRPC stubs and their type stubs below `output`."""
    sources = sorted((PROTO_ROOT / PACKAGE).glob("*.proto"))
    services = [source for source in sources if source.stem.endswith("_service")]
    common = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}"]
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
    (output / PACKAGE / "__init__.py").write_text('"""Generated from protos/paceline/v1."""\n')


def stale_files(committed: Path) -> list[str]:
    """Name the files below `committed` that differ from freshly generated ones."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / PACKAGE
        names = {path.name for root in (fresh, committed / PACKAGE) for path in root.glob("*.py*")}
        _, different, missing = filecmp.cmpfiles(
            fresh, committed / PACKAGE, sorted(names), shallow=False
        )
        return sorted(different + missing)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="the source root that holds paceline/v1")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if not arguments.check:
        generate(arguments.output)
        return 0
    stale = stale_files(arguments.output)
    if stale:
        print("Generated code is stale; run `make protos`:", *stale, sep="\n  ")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
