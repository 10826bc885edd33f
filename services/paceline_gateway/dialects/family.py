"""How the families of models write calls: one record each, from which grammar and parser follow.

A call is a row of pieces: texts that are always the same, the tool's name, the arguments. The
grammar (`grammar`) writes the pieces as they stand here. The parser (`call_parser`) reads them with
any space between, since models are not as exact.

    hermes   <tool_call> NL {"name": " NAME ", "arguments": ARGUMENTS } NL </tool_call>
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Hole(Enum):
    """What differs from call to call."""

    NAME = auto()
    ARGUMENTS = auto()


@dataclass(frozen=True, slots=True)
class Maybe:
    """A text that a model may leave out.

    Attributes:
        text: The text.
        is_usual: Whether the grammar writes it.
    """

    text: str
    is_usual: bool


Piece: TypeAlias = str | Maybe | Hole


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments as pairs of keys and values, which are plain text if the schema says string.

    Attributes:
        json_open: What is before a value that is JSON, if the marks tell texts from others;
            `value_open` is then before a text.
    """

    key_open: str
    key_close: str
    value_open: str
    value_close: str
    json_open: str = ""


class Shape(Enum):
    """How arguments are written, where they are no pairs in tags."""

    JSON = auto()
    PYTHON = auto()
    BARE = auto()
    """As in JSON, but keys are bare, and texts stand between two of `TEXT_MARK`, as they are."""


TEXT_MARK = '<|"|>'
BARE_END = "<tool_call|>"


def _new_id(_index: int, _name: str) -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id(_index: int, _name: str) -> str:
    """Nine letters and digits: some templates take no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def _numbered_id(index: int, name: str) -> str:
    return f"functions.{name}:{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How a family of models writes calls.

    Attributes:
        name: The name in settings.
        signs: Texts that are all in a template of the family.
        call: A call. The first piece is what tells that one begins.
        begin: What is before the first call.
        separator: What is between two calls.
        end: What is behind the last call.
        arguments: The form of arguments.
        starts_answer: Whether calls are only where an answer starts, as nothing marks them.
        is_numbered: Whether a call's name has its number: functions.NAME:NUMBER.
        new_id: Makes the id of a call, from its number and its name.
    """

    name: str
    signs: tuple[str, ...]
    call: tuple[Piece, ...]
    begin: tuple[Piece, ...] = ()
    separator: str = ""
    end: tuple[Piece, ...] = ()
    arguments: Shape | Tags = Shape.JSON
    starts_answer: bool = False
    is_numbered: bool = False
    new_id: Callable[[int, str], str] = _new_id

    @property
    def opening(self) -> str:
        """The text that tells that calls begin."""
        first = (*self.begin, *self.call)[0]
        return first if isinstance(first, str) else ""

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object, with its name and its arguments in it."""
        return any(isinstance(it, str) and it.strip().startswith('{"name"') for it in self.call)

    def texts(self) -> Iterator[str]:
        """Yield every text that always is the same."""
        for piece in (*self.begin, *self.call, *self.end):
            if isinstance(piece, str):
                yield piece
            elif isinstance(piece, Maybe):
                yield piece.text
        if isinstance(self.arguments, Tags):
            tags = self.arguments
            yield from (tags.key_open, tags.key_close, tags.value_open, tags.value_close)
            yield tags.json_open
        elif self.arguments is Shape.BARE:
            yield TEXT_MARK


def _deepseek(words: str) -> str:
    """Write a mark as DeepSeek does: with a wide bar, and low blocks for spaces."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


NAME, ARGUMENTS = Hole.NAME, Hole.ARGUMENTS
_OBJECT: tuple[Piece, ...] = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")

