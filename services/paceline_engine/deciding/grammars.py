"""Grammars: which tokens may come next, as a function of the answer's tokens.

llguidance (MIT) compiles JSON schemas, regular expressions and Lark grammars in milliseconds,
refuses what it cannot enforce, and bounds what a step costs. It does not bound the stack that it
needs (`_STACK_BYTES`). A matcher is touched only by trying tokens and by going back: a token that
it refuses would spoil it for good.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from functools import partial
from importlib import metadata
from threading import Lock
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from paceline.errors import InvalidFieldError
from paceline.panics import PanicError, taking_panics
from paceline_contract.limits import MOST_GRAMMAR_BYTES
from paceline_contract.sampling import GrammarKind
from paceline_engine.deciding.gbnf import is_gbnf, lark_of
from paceline_engine.deciding.json_schemas import sound_schema
from paceline_engine.deciding.lark_terms import NO_WAY_BACK, sound_lark

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline_contract.sampling import Grammar

FIELD = "spec.sampling.grammar"
_MOST_KEPT = 256
# The compiler goes down a level for each rule that leads to the next. Where the stack ends, the
# process ends. The longest chains of rules and references in 64 KiB need less than 32 MiB.
_STACK_BYTES = 512 << 20
_STACK_SIZE_LOCK = Lock()
# The model's thread computes masks. With these a step takes 10 ms at most, also of a hostile
# grammar, which then ends with an error; useful ones take 0.1 ms.
_MOST_ITEMS_A_STEP, _MOST_FUEL_A_STEP = 10_000, 50_000
# The fuel does not count a text that alone may follow: each mask before it reads it to its end,
# which takes 75 ms for 64 KiB of it.
_LONGEST_FORCED_RUN = 4096
_MOST_REASON_CHARACTERS = 300
# As in <[5]> and <[^0,7-9]>.
_TOKEN_IDS, _ID = re.compile(r"<\[([^\]\n]*)\]>"), re.compile(r"[0-9]{1,9}")
# One blank after a colon and a comma: without a bound a greedy model can fill its answer with them.
_JSON_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def grammar_engine() -> str:
    """Return the name and version of what enforces grammars: two may allow different tokens."""
    return f"llguidance {metadata.version('llguidance')}"


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the last ones. Any thread may use it.

    Args:
        tokenizer: The bytes of its tokenizer.json.
        vocabulary_size: V, the tokens that can be chosen.
        eos_token_ids: The tokens that end a text.

    Raises:
        Exception: The library cannot read the tokenizer.

    Cost: for a tokenizer of 50,000 tokens 0.3 s and 60 MB.
    """

    def __init__(
        self, tokenizer: bytes, *, vocabulary_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._vocabulary_size = vocabulary_size
        self._lock = Lock()
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.decode(), n_vocab=vocabulary_size, eos_token=list(eos_token_ids)
        )
        self._kept: OrderedDict[Grammar, tuple[Any, bool]] = OrderedDict()

    def knows(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled already."""
        with self._lock:
            return grammar in self._kept

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar, so that `path` takes no time.

        Raises:
            InvalidFieldError: It is too large, is no grammar, or has what cannot be enforced.
        """
        if self.knows(grammar):
            return
        try:
            matcher = _on_a_deep_stack(partial(_compiled, grammar, self._tokenizer))
        except PanicError as error:
            raise InvalidFieldError.of(FIELD, f"cannot be compiled: {_short(str(error))}") from None
        # Beside it, because reading 64 KiB for each answer would take long.
        in_copies = _names_ordinary_tokens(grammar, self._tokenizer)
        with self._lock:
            self._kept[grammar] = matcher, in_copies
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)

    def path(self, grammar: Grammar) -> GrammarPath:
        """Return a grammar before the first token of an answer; compile it if it was forgotten.

        Raises:
            InvalidFieldError: As `compile` says.
        """
        while True:
            self.compile(grammar)
            with self._lock:
                if (kept := self._kept.get(grammar)) is not None:
                    self._kept.move_to_end(grammar)
                    matcher, in_copies = kept
                    return GrammarPath(
                        matcher.deep_copy(),
                        self._tokenizer,
                        vocabulary_size=self._vocabulary_size,
                        looks_ahead_in_copies=in_copies,
                    )


