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
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from paceline import Grammar
from paceline_contract.limits import MOST_GRAMMAR_BYTES
from paceline_gateway.dialects import harmony
from paceline_gateway.dialects.enforceable import enforceable
from paceline_gateway.dialects.family import TEXT_MARK, Hole, Maybe, Shape, Tags
from paceline_gateway.dialects.reasoning import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline_gateway.conversations.conversation import Tool
    from paceline_gateway.dialects.family import Family, Piece
    from paceline_gateway.dialects.reasoning import Reasoning

# As the engine's for a whole schema: one blank after a colon and a comma.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# Keywords by which a schema allows, or may allow, properties that it does not list.
_ABOUT_OTHERS = frozenset(
    {
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    }
)
_BARE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_ANY_TEXT = "/(?s:.*)/"
_MOST_THOUGHT = (1 << 31) - 1  # as llguidance counts; no context is as long


class TooLargeError(Exception):
    """A grammar has more bytes than servers take."""


class UnenforceableError(Exception):
    """A tool is strict, and its family has no grammar of arguments."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that are found in a text as a whole.

    Attributes:
        ids: Their ids, by their texts: of those that no other tokens may spell in a grammar.
    """

    ids: Mapping[str, int]

    @classmethod
    def of(cls, added: Mapping[str, int], special: Iterable[str]) -> Tokens:
        """Choose those that count: llguidance takes special ones, and those in angle brackets."""
        known = frozenset(special)
        marked = {
            text: each
            for text, each in added.items()
            if text in known or (text.startswith("<") and text.endswith(">"))
        }
        return cls(marked)

    @property
    def ranges(self) -> str:
        """Their ids in llguidance's form: 3-5,9."""
        written: list[str] = []
        for _, run in groupby(enumerate(sorted(self.ids.values())), lambda it: it[1] - it[0]):
            ids = [each for _, each in run]
            written.append(f"{ids[0]}-{ids[-1]}" if len(ids) > 1 else f"{ids[0]}")
        return ",".join(written)

    def literal(self, text: str) -> str:
        """Write a text: tokens in it as tokens."""
        names = [it for it in self.ids if it in text]
        if not names:
            return json.dumps(text, ensure_ascii=False) if text else '""'
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        pieces = [it for it in re.split(f"({pattern})", text) if it]
        return " ".join(
            f"<[{self.ids[it]}]>" if it in self.ids else json.dumps(it, ensure_ascii=False)
            for it in pieces
        )


