"""How a model wants a conversation written as a prompt: read from its files, never run here."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from paceline.limits import MOST_CHAT_TEMPLATE_BYTES
from paceline.plain_files import read_plain_file
from paceline_engine.backends.base import ChatTemplate, ModelLoadError
from paceline_engine.backends.model_files import read_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["find_chat_template"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def find_chat_template(directory: Path, tokenizer: bytes) -> ChatTemplate | None:
    """Read the template beside a model: chat_template.jinja, or else tokenizer_config.json's.

    Returns:
        The template; None if the model has none. Of several in one configuration, "default".

    Raises:
        ModelLoadError: It cannot be read, or is larger than any template.
    """
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    source = _own_file(directory / "chat_template.jinja") or _of_config(config.get("chat_template"))
    if not source:
        return None
    if len(source.encode()) > MOST_CHAT_TEMPLATE_BYTES:
        raise ModelLoadError(
            f"{directory}: the chat template has more than {MOST_CHAT_TEMPLATE_BYTES} bytes"
        )
    named = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
    added = json.loads(tokenizer).get("added_tokens") or ()
    special = tuple(sorted(it["content"] for it in added if it.get("special")))
    digest = hashlib.sha256(json.dumps([source, sorted(named.items()), special]).encode())
    return ChatTemplate(
        fingerprint=digest.hexdigest(), source=source, named_tokens=named, special_tokens=special
    )


def _own_file(path: Path) -> str:
    try:
        if not path.exists():
            return ""
        return read_plain_file(path, most_bytes=MOST_CHAT_TEMPLATE_BYTES).decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelLoadError(f"{path}: not readable as text ({reason})") from error


def _of_config(value: object) -> str:
    """Take the one template, or of a list of named ones the one that is called default."""
    if isinstance(value, list):
        named = {it.get("name"): it.get("template") for it in value if isinstance(it, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else ""


def _token_text(value: object) -> str:
    """Take a token's text, which stands there bare or in an object that says more of it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""