def _compiled(grammar: Grammar, tokenizer: Any) -> Any:
    """Compile a grammar, and compute its first mask."""
    limits = llguidance.LLParserLimits(
        verbose_errors=False,
        step_max_items=_MOST_ITEMS_A_STEP,
        step_lexer_fuel=_MOST_FUEL_A_STEP,
    )
    matcher = llguidance.LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
    _check(matcher)
    return matcher


def _on_a_deep_stack(work: Callable[[], Any]) -> Any:
    """Do something on a thread of its own that has a large stack."""
    done: list[Any] = []

    def do() -> None:
        try:
            with taking_panics():
                done.append(work())
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.append(error)

    with _STACK_SIZE_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=do, name="paceline-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(done[0], Exception):
        raise done[0]
    return done[0]


class GrammarPath:
    """A grammar after the tokens of an answer. Worker thread only.

    Args:
        matcher: A matcher that has no token yet.
        tokenizer: The tokenizer, as the library has it.
        vocabulary_size: V, the tokens that can be chosen.
        looks_ahead_in_copies: Whether to ask a copy what may follow. Where the only token that may
            follow is an ordinary one that the grammar names by its id, the library cannot go back
            rightly after it was asked.

    Attributes:
        failure: Why it cannot follow the present tokens, if it cannot: they are too complex for it.
    """

    def __init__(
        self,
        matcher: Any,
        tokenizer: Any,
        *,
        vocabulary_size: int,
        looks_ahead_in_copies: bool = False,
    ) -> None:
        self._looks_ahead_in_copies = looks_ahead_in_copies
        self._unused = matcher
        self._tokenizer = tokenizer
        self._matcher = matcher.deep_copy()
        self._vocabulary_size = vocabulary_size
        self._taken: list[int] = []
        self._failed_at = 0
        self.failure = ""

    @property
    def length(self) -> int:
        """How many tokens of the answer it has taken; after these one was refused, or none came."""
        return len(self._taken)

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the text's end may follow."""
        return bool(self._matcher.is_stopped())

    def cut(self, length: int) -> None:
        """Go back to the first tokens of the answer."""
        if length <= self._failed_at:
            self.failure = ""
        if length < len(self._taken):
            self._matcher.rollback(len(self._taken) - length)
            del self._taken[length:]

    def add(self, tokens: Sequence[int]) -> None:
        """Take further tokens, up to the first that the grammar refuses."""
        count = self._matcher.try_consume_tokens(list(tokens))
        if self._matcher.is_error():
            self._begin_anew(self._matcher.get_error())
        else:
            self._taken.extend(tokens[:count])

    def allowed(self) -> np.ndarray | None:
        """Return which tokens may come next, (V,) bool; None if that is too complex to say.

        Invariants:
            It follows from the tokens alone, and not from where a forced text was seen first: a
            tokenizer may cut the rest of a text otherwise than the whole
            (tests/unit/engine/test_grammars.py::test_a_mask_is_that_of_a_path_that_begins_here).
        """
        if self.failure:
            return None
        ahead = self._ahead()
        mask = ahead.compute_bitmask()
        if ahead.is_error():
            self._begin_anew(ahead.get_error())
            return None
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        allowed: np.ndarray = bits[: self._vocabulary_size].astype(bool)
        if np.count_nonzero(allowed) == 1 and not self.is_complete:
            if reason := _long_run(ahead):
                self.failure, self._failed_at = reason, len(self._taken)
                return None
            return self._spelled(allowed, ahead)
        return allowed

    def forced(self, most: int) -> list[int]:
        """Return the tokens that alone may come next, one after another; the text's end is none.

        Each is what `allowed` leaves after those before it, but where a tokenizer cuts the rest of
        a text otherwise than the whole: they are guesses (tests/unit/engine/test_forced_tokens.py).
        """
        if self.is_complete:
            return []
        ahead = self._ahead()
        found = ahead.compute_ff_tokens()[:most]
        # Where a special token stands for a text, the rest is spelled otherwise: see `_spelled`.
        count = ahead.validate_tokens(found) if found else 0
        if ahead.is_error():
            self._begin_anew(ahead.get_error())
            return []
        return list(found[:count])

    def _spelled(self, allowed: np.ndarray, ahead: Any) -> np.ndarray:
        """Replace an only token that stands for a text, and that the matcher would refuse.

        Where one text alone may follow, the library names the token that its tokenizer makes of it.
        If the text is that of a special token, such as `</s>` in a schema's value, this is the
        special token, which is not the text. Then the text's first ordinary token may follow.
        """
        if ahead.validate_tokens([int(np.argmax(allowed))]):
            return allowed
        text = ahead.compute_ff_bytes().decode("utf-8", "ignore")
        ordinary = self._tokenizer.greedy_tokenize(text)
        spelled = np.zeros_like(allowed)
        spelled[ordinary[:1]] = True
        return spelled

    def _ahead(self) -> Any:
        """Return what can be asked what may follow."""
        return self._matcher.deep_copy() if self._looks_ahead_in_copies else self._matcher

    def _begin_anew(self, error: str) -> None:
        """Replace a matcher that has failed: it would never do anything else again."""
        self.failure, self._failed_at = _short(error), len(self._taken)
        self._matcher = self._unused.deep_copy()
        self._matcher.try_consume_tokens(self._taken)


