import subprocess
import sys

import pytest

import paceline


def test_all_is_sorted_and_every_name_in_it_is_there():
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Klient"):
        paceline.Klient  # noqa: B018


@pytest.mark.parametrize("statement", ["import paceline", "import paceline.errors"])
def test_importing_costs_neither_grpc_nor_protobuf(statement):
    heavy = "[name for name in ('grpc', 'google', 'torch') if name in sys.modules]"
    check = f"{statement}; import sys; print({heavy})"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, check=True, text=True
    )
    assert result.stdout.strip() == "[]"
