"""The tokenizer in a GGUF file, as the `tokenizer.json` that it was made of.

A GGUF file has the tokens and merges, and of everything else a name: `tokenizer.ggml.pre` names how
a text is split before tokens are sought in the pieces. A name that is not in the table here is
refused, since a text that is split in another way becomes other tokens, and the model answers worse
without any error.

SentencePiece vocabularies (`llama`) have no merges: a token's score says how early it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline_engine.terms.backend import ModelLoadError, few_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline_engine.model_files.gguf_file import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # a token's type; 1: normal
_SPACE = "\u2581"  # as SentencePiece writes it
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # so the format spells it
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
_FIM_NAMES = {
    "fim_prefix_token": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suffix_token": ("fim_suf_token_id", "suffix_token_id"),
    "fim_middle_token": ("fim_mid_token_id", "middle_token_id"),
}
_PREFIX = "tokenizer.ggml."
_KEYS = frozenset({
    "add_bos_token",
    "add_eos_token",
    "add_space_prefix",
    "merges",
    "model",
    "pre",
    "scores",
    "token_type",
    "token_type_count",
    "tokens",
})  # fmt: skip
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _byte_level(**options: bool) -> dict[str, Any]:
    plain = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {"type": "ByteLevel", **plain, **options}


def _split(pattern: str, **options: bool) -> dict[str, Any]:
    """Return how a text is split by a pattern, and its bytes spelt."""
    piece = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return _sequence(piece, _byte_level(use_regex=False, **options))


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [*parts]}


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How a text becomes the pieces in which a byte-level vocabulary's tokens are sought.

    Attributes:
        pre_tokenizer: The tokenizers library's words for it.
        normalizer: What is done to a text before.
        begins: Whether a text begins with a token of its own where the file does not say it.
        ignores_merges: Whether a piece that is a token is that token, whatever merges say.
    """

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    decoder: dict[str, Any] = field(default_factory=lambda: _byte_level(add_prefix_space=True))
    begins: bool = False
    ignores_merges: bool = False


_PLAIN = _Splitting(_byte_level())
_DIGITS = _Splitting(_sequence({"type": "Digits", "individual_digits": True}, _byte_level()))
_QWEN = _byte_level(trim_offsets=False, use_regex=False)
_QWEN2 = _Splitting(
    _split(_GPT4 % r"\p{N}", trim_offsets=False),
    normalizer={"type": "NFC"},
    post_processor=_QWEN,
    decoder=_QWEN,
)
_LLAMA3 = _Splitting(_split(_GPT4 % r"\p{N}{1,3}"), begins=True, ignores_merges=True)
_GPT4O = _Splitting(_split(_CASES % (_ENDINGS, _ENDINGS, r"\p{N}{1,3}")))
_SPLITTINGS = {
    "codeshell": _DIGITS,
    "dbrx": _Splitting(_LLAMA3.pre_tokenizer),
    "deepseek-r1-qwen": _Splitting(_QWEN2.pre_tokenizer, post_processor=_QWEN, decoder=_QWEN),
    "falcon3": _LLAMA3,
    "gpt-2": _PLAIN,
    "gpt-4o": _GPT4O,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "phi-2": _PLAIN,
    "qwen2": _QWEN2,
    "refact": _DIGITS,
    "smaug-bpe": _Splitting(_LLAMA3.pre_tokenizer),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "tekken": _Splitting(_split(_CASES % ("", "", r"\p{N}")), begins=True, ignores_merges=True),
}


