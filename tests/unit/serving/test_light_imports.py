from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["paceline_serving", "paceline_target", "paceline_drafter"])
def test_a_server_with_a_simulated_model_never_imports_torch(package):
    entry = "lifecycle" if package == "paceline_serving" else "__main__"
    code = f"import {package}.{entry}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
