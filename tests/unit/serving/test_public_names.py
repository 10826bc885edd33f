from __future__ import annotations

import importlib
import inspect
import pkgutil
import subprocess
import sys

import pytest

import paceline_drafter
import paceline_gateway
import paceline_model_server
import paceline_serving
import paceline_target

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (
        paceline_drafter,
        paceline_gateway,
        paceline_model_server,
        paceline_serving,
        paceline_target,
    )
    for module in pkgutil.iter_modules(package.__path__)
    if module.name != "__main__"
]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_exactly_what_is_public(name):
    module = importlib.import_module(name)
    defined = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }
    assert defined <= set(module.__all__)
    assert all(hasattr(module, each) for each in module.__all__)


@pytest.mark.parametrize("package", ["paceline_serving", "paceline_target", "paceline_drafter"])
def test_a_server_with_a_simulated_model_never_imports_torch(package):
    entry = "lifecycle" if package == "paceline_serving" else "__main__"
    code = f"import {package}.{entry}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
