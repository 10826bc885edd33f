"""The tokenizer of a model that is elsewhere: what a drafter needs to know of its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline_engine.model_files.chat_template import find_templates
from paceline_engine.model_files.files import count_vocabulary, only_gguf_file
from paceline_engine.model_files.gguf_model import SUFFIX, GgufModel
from paceline_engine.model_files.small_files import CONFIG, TOKENIZER, SmallFiles
from paceline_engine.model_files.tokenizer_file import TokenizerFile
from paceline_engine.model_files.tokens import find_tokens
from paceline_engine.terms.backend import ModelLoadError

# Many times the largest vocabulary: a larger id is a mistake or an attack, and would take memory.
_MOST_TOKENS = 1 << 23


@dataclass(frozen=True, slots=True)
class TargetTokens:
    """A target's tokens, as its server reports them.

    Attributes:
        name: What they were read from.
        tokenizer: The tokenizer.json, written in one way; see `TokenizerFile`.
        vocabulary_size: How many tokens the target chooses from.
        end_ids: Those that end a text.
    """

    name: str
    tokenizer: bytes
    vocabulary_size: int
    end_ids: tuple[int, ...]


def find_target_tokens(place: str) -> TargetTokens:
    """Read a target's tokenizer: no weights, which need not be there.

    Args:
        place: A model's folder, its tokenizer.json, beside which its other small files are, a GGUF
            file, or a folder with one.

    Raises:
        ModelLoadError: it is not there, or cannot be used.
    """
    path = Path(place).expanduser()
    if path.name == TOKENIZER:
        path = path.parent
    is_folder = path.is_dir() and not (path / TOKENIZER).is_file()
    if is_folder and (found_file := only_gguf_file(path)):
        path = found_file
    if path.suffix.lower() == SUFFIX and path.is_file():
        small = GgufModel.read(path).small
    elif (path / TOKENIZER).is_file():
        small = SmallFiles.read(path)
    else:
        raise ModelLoadError(
            f"--speak {place}: is no folder with a {TOKENIZER}, no such file, and no GGUF file"
        )
    try:
        tokenizer = TokenizerFile(small.contents[TOKENIZER])
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"--speak {place}: {TOKENIZER} cannot be used ({error})") from error
    size = count_vocabulary(small.json(CONFIG), tokenizer)
    if size > _MOST_TOKENS:
        raise ModelLoadError(
            f"--speak {place}: {TOKENIZER} has the token id {size - 1},"
            f" which is not below {_MOST_TOKENS}"
        )
    template = find_templates(small).get("default")
    found = find_tokens(small, tokenizer, template=template.source if template else "")
    ends = tuple(sorted(each for each in found.end_ids if each < size))
    return TargetTokens(place, tokenizer.content, vocabulary_size=size, end_ids=ends)
