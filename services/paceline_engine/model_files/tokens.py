"""The special tokens of a model: named tokens, tokens that end a text, and FIM tokens.

A model's folder names them in several files, and the transformers library reads all of these files.
So do the functions here.

- `generation_config.json` and `config.json` name ids that end a text; so may a part of the latter
  that is about the decoder alone.
- `tokenizer_config.json` and the older `special_tokens_map.json` name tokens by their texts, as
  strings or as objects with further fields. The end of a turn is often named only there, because
  people who fine-tune a model for chats change its tokenizer and leave the other files.
- A chat template may end turns with a token that no file names: see `turn_ends`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from paceline_engine.model_files.small_files import (
    CONFIG,
    DECODER_PARTS,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
)
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline_engine.model_files.small_files import SmallFiles
    from paceline_engine.model_files.tokenizer_file import TokenizerFile

# What templates can name: `SPECIAL_TOKENS_ATTRIBUTES` of the library.
_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FURTHER_NAMES = ("extra_special_tokens", "additional_special_tokens")
# What the library's classes of tokenizers call tokens that no file names.
_CLASS_NAMES = {
    "CodeLlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
_FIM_PARTS = ("prefix", "suffix", "middle")
# What families call the tokens before a prefix, before a suffix, and before what is wanted.
_FIM_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),  # Seed-Coder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
_HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")  # in JSON alone: no message can hold it
_ASSIGNMENT = re.compile(r"\{%[-+]?\s*set\s+(?P<name>[\w.]+)\s*=(?P<value>[^%]*)")
_READS_CONTENT = re.compile(r"\.content\b|\[['\"]content['\"]\]|\.get\(['\"]content['\"]")
_KEY_OF_MESSAGE = r"\s*(?:\[[-\d:]+\]\s*)?(?:\.|\.get\(|\[)\s*['\"]?(?:role|content)\b"
# A token with such a word begins a turn or stands in one.
_NO_END = re.compile(r"user|assistant|system|tool|observation|start|begin|think", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The ids of the tokens that ask for what is between two texts (fill in the middle).

    Attributes:
        prefix: Before the text that comes first.
        suffix: Before the text that comes last.
        middle: After both: what follows is what is between them.
    """

    prefix: int
    suffix: int
    middle: int


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What a folder says of a model's tokens.

    Attributes:
        named: Texts by the names that templates have for them, such as "bos_token".
        special: The texts of all special tokens.
        added: The ids of the tokens that are found in a text as a whole, by their texts.
        end_ids: Which ids end a text, as the files say it: some may be beyond the vocabulary.
        unknown_ends: Texts that the files say end a text, and that are no tokens.
        fim: For filling in the middle; None where no known ones are there.
    """

    named: Mapping[str, str]
    special: tuple[str, ...]
    added: Mapping[str, int]
    end_ids: tuple[int, ...]
    unknown_ends: tuple[str, ...]
    fim: FimTokens | None


def find_tokens(files: SmallFiles, tokenizer: TokenizerFile, *, template: str) -> ModelTokens:
    """Find what a folder says of its model's tokens.

    Args:
        template: The chat template; empty where there is none.

    Raises:
        ModelLoadError: A file is no JSON, or says that an id is none.
    """
    config, older = files.json(TOKENIZER_CONFIG), files.json(SPECIAL_TOKENS_MAP)
    # The library's rule: the older file counts where the newer does not list its tokens.
    merged = config if "added_tokens_decoder" in config else {**config, **older}
    named = _named(merged, template) | _named_by_class(files, merged, tokenizer)
    end_texts = (_text(config.get("eos_token")), _text(older.get("eos_token")))
    found = {text: tokenizer.id_of(text) for text in (*end_texts, named.get("eos_token")) if text}
    configured = _configured_ends(files)
    end_ids = [*dict.fromkeys((*configured, *(it for it in found.values() if it is not None)))]
    further = {*tokenizer.special_tokens, *_further(config), *_further(older)}
    special = {text: each for text in further if (each := tokenizer.id_of(text)) is not None}
    declared = [text for each in end_ids if (text := tokenizer.text_of(each)) is not None]
    of_turns = turn_ends(template, special=special, named=named, declared=declared)
    return ModelTokens(
        named=named,
        special=tokenizer.special_tokens,
        added=tokenizer.added_ids,
        end_ids=tuple(dict.fromkeys((*end_ids, *(special[text] for text in of_turns)))),
        unknown_ends=tuple(text for text, each in found.items() if each is None),
        fim=_fim(tokenizer, config, older),
    )


def turn_ends(
    template: str, *, special: Iterable[str], named: Mapping[str, str], declared: Sequence[str]
) -> tuple[str, ...]:
    """Return the tokens with which a chat template ends a turn, if no declared one does.

    The template is read and not run: a turn's end is the special token that most often follows a
    message's content in its source, and seldom comes before one. Where a declared end stands among
    the turns, which go from the first content to the token behind the last one, its author knew of
    turns, and nothing is added: a model may end parts of its answer, such as its reasoning, with
    tokens that end messages in the history. A declared end elsewhere is about the whole text.

    Args:
        template: Its source.
        special: The texts of the special tokens.
        named: Texts by the names that the template has for them.
        declared: The texts of the tokens that the model's files say end a text.
    """
    source = _without_comments(template)
    for name, text in named.items():
        source = re.sub(rf"\b{re.escape(name)}\b", text.replace("\\", r"\\"), source)
    for name in _names_of_content(source):
        source = re.sub(rf"\b{re.escape(name)}\b", "content", source)
    texts = sorted({it for it in (*special, *declared) if it and it in source}, key=len)
    places = re.compile("|".join([r"\bcontent\b", *map(re.escape, reversed(texts))]))
    seen = [place[0] for place in places.finditer(source)]
    follows = Counter(after for before, after in pairwise(seen) if before == "content" != after)
    precedes = Counter(before for before, after in pairwise(seen) if before != "content" == after)
    contents = [index for index, each in enumerate(seen) if each == "content"]
    turns = seen[contents[0] : contents[-1] + 2] if contents else ()
    if any(text in turns for text in declared):
        return ()
    scores = {it: follows[it] - precedes[it] for it in texts if not _NO_END.search(it)}
    best = max(scores.values(), default=0)
    return tuple(text for text, score in scores.items() if score == best > 0)


def _names_of_content(source: str) -> Iterator[str]:
    """Yield the variables to which a template gives a message's content."""
    for found in _ASSIGNMENT.finditer(source):
        if _READS_CONTENT.search(found["value"]) and not _holds_messages(found["name"], source):
            yield found["name"]


