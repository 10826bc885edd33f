"""`paceline generate`: continue a prompt, and stream the text."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - pydantic reads it
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from paceline import Chunk, Finished, GenerateOptions, Grammar, PromptChunk, Started
from paceline.errors import InvalidFieldError, PacelineError
from paceline.plain_files import read_plain_text
from paceline.request import DrafterName, StrategyName  # noqa: TC001 - pydantic reads them
from paceline_cli.connection import open_client
from paceline_cli.model_costs import ModelCosts  # noqa: TC001 - pydantic reads it
from paceline_cli.streamed_text import TextStream, statistics_line
from paceline_cli.timeline import write_timeline
from paceline_contract.limits import MOST_GRAMMAR_BYTES, MOST_MESSAGE_BYTES
from paceline_contract.words import counted
from paceline_local.options import CallerSettings, SvgFile, read_options
from paceline_serving.settings import OneOrMore, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline import AsyncGeneration

_EXAMPLES = """
paceline generate "def fibonacci(n):" --max-tokens 64
cat module.py | paceline generate -                     the prompt from standard input
paceline generate --file module.py --stop "class "
paceline generate "import " --temperature 0.8 --top-p 0.9 --seed 7
paceline generate "x = [" --strategy dsi --lookahead 5 --targets 2 --show-origins
paceline generate "x = [" --strategy dsi --width 4 --branches 4     corrections found ahead
paceline generate "x = [" --strategy si --drafter max-gram    without any drafter
paceline generate "x = [" --strategy si --dispatch blocks --model-costs small=0.03
paceline generate "x = [" --timeline request.svg        a picture of each server's work over time
paceline generate "Give me a point: " --schema point.json
paceline generate "x = [" --json | jq .text             one JSON object a line
"""


class _Sampling(CallerSettings):
    """Sampling."""

    temperature: float | None = Field(None, description="0 is greedy (the server's default)")
    top_k: int | None = Field(None, description="keep the k most likely tokens; 0 keeps all")
    top_p: float | None = Field(
        None, description="keep the fewest likeliest tokens whose probabilities add up to this"
    )
    min_p: float | None = Field(
        None,
        description="keep tokens with at least this fraction of the likeliest token's probability",
    )
    logit_bias: dict[int, float] | None = Field(
        None, description="numbers to add to the logits of token ids: '{\"42\": -100}'"
    )
    presence_penalty: float | None = Field(
        None, description="taken once from the logit of each token that the answer has"
    )
    frequency_penalty: float | None = Field(
        None, description="taken from it for each time that the answer has the token"
    )
    repetition_penalty: float | None = Field(
        None, description="above 1, tokens of prompt and answer become less likely"
    )
    min_tokens: int | None = Field(
        None, description="the text does not end by itself before it has so many tokens"
    )
    seed: int | None = Field(
        None, description="the same seed gives the same text; without it one is chosen"
    )


class _Format(_Sampling):
    """What the text follows, to its end."""

    json_schema: Path | None = option(
        None, description="a file with a JSON schema that the text follows", flag="schema"
    )
    regex: str | None = Field(None, description="a regular expression that the text matches")

    @model_validator(mode="after")
    def _has_one_format(self) -> Self:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("give --regex or --schema, not both")
        return self


class _Decoding(_Format):
    """Decoding; the text is the same with every strategy."""

    strategy: StrategyName = Field("auto", description="how to decode")
    lookahead: int | None = Field(
        None, description="draft tokens in a verification; without it the planner chooses"
    )
    targets: int | None = Field(
        None, description="most targets to use; without it the planner chooses"
    )
    width: int | None = Field(
        None,
        description="tokens drafted at a position: 2 or more make trees (default 1; with auto the"
        " planner chooses)",
    )
    branches: int | None = Field(
        None, description="runners-up that each drafter forward also extends (server: 0)"
    )
    drafter: DrafterName | None = Field(
        None,
        description="the drafter: servers, the text itself, or both. Default: servers, and the"
        " text while there is no server",
    )
    dispatch: Literal["work_conserving", "blocks"] | None = Field(
        None, description="blocks: as in the papers; SI's drafter then rests during verification"
    )
    rule: Literal["exact", "rejection"] = Field(
        "exact", description="the promise: the target's tokens, or its distribution"
    )


class GenerateSettings(_Decoding):
    """Continue a prompt, and stream the text to standard output.

    The last line, on standard error, has the numbers of tokens, seconds and accepted drafts.
    Ctrl-C cancels the work on all servers.
    """

    prompt: str | None = option(
        None, description="the prompt; - reads standard input", kind="argument"
    )
    file: Path | None = Field(None, description="read the prompt from a file")
    max_tokens: int | None = Field(None, description="most tokens to generate (server: 256)")
    stop: OneOrMore = Field((), description="end before this string")
    prompt_logprobs: int | None = Field(
        None,
        description="print each prompt token's log probability, and so many of the likeliest tokens"
        " at its position; with it --max-tokens may be 0",
    )
    prediction: Path | None = Field(
        None,
        description="a file with what the answer will probably be: it is drafted from, and changes"
        " no token",
    )
    lora: str | None = Field(
        None, description="the LoRA adapter to generate with; without it the model alone"
    )
    ignore_eos: bool = Field(False, description="go on after an end-of-text token")
    parse_special_tokens: bool = Field(
        False, description="parse special tokens in the prompt; without it they are plain text"
    )
    resume_attempts: int = Field(
        2, ge=0, description="how often a broken generation resumes by itself"
    )
    show_origins: bool = Field(
        False, description="mark accepted draft tokens and the target's own tokens"
    )
    model_costs: ModelCosts = Field(
        {},
        description="print SWI, with the cost of a drafter's forward in target forwards:"
        " small=0.03",
    )
    timeline: SvgFile | None = Field(None, description="write a picture of the request, as .svg")
    json_lines: bool = option(False, description="print JSON lines instead of text", flag="json")


def main(arguments: Sequence[str]) -> int:
    """Run the command."""
    settings = read_options(
        GenerateSettings, arguments, program="paceline generate", examples=_EXAMPLES
    )
    return asyncio.run(_generate(settings, _prompt(settings)))


async def _generate(settings: GenerateSettings, prompt: str) -> int:
    async with open_client(settings) as client:
        stream = client.generate(
            prompt, resume_attempts=settings.resume_attempts, **_options(settings)
        )
        try:
            await (_print_json(stream) if settings.json_lines else _print_text(stream, settings))
        except PacelineError:
            _print_break(stream, settings)
            raise
        if settings.timeline is not None:
            write_timeline(settings.timeline, await stream.collect())
            print(f"timeline: {settings.timeline}", file=sys.stderr)
    return 0


async def _print_text(stream: AsyncGeneration, settings: GenerateSettings) -> None:
    told = False
    text = TextStream(sys.stdout, show_origins=settings.show_origins)
    try:
        with text:
            async for chunk in stream:
                if not told:
                    _print_prompt(stream)
                    told = True
                text.write(chunk)
    finally:
        if not told:
            _print_prompt(stream)
        if not text.ends_line:  # a pipe's text stays as it is
            print(file=sys.stderr)
    line = statistics_line(await stream.collect(), costs=settings.model_costs)
    print(line, file=sys.stderr)


def _print_break(stream: AsyncGeneration, settings: GenerateSettings) -> None:
    """Say how far a broken generation came, and with which seed its text comes again."""
    count = sum(len(chunk.token_ids) for chunk in stream.transcript.chunks)
    if stream.started is None or not count:
        return
    seed = stream.started.seed
    told = f"broken after {counted(count, 'token')} · seed {seed}"
    if settings.rule == "exact":
        told += f" · the same command with --seed {seed} writes the same text from its beginning"
    print(told, file=sys.stderr)


async def _print_json(stream: AsyncGeneration) -> None:
    told = False
    async for chunk in stream:
        if not told:
            _print_beginning(stream)
            told = True
        _print_object(chunk)
    if not told:
        _print_beginning(stream)
    _print_object((await stream.collect()).finished)


def _print_beginning(stream: AsyncGeneration) -> None:
    if stream.started is not None:
        _print_object(stream.started)
    for chunk in stream.prompt_chunks:
        _print_object(chunk)


def _print_prompt(stream: AsyncGeneration) -> None:
    """Print each token of the prompt on a line of its own, on standard error."""
    for chunk in stream.prompt_chunks:
        likeliest = chunk.top_logprobs or ((),) * len(chunk.token_ids)
        logprobs = chunk.logprobs or (None,) * len(chunk.token_ids)
        for token_id, logprob, others in zip(chunk.token_ids, logprobs, likeliest, strict=True):
            own = "" if logprob is None else f"{logprob:.4f}"
            told = "  ".join(f"{it.token_id} {it.logprob:.4f}" for it in others)
            print(f"{token_id:>8} {own:>10}  {told}".rstrip(), file=sys.stderr)


def _print_object(event: Started | PromptChunk | Chunk | Finished) -> None:
    print(json.dumps({"event": type(event).__name__.lower(), **asdict(event)}), flush=True)


def _prompt(settings: GenerateSettings) -> str:
    if (settings.prompt is None) == (settings.file is None):
        raise InvalidFieldError.of("prompt", "give one: as an argument, as -, or with --file")
    try:
        if settings.file is not None:
            return read_plain_text(settings.file, most_bytes=MOST_MESSAGE_BYTES, allow_pipe=True)
        if settings.prompt != "-":
            return settings.prompt or ""
        text = sys.stdin.read(MOST_MESSAGE_BYTES + 1)
        if len(text) > MOST_MESSAGE_BYTES:
            problem = f"standard input has more than {MOST_MESSAGE_BYTES} characters"
            raise InvalidFieldError.of("prompt", problem)
        return text
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFieldError.of("prompt", f"cannot read it: {error}") from error


def _prediction(path: Path) -> str:
    try:
        return read_plain_text(path, most_bytes=MOST_MESSAGE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFieldError.of("prediction", f"cannot read it: {error}") from error


def _grammar(settings: GenerateSettings) -> Grammar | None:
    if settings.json_schema is None:
        return None if settings.regex is None else Grammar(regex=settings.regex)
    try:
        schema = read_plain_text(settings.json_schema, most_bytes=MOST_GRAMMAR_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFieldError.of("schema", f"cannot read it: {error}") from error
    return Grammar(json_schema=schema)


def _options(settings: GenerateSettings) -> GenerateOptions:
    """Return the options of the client library: the flags that have their names, and a few more."""
    options: GenerateOptions = {"include_timeline": settings.timeline is not None}
    if (grammar := _grammar(settings)) is not None:
        options["grammar"] = grammar
    if settings.prediction is not None:
        options["predicted_text"] = _prediction(settings.prediction)
    named = GenerateSettings.model_fields.keys() & GenerateOptions.__annotations__.keys()
    given = {name: getattr(settings, name) for name in named}
    options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
    return options
