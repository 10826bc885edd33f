"""A model's files: which of them may be loaded, and the model's fingerprint.

Only data is read: safetensors or GGUF, JSON and templates, and only the files that make up a model.
A directory with code is refused whole, because its code would run with the model (`refusals.py`).
Other files there change nothing: pickles, weights that no index names, files of other programs.

Exactly the files that were checked and hashed are loaded. The directory is read once. Small files
are kept as they were read; for weights the module notes the file's identity and its last change.
`ModelFiles.laid_out` then shows a library these files and nothing else, so no adapters, parts or
settings of other programs that may lie beside them.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline_contract.limits import MOST_CONFIGURATION_CHARACTERS
from paceline_engine.model_files.chat_template import find_templates, template_of
from paceline_engine.model_files.draft_vocabulary import find_draft_vocabulary
from paceline_engine.model_files.gguf_model import SUFFIX, GgufModel
from paceline_engine.model_files.hub import download
from paceline_engine.model_files.identity import meant_configuration, parse_values
from paceline_engine.model_files.lora_folder import LORA_CONFIG
from paceline_engine.model_files.quantisation import find_quantisation
from paceline_engine.model_files.refusals import (
    refuse_foreign_parts,
    refuse_links_outside,
    refuse_programs,
)
from paceline_engine.model_files.small_files import (
    CONFIG,
    DECODER_PARTS,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    SmallFiles,
    read_json,
)
from paceline_engine.model_files.tokenizer_file import TokenizerFile
from paceline_engine.model_files.tokens import find_tokens
from paceline_engine.model_files.weight_files import (
    INDEX_FILE,
    WEIGHTS_FILE,
    check_weights,
    hash_weights,
    part_names,
)
from paceline_engine.terms.backend import ModelLoadError, few_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline_engine.model_files.chat_template import FoundTemplate
    from paceline_engine.model_files.hub import Check
    from paceline_engine.model_files.quantisation import Quantisation
    from paceline_engine.model_files.tokens import ModelTokens
    from paceline_engine.terms.backend import ChatTemplate

_CONFIGURATIONS = (CONFIG, GENERATION_CONFIG)
# What a generation configuration may say of how tokens are chosen.
_SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
)


# A file's device, inode and size, and when its content and its inode last changed.
_Stamp: TypeAlias = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class ModelFiles:
    """A checked model: a directory, or a GGUF file.

    Attributes:
        directory: Where it is.
        name: What the model is called.
        revision: The hub's; empty for a directory.
        weights: The files that hold its weights, and no others.
        small: Its other files, as they were read; for a GGUF file, as it would write them.
        tokenizer: Its tokenizer.json, written in one way; see `TokenizerFile`.
        vocabulary_size: How many tokens the model can choose from, as its files say it.
        draft_vocabulary: The tokens that its head scores, ascending; None: it scores all tokens.
        tokens: Which tokens are named, end a text, or fill in the middle.
        templates: Its chat templates by their names.
        index: Which weight is in which of several files; None: there is one.
        stamps: Which files the weights were in, when the directory was checked.
        gguf: The GGUF file that holds the weights; None: safetensors hold them.
    """

    directory: Path
    name: str
    revision: str
    weights: tuple[Path, ...]
    small: SmallFiles
    tokenizer: bytes
    vocabulary_size: int
    draft_vocabulary: tuple[int, ...] | None
    tokens: ModelTokens
    templates: Mapping[str, FoundTemplate]
    index: bytes | None
    stamps: Mapping[Path, _Stamp]
    gguf: GgufModel | None = None

    @property
    def quantisation(self) -> Quantisation | None:
        """How safetensors hold the weights; None: as numbers to compute with.

        Raises:
            ModelLoadError: In a way that is not read here.
        """
        return find_quantisation(self.name, self.small.json(CONFIG))

    @property
    def contents(self) -> Mapping[str, bytes]:
        """What a copy of the folder needs besides the weights: bytes by their file's name."""
        index = {} if self.index is None else {INDEX_FILE: self.index}
        return {**self.small.contents, **index}

    @property
    def chat_template(self) -> ChatTemplate | None:
        """How the model wants conversations; None: it only continues text."""
        found = self.templates.get("default")
        return None if found is None else template_of(found.source, self.tokens)

    @property
    def sampling_defaults(self) -> Mapping[str, object]:
        """How the model's author would choose tokens: told to operators and to orchestrators."""
        config = self.small.json(GENERATION_CONFIG)
        return {name: config[name] for name in _SAMPLING if config.get(name) is not None}

    def fingerprint(self, dtype: str) -> str:
        """Hash what decides a token: weights, configuration, tokenizer, ends of a text, dtype.

        How these are written is not hashed: `identity.py` says what counts.

        Cost: the first time, reads every weight once, about a second per gigabyte.

        Raises:
            ModelLoadError: Weights are not what they were when the directory was checked.
        """
        ends = sorted(each for each in self.tokens.end_ids if each < self.vocabulary_size)
        return _hash(["served", self.identity(), dtype, ends])

    def identity(self) -> str:
        """Hash what a model computes with, in whichever dtype, and wherever its texts end.

        Cost and errors: those of `fingerprint`.
        """
        weights = self._weights_digest
        self.check_unchanged()
        configuration = self._meant_configuration()
        tokenizer = hashlib.sha256(self.tokenizer).hexdigest()
        parts: list[object] = ["model", weights, configuration, tokenizer]
        if self.draft_vocabulary is not None:
            parts.append(self.draft_vocabulary)
        return _hash(parts)

    @property
    def configuration(self) -> str:
        """What config.json says of the computation, as JSON for people; empty if it is too long."""
        text = json.dumps(self._meant_configuration(), sort_keys=True)
        return text if len(text) <= MOST_CONFIGURATION_CHARACTERS else ""

    def _meant_configuration(self) -> dict[str, Any]:
        return meant_configuration(parse_values(self.small.contents[CONFIG]))

    @cached_property
    def _weights_digest(self) -> str:
        hashed = self.__dict__.get("_hashed")
        return self._hash_weights() if hashed is None else str(hashed.result())

    def _hash_weights(self) -> str:
        return hash_weights(self.weights) if self.gguf is None else self.gguf.file.hash_weights()

    def begin_hashing(self) -> None:
        """Hash the weights on a thread of its own, while the caller loads them.

        So they come from the disk once, and `fingerprint` does not read them again. The thread ends
        with the process: a model that is refused meanwhile is refused at once.
        """
        hashed: Future[str] = Future()

        def hash_weights() -> None:
            try:
                hashed.set_result(self._hash_weights())
            except Exception as error:  # noqa: BLE001 - `fingerprint` raises it
                hashed.set_exception(error)

        self.__dict__["_hashed"] = hashed
        Thread(target=hash_weights, name="hash-weights", daemon=True).start()

    def check_unchanged(self) -> None:
        """Check that weights are in the files they were in when the directory was checked.

        Raises:
            ModelLoadError: They are not: what is loaded, and what is hashed, may be different.
        """
        for path, stamp in self.stamps.items():
            if _stamp(path) != stamp:
                raise ModelLoadError(f"{path} was changed while the model was loaded")

    @contextmanager
    def laid_out(self) -> Iterator[Path]:
        """Lend a directory with the checked files and nothing else, for a library to load from.

        For a GGUF file it has no weights: `GgufModel.named_weights` yields them.

        Raises:
            ModelLoadError: Weights were changed since they were checked.
        """
        with TemporaryDirectory(prefix="paceline-model-") as folder:
            directory = Path(folder)
            for name, content in self._configurations().items():
                (directory / name).write_bytes(content)
            if self.index is not None:
                (directory / INDEX_FILE).write_bytes(self.index)
            for path in () if self.gguf else self.weights:
                (directory / path.name).symlink_to(path.resolve())
            yield directory
        self.check_unchanged()

    def _configurations(self) -> dict[str, bytes]:
        contents = self.small.contents
        return {name: contents[name] for name in _CONFIGURATIONS if name in contents}


