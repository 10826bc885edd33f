"""The dialects' names in settings."""

from __future__ import annotations

from typing import Literal, TypeAlias

ToolParser: TypeAlias = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "gemma4",
    "glm45",
    "gpt_oss",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "mistral_list",
    "pythonic",
    "qwen3_coder",
]
ReasoningParser: TypeAlias = Literal[
    "auto", "none", "gemma4", "gpt_oss", "mistral", "seed", "think"
]