class AnswerGrammar:
    """Writes the grammar of one answer.

    Args:
        tokens: The model's tokens.
        follows_schemas: Whether schemas of tools count that are not strict.
        most_thought: Most tokens of reasoning before its end mark; None: any number. The mark has
            to be a token.
    """

    def __init__(
        self, tokens: Tokens, *, follows_schemas: bool = True, most_thought: int | None = None
    ) -> None:
        self._tokens = tokens
        self._follows_schemas = follows_schemas
        self._most_thought = most_thought
        self._rules: list[str] = []

    @property
    def limits_thought(self) -> bool:
        """Whether reasoning may only have so many tokens."""
        return self._most_thought is not None

    def written(self, start: str) -> Grammar:
        """Return the grammar that begins with a rule.

        Raises:
            TooLargeError: It has too many bytes.
        """
        text = "\n".join([f"start: {start}", *self._rules, ""])
        if len(text.encode()) > MOST_GRAMMAR_BYTES:
            raise TooLargeError
        return Grammar(lark=text)

    def after_reasoning(self, start: str, reasoning: Reasoning | None, stage: Stage) -> str:
        """Allow the reasoning before a rule, as the prompt's end demands."""
        if reasoning is None or stage is Stage.ANSWER:
            return start
        self._rules.append(f"thought: {self._thought(reasoning.close)} SPACE")
        self._rules.append(r"SPACE: /\s{0,4}/")
        if stage is Stage.REASONING:
            return f"thought ({start})"
        return f"(SPACE {self._tokens.literal(reasoning.open)} thought)? ({start})"

    def anything_after(self, reasoning: Reasoning) -> str:
        """Write any tokens after a model's reasoning, which does not begin again."""
        return f"<[^{self._tokens.ids[reasoning.open]}]>*"

    def json(self, schema: Mapping[str, Any]) -> str:
        """Write a rule for a JSON value."""
        return f"%json {_json({'x-guidance': _SPACES, **schema})}"

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
            self._rules.append(f"call_{index}: {call}")
        self._rules.append(f"call: {' | '.join(f'call_{it}' for it in range(len(tools)))}")
        begin, end = (self._pieces(it) for it in (family.begin, family.end))
        if family.begin:
            begin = f"{opening} {self._pieces(family.begin[1:])}"
        # Where calls are in text, more text may be between them.
        repeats = several and not (after_text and is_first and not family.starts_answer)
        more = f" ({self._tokens.literal(family.separator)} call)*" if repeats else ""
        self._rules.append(f"calls: {begin} call{more} {end}")
        if not after_text:
            return "calls"
        if family.starts_answer:
            firsts = "".join(sorted(self._first_letters((*family.begin, *family.call))))
            self._rules.append(rf"PLAIN: /(\s*[^\s{re.escape(firsts)}](?s:.*))?/")
            return "(calls | PLAIN)"
        times = "*" if several else "?"
        self._rules.append(f"TEXT: {self._without(family.opening)}")
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
            self._rules.append(f"BEFORE: /(?s:.*){_escaped(before)}/")
            return f"BEFORE {self._tokens.literal(token + after)}"
        self._rules.append(f"opened[lazy]: /(?s:.*){_escaped(family.opening)}/")
        return "opened"

    def harmony_calls(self, tools: Sequence[Tool], *, other: str | None) -> str:
        """Write rules for one call in the dialect of gpt-oss, after what it thinks.

        Args:
            tools: The tools that may be called.
            other: What a final message may be instead of a call; None: there must be a call.
        """
        bodies = []
        for tool in tools:
            head = f"{harmony.CHANNEL}commentary to=functions.{tool.name} "
            head += f"{harmony.CONSTRAIN}json{harmony.MESSAGE}"
            bodies.append(f"{self._tokens.literal(head)} {self.json(self._schema(tool))}")
        self._rules.append(f"call: {' | '.join(bodies)}")
        if other is None:
            return f"{self._harmony_thought()} call"
        if other == "TEXT":
            self._rules.append(f"TEXT: {_ANY_TEXT}")
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
        self._rules.append(f"thought: {begin} {end} {again}")
        return "thought?"

    def _call(self, family: Family, tool: Tool, *, opening: str | None) -> str:
        """Write a call; its first piece may be written already."""
        written = [] if opening is None else [opening]
        for piece in family.call if opening is None else family.call[1:]:
            if piece is Hole.NAME:
                name = f"functions.{tool.name}:" if family.is_numbered else tool.name
                written += [self._tokens.literal(name), "/[0-9]+/" if family.is_numbered else ""]
            elif piece is Hole.ARGUMENTS:
                written.append(self._arguments(family, tool))
            else:
                written.append(self._pieces((piece,)))
        return " ".join(filter(None, written))

    def _arguments(self, family: Family, tool: Tool) -> str:
        if isinstance(family.arguments, Tags):
            return self._tagged(family.arguments, tool)
        if family.arguments is not Shape.JSON:
            if tool.strict:
                raise UnenforceableError
            return self._python(tool) if family.arguments is Shape.PYTHON else self._bare(tool)
        return self.json(self._schema(tool))

    def _tagged(self, tags: Tags, tool: Tool) -> str:
        """Write pairs in the order of the schema; those that it does not demand may be missing."""
        schema = tool.parameters or {}
        properties = schema.get("properties")
        required = schema.get("required") or ()
        literal = self._tokens.literal
        written = []
        for name, about in (properties if isinstance(properties, dict) else {}).items():
            head, opening = f"{tags.key_open}{name}{tags.key_close}", tags.value_open
            texts = _texts_of(about)
            if texts:
                alternatives = " | ".join(literal(f"{it}{tags.value_close}") for it in texts)
                value = f"({alternatives})"
            elif isinstance(about, dict) and about.get("type") not in (None, "string", ["string"]):
                defs = {it: schema[it] for it in ("$defs", "definitions") if it in schema}
                value = f"{self.json({**defs, **about})} {literal(tags.value_close)}"
                opening = tags.json_open or opening
            else:
                value = self._up_to(tags.value_close, "VALUE")
            pair = f"{literal(head + opening)} {value}"
            written.append(pair if name in required else f"({pair})?")
        return " ".join(written)

    def _python(self, tool: Tool) -> str:
        """Write keyword arguments whose values are literals of Python."""
        if not any(it.startswith("literal:") for it in self._rules):
            self._rules += [
                'literal: STRING | NUMBER | "True" | "False" | "None" | list | dict',
                'list: "[" (literal (", " literal)*)? "]"',
                'dict: "{" (STRING ": " literal (", " STRING ": " literal)*)? "}"',
                r'STRING: /"([^"\\\n]|\\.)*"/',
                r"NUMBER: /-?[0-9]+(\.[0-9]+)?/",
            ]
        properties = (tool.parameters or {}).get("properties")
        names = (
            [it for it in properties if it.isidentifier()] if isinstance(properties, dict) else []
        )
        if not names:
            return '""'
        keys = " | ".join(json.dumps(f"{it}=") for it in names)
        return f'(({keys}) literal (", " ({keys}) literal)*)?'

    def _bare(self, tool: Tool) -> str:
        """Write pairs of bare keys and values, whose texts stand between marks."""
        if not any(it.startswith("value:") for it in self._rules):
            self._rules += [
                'value: text | NUMBER | "true" | "false" | "null" | list | dict',
                f"text: {self._tokens.literal(TEXT_MARK)} {self._up_to(TEXT_MARK, 'QUOTED')}",
                'list: "[" (value ("," value)*)? "]"',
                'dict: "{" (KEY ":" value ("," KEY ":" value)*)? "}"',
                r"KEY: /[A-Za-z_][A-Za-z0-9_\-]*/",
                r"NUMBER: /-?[0-9]+(\.[0-9]+)?/",
            ]
        properties = (tool.parameters or {}).get("properties")
        known = properties if isinstance(properties, dict) else {}
        names = [it for it in known if _BARE_NAME.fullmatch(it)]
        if not names:
            return '""'
        keys = " | ".join(json.dumps(f"{it}:") for it in names)
        return f'(({keys}) value ("," ({keys}) value)*)?'

    def _schema(self, tool: Tool) -> Mapping[str, Any]:
        """Return the schema that arguments have to follow."""
        wanted = tool.parameters
        if wanted is None or tool.strict is False:
            return _ANY_OBJECT
        if tool.strict is None:
            wanted = enforceable(wanted) if self._follows_schemas else None
        schema = _ANY_OBJECT | dict(wanted or {})
        if schema.keys() & {"properties"} and not schema.keys() & _ABOUT_OTHERS:
            schema["additionalProperties"] = False  # a function has no other arguments
        return schema

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
            return self._up_to(mark, "THOUGHT")
        most = min(self._most_thought, _MOST_THOUGHT)
        ordinary = f"<[^{self._tokens.ranges}]>{{0,{most}}} " if most else ""
        return ordinary + self._tokens.literal(mark)

    def _up_to(self, mark: str, name: str) -> str:
        """Write any text up to a mark, and the mark."""
        text = mark.strip()
        if text in self._tokens.ids:
            self._define(f"{name}: {self._without(text)}")
            return f"{name} {self._tokens.literal(mark)}"
        rule = f"{name.lower()}_end"
        self._define(f"{rule}[lazy]: /(?s:.*){_escaped(mark)}/")
        return rule

    def _without(self, mark: str) -> str:
        """Write any text without a mark in it."""
        return f"{_ANY_TEXT} & ~/(?s:.*){_escaped(mark)}(?s:.*)/"

    def _define(self, rule: str) -> None:
        if rule not in self._rules:
            self._rules.append(rule)


def format_rule(grammar: AnswerGrammar, wanted: Grammar) -> str | None:
    """Return a rule for a format that stands behind reasoning; None for a grammar of its own."""
    if wanted.json_schema is not None:
        schema = wanted.json_schema
        return grammar.json(json.loads(schema) if isinstance(schema, str) else schema)
    if wanted.choices is not None:
        return " | ".join(json.dumps(it, ensure_ascii=False) for it in wanted.choices)
    if wanted.regex is not None:
        return f"/{_slashed(wanted.regex)}/"
    return None


def _texts_of(about: Any) -> list[str]:
    """Return the only texts that a value may be; none if it may be others."""
    if not isinstance(about, dict):
        return []
    texts = about.get("enum", [about["const"]] if "const" in about else [])
    is_listed = isinstance(texts, list) and all(isinstance(it, str) for it in texts)
    return texts if is_listed else []


def _json(value: Mapping[str, Any]) -> str:
    """Write JSON in one line."""
    return json.dumps(value, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Write a text in a regular expression between slashes."""
    return _slashed(re.escape(text).replace("\\\n", "\\n").replace("\n", "\\n"))


def _slashed(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
