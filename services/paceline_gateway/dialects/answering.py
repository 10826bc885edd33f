"""Plans an answer: the grammar that it follows, and what reads it, from the model's dialect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline_gateway.bodies.schema_notes import bare_grammar
from paceline_gateway.conversations.answer_parts import PlainReader
from paceline_gateway.dialects import harmony
from paceline_gateway.dialects.argument_rules import UnenforceableError
from paceline_gateway.dialects.call_parser import CallParser
from paceline_gateway.dialects.grammar import AnswerGrammar, format_rule
from paceline_gateway.dialects.grammar_rules import TooLargeError
from paceline_gateway.dialects.harmony import HarmonyParser
from paceline_gateway.dialects.reader import DialectReader, PartsParser
from paceline_gateway.dialects.reasoning import (
    ReasoningParser,
    Stage,
    stage_after,
)
from paceline_gateway.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paceline import Grammar, PromptPart
    from paceline_gateway.conversations.answer_parts import AnswerReader
    from paceline_gateway.conversations.conversation import Conversation
    from paceline_gateway.dialects.dialect import Dialect
    from paceline_gateway.dialects.reader import TextParser


@dataclass(frozen=True, slots=True)
class Plan:
    """How an answer is made and read.

    Attributes:
        grammar: What it follows, if anything.
        reason: The parameter from which the gateway made the grammar; None: the grammar is the
            request's own.
        new_reader: Makes what reads one choice.
        limits_thought: Whether the grammar has the limit of reasoning in it.
    """

    grammar: Grammar | None
    reason: str | None
    new_reader: Callable[[], AnswerReader]
    limits_thought: bool


def check_tools(conversation: Conversation, dialect: Dialect) -> None:
    """Refuse tools whose calls could not be read.

    Raises:
        RequestError: They could not.
    """
    if conversation.offered_tools and not dialect.takes_calls:
        raise RequestError(
            "tools: is not supported: how this model writes calls is not known here;"
            " --tool-parser of the gateway says it",
            param="tools",
            code="unsupported_parameter",
        )


def plan_answer(
    conversation: Conversation,
    dialect: Dialect,
    *,
    prompt: str | list[PromptPart],
    wanted: Grammar | None,
) -> Plan:
    """Plan an answer.

    Args:
        prompt: The rendered conversation.
        wanted: What the request says that the answer follows.

    Raises:
        RequestError: The request's tools and format do not go together, or are too large.
    """
    check_tools(conversation, dialect)
    wanted = bare_grammar(wanted)
    if conversation.continues_last:
        _check_continued(conversation, dialect, wanted)
        dialect = replace(dialect, reasoning=None)  # which is before what is said already
    reads_calls = bool(conversation.offered_tools)
    if reads_calls and wanted is not None:
        _check_format(conversation, dialect, wanted)
    stage = Stage.ANSWER
    if dialect.reasoning is not None:
        stage = stage_after(_end_of(prompt), dialect.reasoning)
    is_of_tools = reads_calls and (wanted is None or conversation.tool_choice.mode == "required")
    most_thought = _most_thought(conversation, dialect, wanted)
    grammar = _grammar(conversation, dialect, wanted=wanted, stage=stage, most_thought=most_thought)
    is_free = grammar is not None and wanted is None and not _demands(conversation)

    def new_reader() -> AnswerReader:
        return _reader(conversation, dialect, stage)

    reason = "thinking_token_budget" if is_free else "tools" if is_of_tools else "response_format"
    return Plan(
        grammar,
        None if grammar is wanted else reason,
        new_reader,
        limits_thought=most_thought is not None and grammar is not wanted,
    )


def _most_thought(
    conversation: Conversation, dialect: Dialect, wanted: Grammar | None
) -> int | None:
    """Return how many tokens of reasoning a grammar has to allow at most; None: any number.

    Raises:
        RequestError: The limit has to hold, and no grammar can see where the reasoning ends.
    """
    most = conversation.most_thought
    marks = [harmony.END] if dialect.is_harmony else []
    if dialect.reasoning is not None:
        marks = [dialect.reasoning.open, dialect.reasoning.close]
    if most is None or not marks:
        return None
    is_free = wanted is None and not _demands(conversation)
    if all(it in dialect.tokens.ids for it in marks) and not (is_free and dialect.is_harmony):
        return most
    if not conversation.limits_free_thought:
        return None
    words = "whose reasoning may begin again" if dialect.is_harmony else "whose marks are no tokens"
    raise RequestError(
        f"thinking_token_budget: is not supported for this model, {words}",
        param="thinking_token_budget",
        code="unsupported_parameter",
    )


def _demands(conversation: Conversation) -> bool:
    """Whether tools alone constrain an answer."""
    choice = conversation.tool_choice
    return bool(conversation.callable_tools) and (
        choice.mode == "required"
        or choice.names is not None
        or any(it.strict for it in conversation.callable_tools)
    )


def _check_continued(conversation: Conversation, dialect: Dialect, wanted: Grammar | None) -> None:
    """Refuse to continue a text where its beginning would have to count as well.

    Raises:
        RequestError: What is demanded of the whole answer would be of its rest; or the model speaks
            in channels, and the rest would have none.
    """
    if wanted is not None or conversation.tool_choice.mode == "required":
        words = "beside a format or a demanded call, which would begin in the middle"
    elif dialect.is_harmony:
        words = "for this model, which answers in channels"
    else:
        return
    raise RequestError(
        f"messages: to continue the last message is not supported {words}",
        param="messages",
        code="unsupported_parameter",
    )


def _check_format(conversation: Conversation, dialect: Dialect, wanted: Grammar) -> None:
    """Refuse formats that cannot be told from calls, or not be combined with them.

    Raises:
        RequestError: The format is one of them.
    """
    if wanted.json_schema is None:
        name, words = "structured_outputs", "unless it is a JSON schema"
    elif (
        dialect.family is not None
        and dialect.family.starts_answer
        and conversation.tool_choice.mode == "auto"
    ):
        name, words = "response_format", "for this model, whose calls nothing marks"
    else:
        return
    raise RequestError(
        f"{name}: is not supported beside tools, {words}", param=name, code="unsupported_parameter"
    )


def _end_of(prompt: str | list[PromptPart]) -> str:
    """Return the end of a prompt as far as the template wrote it."""
    if isinstance(prompt, str):
        return prompt
    return prompt[-1].text if prompt and prompt[-1].parse_special_tokens else ""


def _reader(conversation: Conversation, dialect: Dialect, stage: Stage) -> AnswerReader:
    most_calls = None if conversation.parallel_tool_calls else 1
    tools = conversation.callable_tools
    parser: TextParser
    if dialect.is_harmony:
        parser = HarmonyParser(most_calls=most_calls)
        return DialectReader(parser, marks=dialect.marks, counts_reasoning=True)
    calls = reasoning = None
    if conversation.offered_tools and dialect.family is not None:
        is_demanded = conversation.tool_choice.mode == "required"
        calls = CallParser(dialect.family, tools, most_calls=most_calls, is_demanded=is_demanded)
    if dialect.reasoning is not None:
        reasoning = ReasoningParser(dialect.reasoning, stage)
    if calls is None and reasoning is None:
        return PlainReader()
    marks = dialect.marks
    if calls is None and dialect.reasoning is not None:  # what marks calls is not looked for
        own = (dialect.reasoning.open, dialect.reasoning.close)
        marks = {id_: text for id_, text in marks.items() if any(text in it for it in own)}
    parser = PartsParser(reasoning, calls)
    return DialectReader(parser, marks=marks, counts_reasoning=reasoning is not None)


def _grammar(
    conversation: Conversation,
    dialect: Dialect,
    *,
    wanted: Grammar | None,
    stage: Stage,
    most_thought: int | None,
) -> Grammar | None:
    for follows_schemas in (True, False):
        grammar = AnswerGrammar(
            dialect.tokens, follows_schemas=follows_schemas, most_thought=most_thought
        )
        try:
            return _written(grammar, conversation, dialect, wanted=wanted, stage=stage)
        except TooLargeError:
            continue  # schemas that are only told are left out
        except UnenforceableError:
            raise RequestError(
                "tools: strict is not supported: there is no grammar for how this model writes"
                " arguments",
                param="tools",
                code="unsupported_parameter",
            ) from None
    raise RequestError("tools: are too large together to be enforced", param="tools")


def _written(
    grammar: AnswerGrammar,
    conversation: Conversation,
    dialect: Dialect,
    *,
    wanted: Grammar | None,
    stage: Stage,
) -> Grammar | None:
    written = grammar.rules.written
    rule = format_rule(grammar.rules, wanted) if wanted is not None else None
    start = _calls_or(rule, grammar, conversation, dialect)
    if start is not None:
        if not dialect.is_harmony:
            start = grammar.after_reasoning(start, dialect.reasoning, stage)
        return written(start)
    if rule is None:
        is_limited = wanted is None and conversation.limits_free_thought
        if grammar.limits_thought and is_limited and dialect.reasoning is not None:
            anything = grammar.anything_after(dialect.reasoning)
            return written(grammar.after_reasoning(anything, dialect.reasoning, stage))
        return wanted
    if dialect.is_harmony:
        return written(grammar.harmony_answer(rule))
    if dialect.reasoning is None or stage is Stage.ANSWER:
        return wanted  # nothing stands before the format
    return written(grammar.after_reasoning(rule, dialect.reasoning, stage))


def _calls_or(
    rule: str | None, grammar: AnswerGrammar, conversation: Conversation, dialect: Dialect
) -> str | None:
    """Write the rule of an answer whose calls have to be right; None if none have to be."""
    tools, choice = conversation.callable_tools, conversation.tool_choice
    is_needed = choice.mode == "required"
    if not tools or not (rule or _demands(conversation)):
        return None
    several = conversation.parallel_tool_calls
    if dialect.is_harmony:
        return grammar.harmony_calls(tools, other=None if is_needed else rule or "TEXT")
    assert dialect.family is not None
    if is_needed:
        return grammar.calls(dialect.family, tools, several=several)
    if rule is not None:
        return f"({rule}) | {grammar.calls(dialect.family, tools, several=several)}"
    return grammar.calls(dialect.family, tools, several=several, after_text=True)


def unheard(options: Iterable[str], source: str) -> list[str]:
    """Return the names for a template of which it makes nothing, as it does not have them."""
    return [it for it in options if it not in source]
