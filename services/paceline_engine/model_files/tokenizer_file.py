"""A model's tokenizer.json: the tokenizer that it defines, and its tokens."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

from paceline_engine.model_files.identity import canonical_tokenizer, parse_values

if TYPE_CHECKING:
    from collections.abc import Mapping


class TokenizerFile:
    """What a tokenizer.json says.

    Its parts are a stranger's, and may be anything; what is not as the library writes it is passed
    over here, and refused by the library when it makes a tokenizer of it.

    Attributes:
        content: The same tokenizer in the one way in which each file that means it is written:
            what servers send, and what the tokenizer's fingerprint is of.
    """

    def __init__(self, content: bytes) -> None:
        """Parse it.

        Cost: about a second for a vocabulary of 150,000 tokens.

        Raises:
            ValueError: It is no JSON, or a text in it is none.
            RecursionError: It is nested deeper than any tokenizer.
        """
        found = parse_values(content)
        self.content = canonical_tokenizer(found)
        self._found: dict[str, Any] = found if isinstance(found, dict) else {}

    @cached_property
    def added_ids(self) -> Mapping[str, int]:
        """The ids of the tokens that are found in a text as a whole, by their texts."""
        return {each["content"]: each["id"] for each in self._added()}

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The texts of the special tokens, sorted."""
        return tuple(sorted(each["content"] for each in self._added() if each.get("special")))

    @cached_property
    def size(self) -> int:
        """One more than the largest token id."""
        return max((*self.added_ids.values(), *self._vocabulary.values()), default=-1) + 1

    @cached_property
    def texts(self) -> Mapping[int, str]:
        """The text of each token, by its id."""
        every = chain(self._vocabulary.items(), self.added_ids.items())
        return {token_id: text for text, token_id in every}

    def id_of(self, text: str) -> int | None:
        """Return the id of the token with this text; None if there is none."""
        found = self.added_ids.get(text)
        return self._vocabulary.get(text) if found is None else found

    def text_of(self, token_id: int) -> str | None:
        """Return the text of the token with this id; None if there is none."""
        return self.texts.get(token_id)

    def _added(self) -> list[dict[str, Any]]:
        added = self._found.get("added_tokens")
        return [
            each
            for each in (added if isinstance(added, list) else ())
            if isinstance(each, dict)
            and isinstance(each.get("content"), str)
            and type(each.get("id")) is int
        ]

    @cached_property
    def _vocabulary(self) -> Mapping[str, int]:
        model = self._found.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict):
            return {text: each for text, each in vocabulary.items() if type(each) is int}
        if isinstance(vocabulary, list):  # Unigram's: [text, score] each, in the order of the ids
            return {
                entry[0]: token_id
                for token_id, entry in enumerate(vocabulary)
                if isinstance(entry, list) and entry and isinstance(entry[0], str)
            }
        return {}
