"""/v1/models: the gateway's model, and the model with each of its LoRA adapters."""

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
    """List the model, then its LoRA adapters; their creation time is the gateway's start."""
    info = await orchestrators.info()
    names = [info.model_name, *sorted(info.lora_adapters.keys() - {info.model_name})]
    described = [_model(info, name, began_at, defaults=defaults) for name in names]
    await connection.answer({"object": "list", "data": described})


async def describe_model(
    connection: Connection,
    _content: bytes,
    *,
    orchestrators: Orchestrators,
    defaults: SamplingDefaults,
    began_at: int,
) -> None:
    """Describe the model or the LoRA adapter that the request names."""
    model = await orchestrators.check_model(connection.path.removeprefix("/v1/models/"))
    info = await orchestrators.info()
    await connection.answer(_model(info, model.name, began_at, defaults=defaults))


def _model(
    info: SystemInfo, name: str, began_at: int, *, defaults: SamplingDefaults
) -> dict[str, Any]:
    is_adapter = name != info.model_name
    fingerprint = info.lora_adapters.get(name, "") if is_adapter else info.model_fingerprint
    return {
        "id": name,
        "object": "model",
        "created": began_at,
        "owned_by": "paceline",
        "root": info.model_name,
        "parent": info.model_name if is_adapter else None,
        "max_model_len": info.context_length,
        "paceline": {
            "version": info.version,
            "fingerprint": fingerprint,
            "context_length": info.context_length,
            "vocabulary_size": info.vocabulary_size,
            "sampling_defaults": dict(defaults.of_model(info)),
        },
    }
