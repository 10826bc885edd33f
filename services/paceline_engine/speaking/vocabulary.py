"""A vocabulary in bytes: what each token adds to a text, and a text as tokens.

Two vocabularies are compared by their tokens' bytes. Their strings cannot be compared: a space is
`Ġ` in one file, `▁` in another, and itself in an added token.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from paceline.panics import taking_panics
from paceline_contract.byte_level import BYTES
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class Vocabulary:
    """The tokens of a tokenizer.

    Attributes:
        size: How many ids a model can choose from; rows beyond have no bytes.
        contents: Each id's bytes; None: it is special, unknown, or no id of the tokenizer.
        special: The special tokens by their texts, but the one for unknown characters.
        end_ids: The tokens that end a text.
        start_ids: What the tokenizer puts before a text: one special token, or nothing.
    """

    def __init__(
        self, tokenizer: bytes, *, size: int, end_ids: Sequence[int] = (), name: str
    ) -> None:
        """Read a tokenizer.json.

        Args:
            size: How many ids the model can choose from.
            name: Whose it is, for messages.

        Cost: a second for 100,000 tokens.

        Raises:
            ModelLoadError: its tokens have no bytes of their own, as word pieces have none.
        """
        found = json.loads(tokenizer)
        spell = _spelling(found, name=name)
        with taking_panics():
            self._plain = Tokenizer.from_str(json.dumps(_exact(found)))
            # What somebody typed is a text, also if it looks like a special token.
            self._plain.encode_special_tokens = True
            parsing = Tokenizer.from_str(tokenizer.decode())
            start = parsing.encode("", add_special_tokens=True).ids
        self.size = size
        self.end_ids = tuple(each for each in end_ids if each < size)
        added = parsing.get_added_tokens_decoder()
        unknown = _unknown_ids(found)
        self.special = {
            it.content: each
            for each, it in added.items()
            if it.special and each < size and each not in unknown
        }
        self._special_ids = frozenset(self.special.values()) | {*self.end_ids}
        self.start_ids = tuple(start) if {*start} <= self._special_ids and len(start) == 1 else ()
        self._dropped = self._special_ids | unknown
        self.contents: list[bytes | None] = [None] * size
        for text, each in parsing.get_vocab(with_added_tokens=True).items():
            if each < size and each not in self._dropped:
                self.contents[each] = text.encode() if each in added else spell(text)
        self._bytes = {
            content[0]: each
            for each, content in enumerate(self.contents)
            if content is not None and len(content) == 1
        }

    def encode(self, content: bytes) -> list[int]:
        """Return the tokens of a text's bytes: a function of these bytes alone.

        No token comes before them or stands for them together. Bytes that are no character, as at
        the end of a text that was cut inside of one, are single-byte tokens. What the vocabulary
        cannot say is left out: its token for unknown characters never stands in.

        Raises:
            PanicError: the library gave up on this text.
        """
        with taking_panics():
            return [each for part in _parts(content) for each in self._encode_part(part)]

    def encode_many(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """Return the tokens of many short texts, without what the vocabulary cannot say.

        Raises:
            PanicError: the library gave up on one.
        """
        with taking_panics():
            for found in self._plain.encode_batch([*texts], add_special_tokens=False):
                yield self._said(found.ids)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is no text, but a role in it."""
        return token_id in self._special_ids

    def _encode_part(self, part: str | bytes) -> Iterable[int]:
        if isinstance(part, bytes):
            return [self._bytes[each] for each in part if each in self._bytes]
        return self._said(self._plain.encode(part, add_special_tokens=False).ids)

    def _said(self, ids: list[int]) -> list[int]:
        if self._dropped.isdisjoint(ids):
            return ids
        return [each for each in ids if each not in self._dropped]


def _parts(content: bytes) -> Iterator[str | bytes]:
    """Divide bytes into texts and what is none."""
    while content:
        try:
            yield content.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield content[: error.start].decode()
            yield content[error.start : error.end]
            content = content[error.end :]


def _spelling(found: Any, *, name: str) -> Any:
    """Return the function from a token's string to its bytes."""
    model = found.get("model") or {}
    steps = {*_types(found.get("decoder")), *_types(found.get("pre_tokenizer"))}
    affixes = [model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")]
    if model.get("type") == "WordPiece" or any(affixes):
        raise ModelLoadError(
            f"{name}: its tokens are pieces of words ({model.get('type')}), which have no bytes of"
            " their own; tokenizers of bytes, and of SentencePiece, can be translated"
        )
    if "ByteLevel" in steps:
        return _spell_letters
    return _spell_pieces if _has_pieces(found, model) else str.encode


def _has_pieces(found: Any, model: Any) -> bool:
    parts = [found.get(name) for name in ("decoder", "pre_tokenizer", "normalizer")]
    return bool(model.get("byte_fallback")) or _SPACE in json.dumps(parts, ensure_ascii=False)


def _spell_letters(text: str) -> bytes:
    try:
        return bytes(map(BYTES.__getitem__, text))
    except KeyError:  # a token with other letters is what it says
        return text.encode()


def _spell_pieces(text: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(text):
        return bytes.fromhex(byte[1])
    return text.replace(_SPACE, " ").encode()


def _types(part: Any) -> Iterator[str]:
    """Yield the types of a part of a tokenizer, and of the steps that it consists of."""
    if isinstance(part, dict):
        yield str(part.get("type"))
        for value in part.values():
            for each in value if isinstance(value, list) else ():
                yield from _types(each)


def _unknown_ids(found: Any) -> set[int]:
    """Return the token for characters that the vocabulary does not have, if there is one."""
    model = found.get("model") or {}
    vocabulary, named = model.get("vocab"), model.get("unk_token")
    ids = {model.get("unk_id")} if isinstance(vocabulary, list) else set()
    if isinstance(vocabulary, dict):
        ids.add(vocabulary.get(named))
    return {each for each in ids if isinstance(each, int)}


def _exact(found: Any) -> Any:
    """Return a tokenizer that follows from the bytes alone.

    It adds no space before a text, because a part of a text begins anywhere; and it leaves out no
    merges by chance, as for training.
    """
    changed = {name: _plain_step(found.get(name)) for name in ("normalizer", "pre_tokenizer")}
    if found["model"].get("dropout"):
        changed["model"] = {**found["model"], "dropout": None}
    return {**found, **changed}


def _plain_step(step: Any) -> Any:
    if not isinstance(step, dict) or step.get("type") == "Prepend":
        return None
    plain = {
        name: [each for it in value if (each := _plain_step(it))]
        if name in ("normalizers", "pretokenizers")
        else value
        for name, value in step.items()
    }
    if plain.get("type") == "Metaspace":
        plain |= {"prepend_scheme": "never"}
        plain.pop("add_prefix_space", None)
    if plain.get("type") == "ByteLevel":
        plain |= {"add_prefix_space": False}
    return plain
