"""A report for the operator, in one line: which parts of a model's folder were found."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidFieldError
from paceline_contract.sampling import SamplingParameters
from paceline_engine.terms.backend import few_names
from paceline_engine.terms.calls import SamplingDefaults
from paceline_engine.terms.validation import check_sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_engine.model_files.files import ModelFiles

_log = logging.getLogger(__name__)

_MOST_CHARACTERS = 400  # of a fact: a folder's texts are a stranger's


def known_ends(files: ModelFiles, *, vocabulary_size: int) -> tuple[int, ...]:
    """Return the tokens that end a text, in their order, and warn of what cannot end one.

    A model whose files name an end that it can never choose goes on to each request's limit, and
    without a warning this would not be noticed.

    Args:
        vocabulary_size: How many tokens the model can choose from.
    """
    tokens = files.tokens
    known = tuple(sorted(each for each in tokens.end_ids if each < vocabulary_size))
    if len(known) < len(tokens.end_ids):
        _log.warning(
            "model %r: its files end texts with tokens beyond its vocabulary of %d, which are left"
            " out",
            files.name,
            vocabulary_size,
        )
    if tokens.unknown_ends:
        _log.warning(
            "model %r: eos_token is %s, which its tokenizer does not have",
            files.name,
            few_names(map(repr, tokens.unknown_ends)),
        )
    if not known:
        _log.warning(
            "model %r: no token ends its texts, so that each goes on to its limit: add eos_token_id"
            " to its generation_config.json",
            files.name,
        )
    return known


def known_defaults(files: ModelFiles, *, vocabulary_size: int) -> SamplingDefaults:
    """Return what a model's files say of sampling, and warn of what no request could say."""
    found: dict[str, Any] = {}
    for name, value in files.sampling_defaults.items():
        if name not in SamplingDefaults.__annotations__:
            continue
        wanted = int if name == "top_k" else float
        # A bool is an int, and no number here.
        if type(value) is int or (type(value) is float and wanted is float):
            try:
                given: dict[str, Any] = {name: wanted(value)}
                check_sampling("", SamplingParameters(**given), vocabulary_size=vocabulary_size)
                found |= given
                continue
            except (InvalidFieldError, OverflowError):
                pass
        _log.warning(
            "model %r: its generation_config.json has %s %.80r, which is left out",
            files.name,
            name,
            value,
        )
    return SamplingDefaults(**found)


def known_fim(files: ModelFiles, *, vocabulary_size: int) -> tuple[int, ...]:
    """Return the tokens with which a text is filled in: prefix, suffix, middle; none if unknown."""
    fim = files.tokens.fim
    ids = () if fim is None else (fim.prefix, fim.suffix, fim.middle)
    return ids if max(ids, default=0) < vocabulary_size else ()


def report(files: ModelFiles, *, end_ids: tuple[int, ...]) -> None:
    """Tell in one line of the log what a folder says, and what it does not say.

    Args:
        end_ids: The tokens that end a text.
    """
    facts = {what: fact[:_MOST_CHARACTERS] for what, fact in _facts(files, end_ids)}
    found = "; ".join(f"{what}: {fact}" for what, fact in facts.items() if fact)
    missing = ", ".join(what for what, fact in facts.items() if not fact)
    _log.info("model %r: %s; not found: %s", files.name, found or "nothing", missing or "nothing")


def _facts(files: ModelFiles, end_ids: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    tokens, fim = files.tokens, files.tokens.fim
    yield "ends of a text", ", ".join(map(str, end_ids))
    yield "named tokens", ", ".join(f"{name} {text!r}" for name, text in tokens.named.items())
    yield (
        "chat templates",
        ", ".join(f"{name!r} ({it.file_name})" for name, it in files.templates.items()),
    )
    yield "fill in the middle", f"{fim.prefix}, {fim.suffix}, {fim.middle}" if fim else ""
    scored = files.draft_vocabulary
    if scored:
        yield "draft vocabulary", f"{len(scored)} of {files.vocabulary_size} tokens"
    defaults = files.sampling_defaults
    yield "sampling defaults", ", ".join(f"{name} {value!r}" for name, value in defaults.items())