class GgufTokenizer:
    """The tokenizer in a GGUF file.

    Attributes:
        content: As a tokenizer.json, parsed.
        configuration: As a tokenizer_config.json.
        end_ids: The tokens that end a text.
    """

    def __init__(self, file: GgufFile) -> None:
        """Take it from a file's metadata.

        Raises:
            ModelLoadError: It is of an unknown kind, or is broken.
        """
        self._file = file
        keys = {key.removeprefix(_PREFIX) for key in file.metadata if key.startswith(_PREFIX)}
        unknown = {key for key in keys - _KEYS if not key.endswith("_token_id")}
        # A key that says nothing changes nothing.
        if unknown := {key for key in unknown if file.metadata[_PREFIX + key]}:
            names = few_names(_PREFIX + key for key in unknown)
            raise self._refusal(f"what {names} means is unknown")
        self._tokens = self._list("tokens", str)
        count = len(self._tokens)
        self._types = self._list("token_type", int)
        if len(self._types) != count:
            raise self._refusal(f"{count} tokens have {len(self._types)} types")
        if len({*self._tokens}) != count:
            raise self._refusal("two of its tokens are the same text")
        # The rows of a head go on after the last token; a file names them, since it has to.
        while self._types and self._types[-1] == _UNUSED:
            self._types.pop()
            self._tokens.pop()
        kind = file.metadata.get("tokenizer.ggml.model")
        if kind not in {"gpt2", "llama"}:
            raise self._refusal(
                f"tokenizer.ggml.model is {str(kind)[:80]!r}; known are gpt2 and llama"
            )
        self.content = self._byte_level() if kind == "gpt2" else self._sentence_piece()
        self.end_ids = sorted({it for key in _ENDS if (it := self._id(key)) is not None})
        self.configuration = {
            **self._named(_NAMES.items()),
            **self._named((name, key) for name, keys in _FIM_NAMES.items() for key in keys),
        }

    def _byte_level(self) -> dict[str, Any]:
        name = self._file.metadata.get("tokenizer.ggml.pre")
        splitting = _SPLITTINGS.get(name) if isinstance(name, str) else None
        if splitting is None:
            raise self._refusal(
                "how its tokenizer splits texts is unknown: tokenizer.ggml.pre is"
                f" {str(name)[:80]!r}; known are {', '.join(sorted(_SPLITTINGS))}"
            )
        merges = [each.split(" ") for each in self._list("merges", str)]
        if any(len(pair) != 2 for pair in merges):
            raise self._refusal("one of its merges is not of two tokens")
        model: dict[str, Any] = {"type": "BPE", "vocab": self._vocabulary(), "merges": merges}
        if splitting.ignores_merges:
            model["ignore_merges"] = True
        return self._tokenizer(
            model,
            begins=splitting.begins,
            normalizer=splitting.normalizer,
            pre_tokenizer=splitting.pre_tokenizer,
            post_processor=splitting.post_processor,
            decoder=splitting.decoder,
        )

    def _sentence_piece(self) -> dict[str, Any]:
        scores = self._list("scores", float)
        if len(scores) < len(self._tokens):
            raise self._refusal(f"{len(self._tokens)} tokens have {len(scores)} scores")
        unknown = self._id("unknown_token_id")
        if unknown is None:
            unknown = next((it for it, kind in enumerate(self._types) if kind == _UNKNOWN), None)
        prefixes = self._flag("add_space_prefix", default=True)
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefixes else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixes else []
        back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
        return self._tokenizer(
            {
                "type": "BPE",
                "unk_token": None if unknown is None else self._tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": self._vocabulary(),
                "merges": _merges(self._tokens, self._types, scores),
            },
            begins=True,
            normalizer={"type": "Sequence", "normalizers": [*prepend, spaces]},
            decoder={
                "type": "Sequence",
                "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
            },
        )

    def _tokenizer(self, model: dict[str, Any], *, begins: bool, **parts: Any) -> dict[str, Any]:
        return {
            "version": "1.0",
            "added_tokens": [
                {
                    "id": token_id,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": kind != _USER_DEFINED,
                }
                for token_id, (text, kind) in enumerate(zip(self._tokens, self._types, strict=True))
                if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED}
            ],
            "normalizer": None,
            "pre_tokenizer": None,
            **parts,
            "post_processor": self._post_processor(parts.get("post_processor"), begins=begins),
            "model": model,
        }

    def _post_processor(self, own: dict[str, Any] | None, *, begins: bool) -> dict[str, Any] | None:
        """Put the tokens around a text that the file asks for."""
        first = self._id("bos_token_id") if self._flag("add_bos_token", default=begins) else None
        last = self._id("eos_token_id") if self._flag("add_eos_token", default=False) else None
        around = [self._tokens[each] for each in (first, last) if each is not None]
        if not around:
            return own

        def written(sequence: str, type_id: int) -> list[dict[str, Any]]:
            parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
            if first is not None:
                parts.insert(0, {"SpecialToken": {"id": self._tokens[first], "type_id": type_id}})
            if last is not None:
                parts.append({"SpecialToken": {"id": self._tokens[last], "type_id": type_id}})
            return parts

        template = {
            "type": "TemplateProcessing",
            "single": written("A", 0),
            "pair": [*written("A", 0), *written("B", 1)],
            "special_tokens": {
                text: {"id": text, "ids": [self._tokens.index(text)], "tokens": [text]}
                for text in around
            },
        }
        return template if own is None else {"type": "Sequence", "processors": [own, template]}

    def _vocabulary(self) -> dict[str, int]:
        """Return the tokens up to the last that a text's letters make; those after it are added."""
        made = [it for it, kind in enumerate(self._types) if kind not in {_CONTROL, _USER_DEFINED}]
        return {
            text: token_id
            for token_id, text in enumerate(self._tokens[: made[-1] + 1 if made else 0])
        }

    def _named(self, names: Any) -> dict[str, str]:
        found = ((name, self._id(key)) for name, key in names)
        return {name: self._tokens[each] for name, each in found if each is not None}

    def _id(self, key: str) -> int | None:
        found = self._file.metadata.get(f"{_PREFIX}{key}")
        if found is None:
            return None
        if type(found) is not int or not 0 <= found < len(self._tokens):
            raise self._refusal(
                f"tokenizer.ggml.{key} is {str(found)[:80]}, and it has {len(self._tokens)} tokens"
            )
        return found

    def _flag(self, key: str, *, default: bool) -> bool:
        return bool(self._file.metadata.get(f"{_PREFIX}{key}", default))

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self._file.metadata.get(f"{_PREFIX}{key}")
        if not isinstance(found, list) or not all(type(each) is kind for each in found):
            raise self._refusal(f"tokenizer.ggml.{key} is not a list of {kind.__name__} values")
        return [*found]

    def _refusal(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._file.path}: {what}")


def _merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the pairs of which tokens are made, in the order in which SentencePiece makes them."""
    ids = {text: it for it, text in enumerate(tokens)}
    made = {text for text, kind in zip(tokens, types, strict=True) if kind in {1, _USER_DEFINED}}

    def pairs() -> Iterator[tuple[float, str, str]]:
        for text in made:
            for place in range(1, len(text)):
                left, right = text[:place], text[place:]
                if left in ids and right in ids:
                    yield scores[ids[text]], left, right

    ordered = sorted(pairs(), key=lambda it: (-it[0], -len(it[1]), ids[it[1]], ids[it[2]]))
    return [(left, right) for _, left, right in ordered]