def _holds_messages(name: str, source: str) -> bool:
    """Whether a variable, or what a loop takes from it, is asked for a role or a content."""
    items = re.findall(rf"\bfor\s+(\w+)\s+in\s+{re.escape(name)}\b", source)
    names = "|".join(map(re.escape, (name, *items)))
    return bool(re.search(rf"\b(?:{names}){_KEY_OF_MESSAGE}", source))


def _without_comments(template: str) -> str:
    kept, start = [], 0
    while (begin := template.find("{#", start)) >= 0:
        kept.append(template[start:begin])
        end = template.find("#}", begin)
        start = len(template) if end < 0 else end + len("#}")
    return "".join([*kept, template[start:]])


def _configured_ends(files: SmallFiles) -> Iterator[int]:
    config = files.json(CONFIG)
    parts = [config.get(name) for name in DECODER_PARTS]
    objects = [(CONFIG, each) for each in (config, *parts) if isinstance(each, dict)]
    for name, content in ((GENERATION_CONFIG, files.json(GENERATION_CONFIG)), *objects):
        found = content.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        # A bool is an int, and no token.
        if not all(type(each) is int and each in range(1 << 32) for each in ids):
            raise ModelLoadError(
                f"{files.directory / name}: eos_token_id is {found!r}, not a token id"
            )
        yield from ids


def _named(config: Mapping[str, Any], template: str) -> dict[str, str]:
    """Return what a configuration names; a model's own names only where the template has them.

    As the library does, this takes each name that ends with `_token`, and those of an object of
    further special tokens.
    """
    values = {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(further := config.get("extra_special_tokens"), dict):
        values |= further
    return {
        name: text
        for name, value in values.items()
        if (name in _NAMES or (name.isidentifier() and name in template)) and (text := _text(value))
    }


def _named_by_class(
    files: SmallFiles, config: Mapping[str, Any], tokenizer: TokenizerFile
) -> dict[str, str]:
    """Return the names that a tokenizer's class gives to tokens that are there and named nowhere.

    What is said to be null has no name.
    """
    said = config.get("tokenizer_class") or files.json(CONFIG).get("tokenizer_class")
    names = _CLASS_NAMES.get(str(said).removesuffix("Fast"), {})
    return {
        name: text
        for name, text in names.items()
        if name not in config and tokenizer.id_of(text) is not None
    }


def _further(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of the special tokens that have no name of the library's."""
    for name in _FURTHER_NAMES:
        found = config.get(name)
        values = [*found.values()] if isinstance(found, dict) else found
        if isinstance(values, list):
            yield from filter(None, map(_text, values))


def _text(value: object) -> str:
    """Take a token's text, which stands there bare or in an object that says more of it."""
    if isinstance(value, dict):
        value = value.get("content")
    is_text = isinstance(value, str) and not _HALF_CHARACTER.search(value)
    return str(value) if is_text else ""


def _fim(tokenizer: TokenizerFile, *configs: Mapping[str, Any]) -> FimTokens | None:
    said = tuple(
        next((text for each in configs if (text := _fim_text(each, part))), "")
        for part in _FIM_PARTS
    )
    for texts in (said, *_FIM_NAMES):
        prefix, suffix, middle = (tokenizer.id_of(text) for text in texts)
        if prefix is not None and suffix is not None and middle is not None:
            return FimTokens(prefix, suffix, middle)
    return None


def _fim_text(config: Mapping[str, Any], part: str) -> str:
    """Return what a configuration itself says is a part's token."""
    further = config.get("extra_special_tokens")
    places = (config, further) if isinstance(further, dict) else (config,)
    names = (f"fim_{part}_token", f"fim_{part}", f"{part}_token")
    return next((text for it in places for name in names if (text := _text(it.get(name)))), "")
