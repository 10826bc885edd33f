"""The small files of a model's folder: each is read once, whole, and kept as it was read.

A folder can have files for many programs. Only the files named here are read, so other files can
neither change a model nor prevent its loading.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.plain_files import read_plain_file
from paceline_contract.limits import MOST_CHAT_TEMPLATE_BYTES, MOST_TOKENIZER_BYTES
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
LEGACY_CHAT_TEMPLATE = "chat_template.json"
DRAFT_VOCABULARY = "draft_vocabulary.json"
NAMED_TEMPLATES = "additional_chat_templates"
"""A folder with a template in each `NAME.jinja`."""

DECODER_PARTS = ("decoder", "generator", "text_config")
"""The parts of CONFIG that may be about the decoder alone, as the library looks for them."""

_SUFFIX = ".jinja"
# The largest, an index of a hundred thousand weights, has 10 MB; vocabularies in JSON have 5 MB.
_MOST_JSON_BYTES = 64 << 20
_MOST_TEMPLATES = 64
_MOST_BYTES = {
    CONFIG: _MOST_JSON_BYTES,
    GENERATION_CONFIG: _MOST_JSON_BYTES,
    TOKENIZER: MOST_TOKENIZER_BYTES,
    TOKENIZER_CONFIG: _MOST_JSON_BYTES,
    SPECIAL_TOKENS_MAP: _MOST_JSON_BYTES,
    CHAT_TEMPLATE: MOST_CHAT_TEMPLATE_BYTES,
    LEGACY_CHAT_TEMPLATE: _MOST_JSON_BYTES,
    DRAFT_VOCABULARY: _MOST_JSON_BYTES,
}
SMALL_FILES = (*_MOST_BYTES, f"{NAMED_TEMPLATES}/*{_SUFFIX}")
"""What is read of a folder besides weights and their index, as patterns of names."""
# What lies in a clone of a repository in the place of a large file that was not fetched.
_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class SmallFiles:
    """What was read from a model's folder.

    Attributes:
        directory: The folder.
        contents: The bytes of each file that is there, by its name in the folder.
    """

    directory: Path
    contents: Mapping[str, bytes]

    @classmethod
    def read(cls, directory: Path) -> SmallFiles:
        """Read all that are there.

        Raises:
            ModelLoadError: One cannot be read, is no plain file, or is larger than any of its kind.
        """
        limits = dict(_MOST_BYTES)
        named = sorted((directory / NAMED_TEMPLATES).glob(f"*{_SUFFIX}"))
        if len(named) > _MOST_TEMPLATES:
            raise ModelLoadError(
                f"{directory / NAMED_TEMPLATES} has {len(named)} templates, more than"
                f" {_MOST_TEMPLATES}"
            )
        limits |= {f"{NAMED_TEMPLATES}/{path.name}": MOST_CHAT_TEMPLATE_BYTES for path in named}
        contents = {
            name: read_content(directory / name, most_bytes=most_bytes)
            for name, most_bytes in limits.items()
            if (directory / name).exists()
        }
        return cls(directory, contents)

    def json(self, name: str) -> dict[str, Any]:
        """Return the object in a file; one that is not there has no fields.

        Raises:
            ModelLoadError: The file is no JSON, or no object.
        """
        content = self.contents.get(name)
        return {} if content is None else parse_json(self.directory / name, content)

    def text(self, name: str) -> str:
        """Return the text of a file; empty if it is not there.

        Raises:
            ModelLoadError: It is no UTF-8.
        """
        try:
            return self.contents.get(name, b"").decode()
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                f"{self.directory / name}: not readable as text ({error})"
            ) from error

    def named_templates(self) -> dict[str, str]:
        """Return the texts of the chat templates in a folder of their own, by their names."""
        folder = f"{NAMED_TEMPLATES}/"
        return {
            name.removeprefix(folder).removesuffix(_SUFFIX): self.text(name)
            for name in self.contents
            if name.startswith(folder)
        }


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a file.

    Raises:
        ModelLoadError: The file cannot be read, is no JSON, or no object.
    """
    return parse_json(path, read_content(path, most_bytes=_MOST_JSON_BYTES))


def parse_json(path: Path, content: bytes) -> dict[str, Any]:
    """Take an object from a file's content.

    Raises:
        ModelLoadError: The content is no JSON, or no object.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: is no JSON object")
    return found


def read_content(path: Path, *, most_bytes: int) -> bytes:
    """Read a plain file of a bounded size.

    Raises:
        ModelLoadError: It cannot be read, or is a Git LFS pointer.
    """
    try:
        content = read_plain_file(path, most_bytes=most_bytes)
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    refuse_pointer(path, content)
    return content


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Refuse what Git leaves in the place of a large file.

    Args:
        beginning: The file's first bytes.

    Raises:
        ModelLoadError: The file is a Git LFS pointer.
    """
    if beginning.startswith(_POINTER):
        raise ModelLoadError(
            f"{path} is a Git LFS pointer and not the file itself: fetch it with `git lfs pull`"
        )
