from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import paceline_engine

TORCH_MODULES = {
    "adapters.files",
    "adapters.low_rank",
    "adapters.medusa",
    "adapters.streams",
    "adapters.trunk",
    "decisions",
    "reviews",
    "sampling",
    "verification",
    "backends.attention",
    "backends.captured",
    "backends.decoders",
    "backends.device",
    "backends.invariance",
    "backends.invariant",
    "backends.key_values",
    "backends.library",
    "backends.llama",
    "backends.memory",
    "backends.model_loading",
    "backends.own_guesses",
    "backends.padded_texts",
    "backends.products",
    "backends.self_drafting",
    "backends.shared_rows",
    "backends.slabs",
    "backends.stream_rows",
    "backends.transformers",
    "backends.upper_rows",
}
MODULES = sorted(
    module.name.removeprefix("paceline_engine.")
    for module in pkgutil.walk_packages(paceline_engine.__path__, "paceline_engine.")
)


def test_only_the_modules_that_compute_import_torch():
    wanted = [f"paceline_engine.{name}" for name in MODULES if name not in TORCH_MODULES]
    script = (
        f"import sys, {', '.join(wanted)}\n"
        "heavy = {'torch', 'transformers', 'numpy', 'grpc'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_true(name):
    module = importlib.import_module(f"paceline_engine.{name}")
    public = getattr(module, "__all__", None)
    if public is None:
        assert name in {"adapters", "backends"}
        return
    defined = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    assert defined <= set(public)
    assert all(hasattr(module, key) for key in public)