def find_model_files(
    model: str, *, revision: str | None = None, check: Check | None = None
) -> ModelFiles:
    """Find and check a model: a directory, a GGUF file, or a hub id where there is a network.

    Args:
        revision: For a hub id, its branch, tag or commit.
        check: Refuses a folder, before its weights are looked for or fetched.

    Raises:
        ModelLoadError: there is no such model, a file is missing, or one is not plain data.
    """
    path = Path(model).expanduser()
    if path.is_file() or (path.suffix.lower() == SUFFIX and not path.is_dir()):
        return _of_gguf_file(path, name=path.stem)
    directory = path
    if directory.is_dir():
        if gguf := only_gguf_file(directory):
            refuse_links_outside(directory)
            refuse_programs(directory)
            return _of_gguf_file(gguf, name=directory.resolve().name)
        if not (directory / "config.json").is_file():
            beside = ""
            if (directory / LORA_CONFIG).exists():
                beside = ", but a LoRA adapter: serve its model, with --lora NAME=DIR"
            raise ModelLoadError(f"model {model!r}: there is no config.json in {directory}{beside}")
        name, revision = directory.resolve().name, revision or ""
    elif directory.is_absolute() or model.startswith((".", "~")):
        raise ModelLoadError(f"model {model!r}: there is no such directory")
    else:
        directory = download(model, revision, check=check)
        name, revision = model, directory.name
    return _of_directory(directory, model=model, name=name, revision=revision, check=check)