FAMILIES = (
    Family(
        name="kimi_k2",
        signs=("<|tool_calls_section_begin|>",),
        begin=("<|tool_calls_section_begin|>",),
        call=(
            "<|tool_call_begin|>",
            NAME,
            "<|tool_call_argument_begin|>",
            ARGUMENTS,
            "<|tool_call_end|>",
        ),
        end=("<|tool_calls_section_end|>",),
        is_numbered=True,
        new_id=_numbered_id,
    ),
    Family(
        name="gemma4",
        signs=("<|tool_call>", "<tool_call|>"),
        call=("<|tool_call>", "call:", NAME, "{", ARGUMENTS, "}", BARE_END),
        arguments=Shape.BARE,
    ),
    Family(
        name="deepseek_v3",
        signs=(_deepseek("tool calls begin"), "```json"),
        begin=(_deepseek("tool calls begin"),),
        call=(
            _deepseek("tool call begin"),
            "function",
            _deepseek("tool sep"),
            NAME,
            "\n```json\n",
            ARGUMENTS,
            "\n```",
            _deepseek("tool call end"),
        ),
        separator="\n",
        end=(_deepseek("tool calls end"),),
    ),
    Family(
        name="deepseek_v31",
        signs=(_deepseek("tool calls begin"),),
        begin=(_deepseek("tool calls begin"),),
        call=(
            _deepseek("tool call begin"),
            NAME,
            _deepseek("tool sep"),
            ARGUMENTS,
            _deepseek("tool call end"),
        ),
        end=(_deepseek("tool calls end"),),
    ),
    Family(
        name="deepseek_v32",
        signs=("\uff5cDSML\uff5c",),
        begin=("<\uff5cDSML\uff5cfunction_calls>",),
        call=(
            '\n<\uff5cDSML\uff5cinvoke name="',
            NAME,
            '">\n',
            ARGUMENTS,
            "</\uff5cDSML\uff5cinvoke>",
        ),
        end=("\n</\uff5cDSML\uff5cfunction_calls>",),
        arguments=Tags(
            '<\uff5cDSML\uff5cparameter name="',
            '"',
            ' string="true">',
            "</\uff5cDSML\uff5cparameter>\n",
            ' string="false">',
        ),
    ),
    Family(
        name="glm45",
        signs=("<tool_call>", "<arg_key>"),
        call=("<tool_call>", NAME, "\n", ARGUMENTS, "</tool_call>"),
        separator="\n",
        arguments=Tags("<arg_key>", "</arg_key>\n", "<arg_value>", "</arg_value>\n"),
    ),
    Family(
        name="qwen3_coder",
        signs=("<function=", "<parameter="),
        call=(
            "<tool_call>",
            "\n<function=",
            NAME,
            ">\n",
            ARGUMENTS,
            "</function>\n",
            "</tool_call>",
        ),
        separator="\n",
        arguments=Tags("<parameter=", ">\n", "", "\n</parameter>\n"),
    ),
    Family(
        name="hermes",
        signs=("<tool_call>",),
        call=(
            "<tool_call>",
            '\n{"name": "',
            NAME,
            '", "arguments": ',
            ARGUMENTS,
            "}",
            "\n",
            "</tool_call>",
        ),
        separator="\n",
    ),
    Family(
        name="mistral",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        call=("[TOOL_CALLS]", NAME, Maybe("[ARGS]", is_usual=True), ARGUMENTS),
        new_id=_short_id,
    ),
    Family(
        name="mistral_list",
        signs=("[TOOL_CALLS]",),
        begin=("[TOOL_CALLS]", "["),
        call=_OBJECT,
        separator=", ",
        end=("]",),
        new_id=_short_id,
    ),
    Family(
        name="llama3_json",
        signs=("ipython", '"parameters"'),
        call=(
            Maybe("<|python_tag|>", is_usual=False),
            '{"name": "',
            NAME,
            '", "parameters": ',
            ARGUMENTS,
            "}",
        ),
        separator="; ",
        starts_answer=True,
    ),
    Family(
        name="pythonic",
        signs=("func_name1(",),
        begin=("[",),
        call=(NAME, "(", ARGUMENTS, ")"),
        separator=", ",
        end=("]",),
        arguments=Shape.PYTHON,
        starts_answer=True,
    ),
)
"""The families, from the one with the most particular signs to the one with the fewest."""


def find_family(template: str) -> Family | None:
    """Return the family of a chat template; None if it is of none of them."""
    return next((it for it in FAMILIES if all(sign in template for sign in it.signs)), None)
