from __future__ import annotations

import pkgutil
import subprocess
import sys

import paceline_engine

COMPUTE_BESIDE_THE_TORCH_BACKEND = {
    "deciding.acceptance_rules",
    "deciding.decisions",
    "deciding.gbnf",
    "deciding.grammars",
    "deciding.gumbel",
    "deciding.noise_kernel",
    "deciding.penalties",
    "deciding.reviews",
    "deciding.sampling",
    "deciding.shapers",
    "deciding.shaping",
    # A model's files come before its weights, and GGUF files have both.
    "model_files.files",
    "model_files.gguf_families",
    "model_files.gguf_file",
    "model_files.gguf_groups",
    "model_files.gguf_model",
    "model_files.target_tokens",
    "speaking.mapped_rows",
    "speaking.speaking_backend",
    "speaking.speaking_text",
    "speaking.steps",
}
# Two of them import vLLM, which is not installed where the other tests run.
OF_VLLM = {f"vllm_backend.{name}" for name in ("engine", "load", "row_decider")}
MODULES = sorted(
    module.name.removeprefix("paceline_engine.")
    for module in pkgutil.walk_packages(paceline_engine.__path__, "paceline_engine.")
)


def test_only_the_modules_that_compute_import_torch():
    wanted = [
        f"paceline_engine.{name}"
        for name in MODULES
        if name not in COMPUTE_BESIDE_THE_TORCH_BACKEND | OF_VLLM
        and not name.startswith("torch_backend")
    ]
    script = (
        f"import sys, {', '.join(wanted)}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'grpc'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
