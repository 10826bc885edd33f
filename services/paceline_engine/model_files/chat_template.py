"""A model's chat template: read from its files, never run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.chat_templates import chat_template_fingerprint
from paceline_contract.limits import (
    MOST_ADDED_TOKEN_CHARACTERS,
    MOST_ADDED_TOKENS,
    MOST_CHAT_TEMPLATE_BYTES,
)
from paceline_engine.model_files.small_files import (
    CHAT_TEMPLATE,
    LEGACY_CHAT_TEMPLATE,
    NAMED_TEMPLATES,
    TOKENIZER_CONFIG,
)
from paceline_engine.terms.backend import ChatTemplate, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline_engine.model_files.small_files import SmallFiles
    from paceline_engine.model_files.tokens import ModelTokens

_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class FoundTemplate:
    """A template, and the file it stood in."""

    source: str
    file_name: str


def find_templates(files: SmallFiles) -> dict[str, FoundTemplate]:
    """Return a model's chat templates by their names; the one in use is called "default".

    A template can stand in four places. A file of its own counts before the older
    `chat_template.json`, and that before `tokenizer_config.json`: as in the transformers library.

    Raises:
        ModelLoadError: One cannot be read, or is larger than any template.
    """
    of_config = files.json(TOKENIZER_CONFIG).get("chat_template")
    legacy = files.json(LEGACY_CHAT_TEMPLATE).get("chat_template")
    places = (
        (TOKENIZER_CONFIG, _by_name(of_config)),
        (LEGACY_CHAT_TEMPLATE, _by_name(legacy)),
        (CHAT_TEMPLATE, {_DEFAULT: files.text(CHAT_TEMPLATE)}),
        (NAMED_TEMPLATES, files.named_templates()),
    )
    found = {
        name: FoundTemplate(source, place)
        for place, templates in places
        for name, source in templates.items()
        if source
    }
    for name, template in found.items():
        _check(template, where=f"{files.directory / template.file_name}: chat template {name!r}")
    return found


def _check(template: FoundTemplate, *, where: str) -> None:
    try:
        size = len(template.source.encode())
    except UnicodeEncodeError as error:
        raise ModelLoadError(f"{where} is no text ({error})") from error
    if size > MOST_CHAT_TEMPLATE_BYTES:
        raise ModelLoadError(f"{where} has more than {MOST_CHAT_TEMPLATE_BYTES} bytes")


def template_of(source: str, tokens: ModelTokens) -> ChatTemplate:
    """Return a template with the tokens that it names, and those that could forge its output."""
    told = _told_ids(tokens.added)
    fingerprint = chat_template_fingerprint(
        source,
        named_tokens=tokens.named,
        special_tokens=tokens.special,
        added_token_ids=told,
    )
    return ChatTemplate(
        fingerprint=fingerprint,
        source=source,
        named_tokens=tokens.named,
        special_tokens=tokens.special,
        added_token_ids=told,
    )


def _told_ids(added: Mapping[str, int]) -> dict[str, int]:
    """Return the ids that an answer may have: none if they are too many, as no client needs all."""
    told = {
        text: each
        for text, each in added.items()
        if 0 <= each < 1 << 32 and len(text) <= MOST_ADDED_TOKEN_CHARACTERS
    }
    return told if len(told) <= MOST_ADDED_TOKENS else {}


def _by_name(value: object) -> dict[str, str]:
    """Take one template, or several with their names, as a list of objects or as one object."""
    if isinstance(value, str):
        return {_DEFAULT: value}
    if isinstance(value, list):
        value = {it.get("name"): it.get("template") for it in value if isinstance(it, dict)}
    if not isinstance(value, dict):
        return {}
    return {
        name: source
        for name, source in value.items()
        if isinstance(name, str) and isinstance(source, str)
    }
