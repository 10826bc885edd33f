"""Every settings class there is: what a PACELINE_* variable can mean to someone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline_cli.check_pair import CheckPairSettings
from paceline_cli.demo import DemoSettings
from paceline_cli.generate import GenerateSettings
from paceline_cli.health import HealthSettings
from paceline_cli.info import InfoSettings
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
        UpSettings,
    )
