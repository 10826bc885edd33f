"""The types of requests' parameters, with their error messages."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeGuard

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo

from paceline import FillIn, Grammar, PromptPart
from paceline_contract.limits import MOST_BIAS, MOST_BIASED_TOKENS, MOST_GRAMMAR_BYTES
from paceline_contract.sampling import SAMPLING_INTERVALS
from paceline_gateway.bodies.fields import problem, unsupported
from paceline_gateway.bodies.lenient_schemas import is_within, lenient
from paceline_gateway.bodies.schema_notes import without_notes

if TYPE_CHECKING:
    from collections.abc import Collection

    from paceline.generation import ChosenWord

MOST_UINT32 = (1 << 32) - 1
"""The range of a number on the wire."""

ANY_OBJECT = Grammar(json_schema={"type": "object"})

_TEXTS = frozenset({"text", "input_text", "output_text"})
_MOST_KIND = 100
_TOKEN_ID = re.compile(r"[0-9]{1,10}")

Prompt: TypeAlias = str | list[int] | list[PromptPart] | FillIn


def only(*allowed: object) -> PlainValidator:
    """Accept the values that change nothing; refuse others as not supported."""

    def check(value: object) -> object:
        if not any(type(value) is type(each) and value == each for each in allowed):
            words = ", ".join(map(json.dumps, allowed))
            raise unsupported("is not supported; the accepted value is {words}", words=words)
        return value

    return PlainValidator(check)


def within(name: str) -> Any:
    """Accept what a sampling parameter may be."""
    interval = SAMPLING_INTERVALS[name]
    least, most = interval.least, interval.most
    return Field(gt=least, le=most) if interval.is_open else Field(ge=least, le=most)


def one_of(*words: str) -> AfterValidator:
    """Accept one of some words."""

    def check(value: str) -> str:
        if value not in words:
            raise problem("must be one of {words}", words=", ".join(words))
        return value

    return AfterValidator(check)


def word_of(words: type[ChosenWord]) -> AfterValidator:
    """Accept a word of the clients, or its short form, and return it as the clients' value."""

    def check(value: str) -> str:
        if (member := words.accepted().get(value)) is None:
            raise problem("must be one of {words}", words=words.told())
        return member.value

    return AfterValidator(check)


def _prompts(value: object) -> list[str | list[int]]:
    """Turn OpenAI's four forms of a prompt into a list of prompts."""
    if _is_prompt(value):
        return [value]
    if isinstance(value, list) and value and all(map(_is_prompt, value)):
        return value
    raise problem("must be text, a list of texts, a list of token ids, or a list of such lists")


def _is_prompt(value: object) -> TypeGuard[str | list[int]]:
    if isinstance(value, list):
        return bool(value) and all(type(it) is int and 0 <= it <= MOST_UINT32 for it in value)
    return isinstance(value, str)


def _stop(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(it, str) for it in value):
        return value
    raise problem("must be text or a list of texts")


def _biases(value: object) -> dict[int, float]:
    """Turn OpenAI's biases, whose token ids are texts, into numbers."""
    fault = problem(
        "must be an object of at most {most} token ids, each with a number in [-{limit}, {limit}]",
        most=MOST_BIASED_TOKENS,
        limit=f"{MOST_BIAS:g}",
    )
    if not isinstance(value, dict) or len(value) > MOST_BIASED_TOKENS:
        raise fault
    for token, bias in value.items():
        is_number = type(bias) in {int, float} and -MOST_BIAS <= bias <= MOST_BIAS
        if not (_TOKEN_ID.fullmatch(token) and int(token) <= MOST_UINT32 and is_number):
            raise fault
    return {int(token): float(bias) for token, bias in value.items()}


def schema_grammar(
    schema: dict[str, Any] | str, place: str, left_out: list[str] | None, *, wanted: object
) -> Grammar:
    """Make a grammar of a JSON schema; where it is to be lenient, without what cannot be enforced.

    Args:
        place: The place of the schema in the body.
        left_out: Takes the places of what is left out.
        wanted: What the request says as `lenient`; None: nothing.
    """
    if not isinstance(wanted, bool | None):
        raise problem("must have true or false as lenient")
    bare = schema if isinstance(schema, str) else without_notes(schema)
    if not is_within(bare, MOST_GRAMMAR_BYTES):
        raise problem("has a schema of more than {most} bytes", most=MOST_GRAMMAR_BYTES)
    try:
        whole = json.loads(bare) if isinstance(bare, str) else bare
    except (ValueError, RecursionError) as error:
        raise problem("has a schema that is not JSON") from error
    if not wanted:
        return Grammar(json_schema=schema)  # as it was sent, because a response repeats it
    kept, places = lenient(whole)
    if left_out is not None:
        left_out += [f"{place}{it}" for it in places]
    return Grammar(json_schema=kept)


