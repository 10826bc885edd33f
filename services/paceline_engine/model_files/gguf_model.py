"""A model in a GGUF file, as a folder of a model's files would say it.

The other modules here read a model's folder. A GGUF file holds the same facts in other words, so
this module writes the files of such a folder, in memory: one set of readers then finds the tokens,
the templates and the ends of a text in both.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline_engine.model_files.gguf_families import GgufFamily
from paceline_engine.model_files.gguf_file import GgufFile
from paceline_engine.model_files.gguf_tokenizer import GgufTokenizer
from paceline_engine.model_files.small_files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    NAMED_TEMPLATES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SmallFiles,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from paceline_engine.model_files.gguf_groups import GgufGroups

SUFFIX = ".gguf"

_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


@dataclass(frozen=True)
class GgufModel:
    """A checked model in a GGUF file.

    Attributes:
        file: The file.
        small: The files of a folder that would say the same, without weights.
    """

    file: GgufFile
    small: SmallFiles
    _family: GgufFamily

    @classmethod
    def read(cls, path: Path) -> GgufModel:
        """Read everything but the weights.

        Raises:
            ModelLoadError: The file cannot be read, is broken, or holds something unknown.
        """
        file = GgufFile.read(path)
        family = GgufFamily(file)
        tokenizer = GgufTokenizer(file)
        contents: dict[str, object] = {
            CONFIG: family.configuration,
            GENERATION_CONFIG: _generation(file.metadata, tokenizer),
            TOKENIZER: tokenizer.content,
            TOKENIZER_CONFIG: tokenizer.configuration,
        }
        written = {name: json.dumps(content).encode() for name, content in contents.items()}
        return cls(file, SmallFiles(path, written | _templates(file.metadata)), family)

    def named_weights(
        self,
    ) -> Iterator[tuple[str, NDArray[np.float32], str, GgufGroups | None]]:
        """Yield each weight: the library's name, dequantised numbers, kind, and its groups' scales.

        Cost: one weight's numbers in memory at a time, besides what the caller keeps.

        Raises:
            ModelLoadError: The file cannot be read.
        """
        return self._family.named_weights()


def _is_plain(name: object) -> bool:
    """Whether a template's name may be a file's."""
    return isinstance(name, str) and re.fullmatch(r"[\w-]{1,64}", name) is not None


def _generation(metadata: Mapping[str, Any], tokenizer: GgufTokenizer) -> dict[str, Any]:
    found = {
        name: metadata[f"general.sampling.{key}"]
        for key, name in _SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    return {**found, "eos_token_id": tokenizer.end_ids} if tokenizer.end_ids else found


def _templates(metadata: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the chat templates as files; each but the one in use has a name in its key."""
    places = {_TEMPLATE: CHAT_TEMPLATE}
    names = metadata.get("tokenizer.chat_templates", ())
    for name in filter(_is_plain, names if isinstance(names, list) else ()):
        places[f"{_TEMPLATE}.{name}"] = f"{NAMED_TEMPLATES}/{name}.jinja"
    return {
        place: text.encode()
        for key, place in places.items()
        if isinstance(text := metadata.get(key), str)
    }
