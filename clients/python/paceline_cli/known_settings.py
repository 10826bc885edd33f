"""Every settings class there is: what a PACELINE_* variable can mean to someone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_cli.check_pair import CheckPairSettings
from paceline_cli.demo import DemoSettings
from paceline_cli.generate import GenerateSettings
from paceline_cli.health import HealthSettings
from paceline_cli.info import InfoSettings
from paceline_cli.top import TopSettings
from paceline_cli.up import UpSettings
from paceline_orchestrator.settings import OrchestratorSettings
from paceline_serving.model_settings import ModelServerSettings

if TYPE_CHECKING:
    from paceline_serving.settings import Settings

__all__ = ["settings_classes"]


def settings_classes() -> tuple[type[Settings], ...]:
    """Return those of all commands and servers."""
    return (
        CheckPairSettings,
        DemoSettings,
        GenerateSettings,
        HealthSettings,
        InfoSettings,
        ModelServerSettings,
        OrchestratorSettings,
        TopSettings,
        UpSettings,
        *_of_the_bench_extra(),
    )


def _of_the_bench_extra() -> tuple[type[Settings], ...]:
    """Return those of the commands that need the extra `bench`; none where it is not installed."""
    try:
        from paceline_cli.bench_load import LoadSettings
        from paceline_cli.bench_table2 import Table2Settings
        from paceline_cli.plan import PlanSettings
        from paceline_cli.simulate import SimulateSettings
    except ModuleNotFoundError:
        return ()
    return LoadSettings, PlanSettings, SimulateSettings, Table2Settings