def _response_format(
    value: object, info: ValidationInfo, *, name: str = "response_format"
) -> Grammar | None:
    """Turn OpenAI's form of an answer's format into a grammar; None: plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise problem("must be an object with the type text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return ANY_OBJECT
    # Chat has the schema one level deeper than responses.
    about = value.get("json_schema", value)
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, dict):
        raise problem("must have a schema, which is an object")
    place = f"{name}.json_schema.schema" if "json_schema" in value else f"{name}.schema"
    return schema_grammar(schema, place, info.context, wanted=about.get("lenient", False))


def _structured_outputs(value: object, info: ValidationInfo) -> Grammar:
    """Turn vLLM's structured outputs into a grammar."""
    fault = problem(
        "must be an object with one of json (a schema), json_object (true), regex (text),"
        " grammar (Lark or GBNF, as text) and choice (a list of texts); json may have lenient"
        " beside it",
    )
    if not isinstance(value, dict):
        raise fault
    is_json = value.get("json") is not None
    named = {
        name: it
        for name, it in value.items()
        if it is not None and not (is_json and name == "lenient")
    }
    if len(named) != 1:
        raise fault
    ((name, given),) = named.items()
    match name, given:
        case "json", dict() | str():
            return schema_grammar(
                given, "structured_outputs.json", info.context, wanted=value.get("lenient", False)
            )
        case "json_object", True:
            return ANY_OBJECT
        case "regex", str():
            return Grammar(regex=given)
        case "grammar", str():
            return Grammar(lark=given)
        case "choice", [str(), *_] if all(isinstance(it, str) for it in given):
            return Grammar(choices=given)
    raise fault


def texts_of(value: object, *, kinds: Collection[str]) -> str | tuple[str, ...]:
    """Return a text, or the texts of parts of some kinds; parts such as images are refused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise problem("must be text or a list of parts")
    texts = []
    for index, part in enumerate(value):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in kinds:
                texts.append(text)
            case {"type": str(kind)} if kind not in kinds:
                raise unsupported(
                    "has a part ([{index}]) of the kind {kind}, which is not supported",
                    index=index,
                    kind=json.dumps(kind[:_MOST_KIND]),
                )
            case _:
                raise problem("has a part ([{index}]) that is not text", index=index)
    return tuple(texts)


def _prediction(value: object) -> str:
    """Return the text of a predicted output."""
    match value:
        case {"type": "content", "content": str(text), **more} if not more:
            return text
        case {"type": "content", "content": list(parts), **more} if not more:
            texts = [_predicted_text(part) for part in parts]
            if None not in texts:
                return "".join(filter(None, texts))
    raise problem("must be an object with the type content, and a content of text or text parts")


def _predicted_text(part: object) -> str | None:
    match part:
        case {"type": "text", "text": str(text), **more} if not more:
            return text
    return None


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Effort: TypeAlias = Annotated[str, one_of(*_EFFORTS)]
Prediction: TypeAlias = Annotated[str, PlainValidator(_prediction)]
Prompts: TypeAlias = Annotated[list[str | list[int]], PlainValidator(_prompts)]
Stops: TypeAlias = Annotated[list[str], PlainValidator(_stop)]
Content: TypeAlias = Annotated[
    str | tuple[str, ...], PlainValidator(partial(texts_of, kinds=_TEXTS))
]

FalseOnly: TypeAlias = Annotated[object, only(False)]
NoList: TypeAlias = Annotated[object, only([])]
NoText: TypeAlias = Annotated[object, only("")]
ResponseFormat: TypeAlias = Annotated[Grammar | None, PlainValidator(_response_format)]
TextFormat: TypeAlias = Annotated[
    Grammar | None, PlainValidator(partial(_response_format, name="text.format"))
]
StructuredOutputs: TypeAlias = Annotated[Grammar, PlainValidator(_structured_outputs)]

Biases: TypeAlias = Annotated[dict[int, float], PlainValidator(_biases)]
