import subprocess
import sys
from importlib import import_module

import pytest

import paceline

MODULES = ["call_metadata", "call_plan", "channel", "client", "connection", "endpoints", "errors",
           "generation", "request", "responses", "stream_state", "sync_client",
           "transcript"]  # fmt: skip


def test_all_is_sorted_and_every_name_in_it_is_there():
    assert paceline.__all__ == sorted(paceline.__all__)
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Klient"):
        paceline.Klient  # noqa: B018


@pytest.mark.parametrize("module", MODULES)
def test_all_is_exactly_what_a_module_defines_in_public(module):
    home = import_module(f"paceline.{module}")
    own = {
        name
        for name, value in vars(home).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == home.__name__
    }
    constants = {name for name in home.__all__ if not hasattr(getattr(home, name), "__module__")}
    aliases = {
        "AsyncToken",
        "ChannelOptions",
        "DispatchName",
        "Metadata",
        "MetadataSource",
        "Pairs",
    }
    aliases |= {"DrafterName", "Pairs", "Prompt", "RuleName", "StrategyName", "Token"}
    assert own == set(home.__all__) - constants - aliases


@pytest.mark.parametrize("statement", ["import paceline", "import paceline.errors"])
def test_importing_costs_neither_grpc_nor_protobuf(statement):
    heavy = "[name for name in ('grpc', 'google', 'torch') if name in sys.modules]"
    check = f"{statement}; import sys; print({heavy})"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, check=True, text=True
    )
    assert result.stdout.strip() == "[]"
