"""Grammars of answers: a call that is demanded, calls that must be right, a format after reasoning.

A grammar is written in llguidance's form of Lark, from the same records of families that parsers
read by (`family`):

    start: thought? calls           thought: OPEN TEXT CLOSE
    calls: call (SEPARATOR call)*   call: call_0 | call_1 …
    call_0: <[151657]> "{'name': 'weather', 'arguments': " %json {…} "}" <[151658]>

A mark that is a token of its own is written as that token, `<[id]>`: spelled with other tokens it
would look alike, and be what the model was never taught. Where marks are only text, what may stand
before one is a text that ends with it.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from paceline_gateway.dialects import harmony
from paceline_gateway.dialects.argument_rules import argument_rule, schema_of
from paceline_gateway.dialects.family import Hole, Maybe
from paceline_gateway.dialects.grammar_rules import ANY_TEXT, Rules, escaped, slashed
from paceline_gateway.dialects.reasoning import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paceline import Grammar
    from paceline_gateway.conversations.conversation import Tool
    from paceline_gateway.dialects.family import Family, Piece
    from paceline_gateway.dialects.grammar_rules import Tokens
    from paceline_gateway.dialects.reasoning import Reasoning

_MOST_THOUGHT = (1 << 31) - 1  # as llguidance counts; no context is as long


class AnswerGrammar:
    """Writes the grammar of one answer.

    Args:
        tokens: The model's tokens.
        follows_schemas: Whether schemas of tools count that are not strict.
        most_thought: Most tokens of reasoning before its end mark; None: any number. The mark has
            to be a token.

    Attributes:
        rules: What is written so far.
    """

    def __init__(
        self, tokens: Tokens, *, follows_schemas: bool = True, most_thought: int | None = None
    ) -> None:
        self._tokens = tokens
        self.rules = Rules(tokens)
        self._follows_schemas = follows_schemas
        self._most_thought = most_thought

    @property
    def limits_thought(self) -> bool:
        """Whether reasoning may only have so many tokens."""
        return self._most_thought is not None

    def after_reasoning(self, start: str, reasoning: Reasoning | None, stage: Stage) -> str:
        """Allow the reasoning before a rule, as the prompt's end demands."""
        if reasoning is None or stage is Stage.ANSWER:
            return start
        self.rules.add(f"thought: {self._thought(reasoning.close)} SPACE")
        self.rules.add(r"SPACE: /\s{0,4}/")
        if stage is Stage.REASONING:
            return f"thought ({start})"
        return f"(SPACE {self._tokens.literal(reasoning.open)} thought)? ({start})"

    def anything_after(self, reasoning: Reasoning) -> str:
        """Write any tokens after a model's reasoning, which does not begin again."""
        return f"<[^{self._tokens.ids[reasoning.open]}]>*"

    def calls(
        self, family: Family, tools: Sequence[Tool], *, several: bool, after_text: bool = False
    ) -> str:
        """Write rules for calls.

        Args:
            family: How the model writes them.
            tools: The tools that may be called.
            several: Whether there may be more than one.
            after_text: Whether any text may be before them, and behind.
        """
        opening = self._opening(family, after_text=after_text)
        is_first = not family.begin  # whether a call has the opening, and not what is before all
        for index, tool in enumerate(tools):
            call = self._call(family, tool, opening=opening if is_first else None)
            self.rules.add(f"call_{index}: {call}")
        self.rules.add(_any_call(tools))
        begin, end = (self._pieces(it) for it in (family.begin, family.end))
        if family.begin:
            begin = f"{opening} {self._pieces(family.begin[1:])}"
        # Where calls are in text, more text may be between them.
        repeats = several and not (after_text and is_first and not family.starts_answer)
        more = f" ({self._tokens.literal(family.separator)} call)*" if repeats else ""
        self.rules.add(f"calls: {begin} call{more} {end}")
        if not after_text:
            return "calls"
        if family.starts_answer:
            firsts = "".join(sorted(self._first_letters((*family.begin, *family.call))))
            self.rules.add(rf"PLAIN: /(\s*[^\s{re.escape(firsts)}](?s:.*))?/")
            return "(calls | PLAIN)"
        times = "*" if several else "?"
        self.rules.add(f"TEXT: {self.rules.without(family.opening)}")
        return f"TEXT (calls TEXT){times}" if self._is_token(family) else f"calls{times} TEXT"

    def _first_letters(self, pieces: Iterable[Piece]) -> Iterator[str]:
        """Yield the letters with which pieces may begin; a token of its own has none."""
        for piece in pieces:
            if isinstance(piece, Maybe):
                if piece.text not in self._tokens.ids:
                    yield piece.text[0]
            else:
                yield str(piece)[0]
                return

    def _is_token(self, family: Family) -> bool:
        return family.opening in self._tokens.ids

    def _opening(self, family: Family, *, after_text: bool) -> str:
        """Write what calls begin with; where it is only text, with the text before it."""
        if not after_text or family.starts_answer or self._is_token(family):
            return self._pieces((*family.begin, *family.call)[:1])
        token = next((it for it in self._tokens.ids if it in family.opening), None)
        if token is not None:  # no text has it, so only what is before it has to be there
            before, _, after = family.opening.partition(token)
            self.rules.add(f"BEFORE: /(?s:.*){escaped(before)}/")
            return f"BEFORE {self._tokens.literal(token + after)}"
        self.rules.add(f"opened[lazy]: /(?s:.*){escaped(family.opening)}/")
        return "opened"

    def harmony_calls(self, tools: Sequence[Tool], *, other: str | None) -> str:
        """Write rules for one call in the dialect of gpt-oss, after what it thinks.

        Args:
            tools: The tools that may be called.
            other: What a final message may be instead of a call; None: there must be a call.
        """
        for index, tool in enumerate(tools):
            head = f"{harmony.CHANNEL}commentary to=functions.{tool.name} "
            head += f"{harmony.CONSTRAIN}json{harmony.MESSAGE}"
            schema = schema_of(tool, follows_schemas=self._follows_schemas)
            self.rules.add(f"call_{index}: {self._tokens.literal(head)} {self.rules.json(schema)}")
        self.rules.add(_any_call(tools))
        if other is None:
            return f"{self._harmony_thought()} call"
        if other == "TEXT":
            self.rules.add(f"TEXT: {ANY_TEXT}")
        return f"{self._harmony_thought()} (call | {self._harmony_final(other)})"

    def harmony_answer(self, rule: str) -> str:
        """Write a rule for a final message that follows another rule."""
        return f"{self._harmony_thought()} {self._harmony_final(rule)}"

    def _harmony_final(self, rule: str) -> str:
        head = self._tokens.literal(f"{harmony.CHANNEL}final{harmony.MESSAGE}")
        return f"{head} ({rule})"

    def _harmony_thought(self) -> str:
        literal = self._tokens.literal
        begin = literal(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}")
        end = self._thought(harmony.END)
        again = literal(f"{harmony.START}assistant")
        self.rules.add(f"thought: {begin} {end} {again}")
        return "thought?"

    def _call(self, family: Family, tool: Tool, *, opening: str | None) -> str:
        """Write a call; its first piece may be written already."""
        written = [] if opening is None else [opening]
        for piece in family.call if opening is None else family.call[1:]:
            if piece is Hole.NAME:
                name = f"functions.{tool.name}:" if family.is_numbered else tool.name
                written += [
                    self._tokens.literal(name),
                    "/[0-9]+/" if family.is_numbered else "",
                ]
            elif piece is Hole.ARGUMENTS:
                written.append(
                    argument_rule(self.rules, family, tool, follows_schemas=self._follows_schemas)
                )
            else:
                written.append(self._pieces((piece,)))
        return " ".join(filter(None, written))

    def _pieces(self, pieces: Iterable[Piece]) -> str:
        return " ".join(self._piece(it) for it in pieces if not isinstance(it, Hole))

    def _piece(self, piece: Piece) -> str:
        """Write a text that is always the same; what is not usual may be missing."""
        if not isinstance(piece, Maybe):
            return self._tokens.literal(str(piece))
        literal = self._tokens.literal(piece.text)
        return literal if piece.is_usual else f"({literal})?"

    def _thought(self, mark: str) -> str:
        """Write what a model thinks up to a mark, and the mark."""
        if self._most_thought is None:
            return self.rules.up_to(mark, "THOUGHT")
        most = min(self._most_thought, _MOST_THOUGHT)
        ordinary = f"<[^{self._tokens.ranges}]>{{0,{most}}} " if most else ""
        return ordinary + self._tokens.literal(mark)


def _any_call(tools: Sequence[Tool]) -> str:
    """Write the rule of a call of any tool."""
    return f"call: {' | '.join(f'call_{it}' for it in range(len(tools)))}"


def format_rule(rules: Rules, wanted: Grammar) -> str | None:
    """Return a rule for a format that stands behind reasoning; None for a grammar of its own."""
    if wanted.json_schema is not None:
        schema = wanted.json_schema
        return rules.json(json.loads(schema) if isinstance(schema, str) else schema)
    if wanted.choices is not None:
        return " | ".join(json.dumps(it, ensure_ascii=False) for it in wanted.choices)
    if wanted.regex is not None:
        return f"/{slashed(wanted.regex)}/"
    return None
