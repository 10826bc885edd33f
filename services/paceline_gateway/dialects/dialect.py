"""How a model writes calls and reasoning: found out from its template, or from settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_gateway.dialects import harmony
from paceline_gateway.dialects.family import FAMILIES, find_family
from paceline_gateway.dialects.grammar_rules import Tokens
from paceline_gateway.dialects.reasoning import REASONINGS, find_reasoning

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline import ChatTemplate
    from paceline_gateway.dialects.family import Family
    from paceline_gateway.dialects.names import ReasoningParser as ReasoningName
    from paceline_gateway.dialects.names import ToolParser as ToolName
    from paceline_gateway.dialects.reasoning import Reasoning

_log = logging.getLogger(__name__)

_AUTO, _NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a model writes calls and reasoning.

    Attributes:
        family: How it writes calls; None: not known, or in the dialect of gpt-oss.
        reasoning: How it marks reasoning; None: it does not, or in that dialect.
        is_harmony: Whether it speaks the dialect of gpt-oss.
        takes_calls: Whether calls are read.
        tokens: The tokens that a grammar has to write as tokens.
        marks: Texts of special tokens that the parsers look for, by their ids.
    """

    family: Family | None
    reasoning: Reasoning | None
    is_harmony: bool
    takes_calls: bool
    tokens: Tokens
    marks: Mapping[int, str]

    @property
    def calls_name(self) -> str:
        """What the form of calls is called in settings."""
        if not self.takes_calls:
            return _NONE
        return harmony.NAME if self.family is None else self.family.name

    @property
    def thought_name(self) -> str:
        """What the form of reasoning is called in settings."""
        if self.is_harmony:
            return harmony.NAME
        return _NONE if self.reasoning is None else self.reasoning.name


def find_dialect(
    template: ChatTemplate,
    *,
    tool_parser: ToolName = "auto",
    reasoning_parser: ReasoningName = "auto",
) -> Dialect:
    """Find out how a model speaks: from its template, unless settings say it."""
    source = template.source
    speaks_harmony = all(it in source for it in harmony.SIGNS)
    family = find_family(source) if tool_parser == _AUTO and not speaks_harmony else None
    family = family or next((it for it in FAMILIES if it.name == tool_parser), None)
    reasoning = find_reasoning(source) if reasoning_parser == _AUTO else None
    reasoning = reasoning or next((it for it in REASONINGS if it.name == reasoning_parser), None)
    named = {tool_parser, reasoning_parser}
    is_harmony = harmony.NAME in named or (
        speaks_harmony and _AUTO in named and named <= {_AUTO, _NONE}
    )
    ids = template.added_token_ids
    special = frozenset(template.special_tokens)
    texts = harmony.MARKS if is_harmony else () if family is None else tuple(family.texts())
    of_calls = {it for it in special if any(it in text for text in texts)}
    of_reasoning: set[str] = set()
    if reasoning is not None:
        of_reasoning = {it for it in special if it in reasoning.open or it in reasoning.close}
    searched = of_calls | of_reasoning
    unknown = searched - ids.keys()
    if reasoning is not None and unknown & of_reasoning:
        reasoning = None  # an older server does not tell ids: the marks cannot be seen
    is_known = not unknown & of_calls
    return Dialect(
        family=None if is_harmony else family,
        reasoning=None if is_harmony else reasoning,
        is_harmony=is_harmony and is_known,
        takes_calls=is_known and tool_parser != _NONE and (is_harmony or family is not None),
        tokens=Tokens.of(ids, special),
        marks={ids[it]: it for it in special & ids.keys() if it in searched},
    )


class Dialects:
    """Finds models' dialects, by the settings.

    Args:
        tool_parser: How calls are written.
        reasoning_parser: How reasoning is marked.
    """

    def __init__(
        self, *, tool_parser: ToolName = "auto", reasoning_parser: ReasoningName = "auto"
    ) -> None:
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._last: tuple[str, Dialect] | None = None

    def of(self, template: ChatTemplate) -> Dialect:
        """Return the dialect of the model of a template."""
        if self._last is None or self._last[0] != template.fingerprint:
            found = find_dialect(
                template, tool_parser=self._tool_parser, reasoning_parser=self._reasoning_parser
            )
            self._last = template.fingerprint, found
            _log.info(
                "calls of tools are read as %s, reasoning as %s",
                found.calls_name,
                found.thought_name,
            )
        return self._last[1]
