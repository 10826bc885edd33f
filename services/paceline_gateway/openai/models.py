"""/v1/models: the gateway's one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import SystemInfo
    from paceline_gateway.fleet.orchestrators import Orchestrators
    from paceline_gateway.generating.sampling_defaults import SamplingDefaults
    from paceline_gateway.http.connection import Connection


async def list_models(
    connection: Connection,
    _content: bytes,
    *,
    orchestrators: Orchestrators,
    defaults: SamplingDefaults,
    began_at: int,
) -> None:
    """List the model; its creation time is the gateway's start."""
    info = await orchestrators.info()
    described = _model(info, began_at, defaults=defaults)
    await connection.answer({"object": "list", "data": [described]})


async def describe_model(
    connection: Connection,
    _content: bytes,
    *,
    orchestrators: Orchestrators,
    defaults: SamplingDefaults,
    began_at: int,
) -> None:
    """Describe the model, if the request names it."""
    await orchestrators.check_model(connection.path.removeprefix("/v1/models/"))
    info = await orchestrators.info()
    await connection.answer(_model(info, began_at, defaults=defaults))


def _model(info: SystemInfo, began_at: int, *, defaults: SamplingDefaults) -> dict[str, Any]:
    return {
        "id": info.model_name,
        "object": "model",
        "created": began_at,
        "owned_by": "paceline",
        "max_model_len": info.context_length,
        "paceline": {
            "version": info.version,
            "fingerprint": info.model_fingerprint,
            "context_length": info.context_length,
            "vocabulary_size": info.vocabulary_size,
            "sampling_defaults": dict(defaults.of_model(info)),
        },
    }