def _names_ordinary_tokens(grammar: Grammar, tokenizer: Any) -> bool:
    """Whether a grammar of Lark names tokens by their ids that are no special ones."""
    if grammar.kind is not GrammarKind.LARK:
        return False
    named = {each for found in _TOKEN_IDS.findall(grammar.text) for each in _ID.findall(found)}
    return not all(tokenizer.is_special_token(int(each)) for each in named)


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own form."""
    if len(grammar.text.encode()) > MOST_GRAMMAR_BYTES:
        raise InvalidFieldError.of(FIELD, f"has more than {MOST_GRAMMAR_BYTES} bytes of UTF-8")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema = sound_schema(grammar.text, field=f"{FIELD}.json_schema")
            spaces: Any = _JSON_SPACES  # the library does not export its type
            source = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=spaces)
        case GrammarKind.REGEX:
            source = llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            lark = grammar.text
            if is_gbnf(lark):
                lark = lark_of(lark, field=f"{FIELD}.lark")
            lark = sound_lark(lark, field=f"{FIELD}.lark")
            source = llguidance.LLMatcher.grammar_from_lark(lark)
        case GrammarKind.CHOICES:
            source = llguidance.grammar_from("choice", grammar.text)
    return str(source)


def _check(matcher: Any) -> None:
    """Refuse a grammar that is none, or that allows no first token."""
    if not matcher.is_error():
        first = matcher.deep_copy()
        mask = first.compute_bitmask()  # here, because the first mask of a grammar takes longest
        if not first.is_error() and not _goes_back(matcher.deep_copy(), mask):
            raise InvalidFieldError.of(FIELD, NO_WAY_BACK)
        matcher = first
    if matcher.is_error():
        raise InvalidFieldError.of(FIELD, _short(matcher.get_error()))
    if reason := _long_run(matcher):
        raise InvalidFieldError.of(FIELD, reason)


def _goes_back(matcher: Any, mask: bytes) -> bool:
    """Whether a matcher that has no token yet can take one and give it back, as drafts need it."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    count = matcher.try_consume_tokens([int(np.argmax(bits))])
    if count == 0 or matcher.is_error():
        return True  # too complex at its first token already, which ends the answer there
    matcher.rollback(count)
    return not matcher.is_error()


def _long_run(matcher: Any) -> str:
    """Return what is wrong with the text that alone may follow, if it is too long."""
    if len(matcher.compute_ff_tokens()) <= _LONGEST_FORCED_RUN:
        return ""
    return f"has a part of more than {_LONGEST_FORCED_RUN} tokens that leaves no choice"


def _short(reason: str) -> str:
    """Return the library's reason in one line, without its own state."""
    if "NoExtensionBias" in reason:
        return "allows no text"
    told = " ".join(reason.replace("<non-verbose/>", "").split())
    return told[:_MOST_REASON_CHARACTERS]
