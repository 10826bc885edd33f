"""What `npm pack` makes of the TypeScript client is a package that an ES module can import."""

from __future__ import annotations

import json
import subprocess
import tarfile

import pytest

from support.conformance.drivers import ROOT
from support.conformance.toolchains import missing, needs_toolchain

CLIENT = ROOT / "clients/typescript"
PROGRAM = """
import * as paceline from "paceline";
import { Client, InvalidFieldError } from "paceline";
let refused = false;
try {
  new Client("10.0.0.1:50050");
} catch (error) {
  refused = error instanceof InvalidFieldError;
}
const client = new Client("127.0.0.1:50050");
client.close();
console.log(JSON.stringify({ refused, names: Object.keys(paceline).sort() }));
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with the package as users would have it, and links to what it needs."""
    needs_toolchain("typescript")
    if not (CLIENT / "dist/index.js").exists():
        missing("the client is not built: make client-typescript")
    folder = tmp_path_factory.mktemp("project")
    # Without scripts: prepack would build it once more, in place.
    command = ("npm", "pack", "--ignore-scripts", "--pack-destination", folder)
    subprocess.run(command, cwd=CLIENT, check=True, capture_output=True, timeout=100)
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    modules = folder / "node_modules"
    modules.mkdir()
    (folder / "package").rename(modules / "paceline")
    for scope in ("@grpc", "@bufbuild"):
        (modules / scope).symlink_to(CLIENT / "node_modules" / scope)
    return folder


def test_an_es_module_imports_it(project):
    (project / "program.mjs").write_text(PROGRAM)
    ran = subprocess.run(
        ("node", "program.mjs"), cwd=project, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["refused"]
    assert {"Client", "PacelineError", "TryAgainError", "DEFAULT_TIMEOUT_SECONDS"} <= set(
        told["names"]
    )


def test_it_has_its_types_and_nothing_of_the_tests(project):
    package = project / "node_modules" / "paceline"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()}
    assert {"package.json", "README.md", "dist/index.js", "dist/index.d.ts", "dist/cli.js"} <= files
    assert not [name for name in files if "conformance" in name or "test" in name]