def _of_directory(
    directory: Path, *, model: str, name: str, revision: str, check: Check | None
) -> ModelFiles:
    refuse_links_outside(directory)
    refuse_programs(directory)
    for file_name in (CONFIG, TOKENIZER):
        if not (directory / file_name).is_file():
            raise ModelLoadError(f"model {model!r}: {file_name} is missing in {directory}")
    small = SmallFiles.read(directory)
    if check is not None:
        check(name, small.json(CONFIG))
    index_path = directory / INDEX_FILE
    index = read_json(index_path) if index_path.exists() else None
    parts = part_names(directory, index)
    weights = tuple(directory / part for part in parts)
    check_weights(directory, parts)
    for each in (*_CONFIGURATIONS, TOKENIZER_CONFIG):
        refuse_foreign_parts(directory / each, small.json(each))
    return ModelFiles(
        directory,
        name=name,
        revision=revision,
        weights=weights,
        small=small,
        index=None if index is None or {*parts} == {WEIGHTS_FILE} else _clean_index(parts),
        stamps={path: _stamp(path) for path in weights},
        **_meanings(name, small),
    )


def _of_gguf_file(path: Path, *, name: str) -> ModelFiles:
    stamp = _stamp(path)
    gguf = GgufModel.read(path)
    return ModelFiles(
        path,
        name=name,
        revision="",
        weights=(path,),
        small=gguf.small,
        index=None,
        stamps={path: stamp},
        gguf=gguf,
        **_meanings(name, gguf.small),
    )


def only_gguf_file(directory: Path) -> Path | None:
    """Return the GGUF file of a directory that has its weights in no other form.

    Raises:
        ModelLoadError: It has several, and nobody said which.
    """
    found = [path for path in directory.iterdir() if path.suffix.lower() == SUFFIX]
    if not found or any(directory.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = few_names(path.name for path in found)
        raise ModelLoadError(f"{directory} has several GGUF files, {names}: give one of them")
    return found[0]


def _meanings(name: str, small: SmallFiles) -> dict[str, Any]:
    """Find what a model's small files say: its tokenizer, tokens and templates."""
    try:
        tokenizer = TokenizerFile(small.contents[TOKENIZER])
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"model {name!r}: {TOKENIZER} cannot be used ({error})") from error
    templates = find_templates(small)
    vocabulary_size = count_vocabulary(small.json(CONFIG), tokenizer)
    default = templates.get("default")
    return {
        "tokenizer": tokenizer.content,
        "vocabulary_size": vocabulary_size,
        "draft_vocabulary": find_draft_vocabulary(small, vocabulary_size=vocabulary_size),
        "tokens": find_tokens(small, tokenizer, template=default.source if default else ""),
        "templates": templates,
    }


def count_vocabulary(config: Mapping[str, Any], tokenizer: TokenizerFile) -> int:
    """Count the tokens that the tokenizer has and the model's head, too."""
    parts = [config, *(config.get(name) for name in DECODER_PARTS)]
    objects = [each for each in parts if isinstance(each, dict)]
    sizes = [size for each in objects if type(size := each.get("vocab_size")) is int]
    return min([tokenizer.size, *sizes])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _clean_index(parts: Mapping[str, frozenset[str]]) -> bytes:
    """Write an index anew, with what was checked alone."""
    placed = {weight: part for part, weights in parts.items() for weight in sorted(weights)}
    return json.dumps({"metadata": {}, "weight_map": placed}).encode()


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path}: {error.strerror}") from error
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
