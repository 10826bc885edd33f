"""Which servers go together: targets of one model, and drafters of its tokens.

A request is served by targets that are interchangeable within one stream, and by drafters with
their tokens. What keeps a server that is well from that is an obstacle, and has a word.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.configurations import tell_difference
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.words import Standing, Word

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.silence import Work
    from paceline_orchestrator.fleet.wire import ModelFacts

_DIGITS = 12  # of a fingerprint, for people
_NAME_CHARACTERS = 64


def commonest_model(said: Iterable[ModelFacts | None]) -> ModelFacts | None:
    """Return the model that most of the servers have; None where none has said what it has.

    A lone server must not speak for the others. Between two models of equally many servers the one
    counts that computes the same bits whatever is beside, since its users must not lose that. The
    model's context is the longest of its servers: a target with less is used for what it has room
    for. The model knows REJECTION, scores prompts, and drafts for itself, where one of its servers
    does: the others are passed over. Grammars are enforced by the engine that most of them have.

    Args:
        said: What each server said of its model; None: nothing yet.
    """
    known = [it for it in said if it]
    counts = Counter(it.identity for it in known)

    def rank(facts: ModelFacts) -> tuple[int, bool, int]:
        return counts[facts.identity], facts.is_invariant, facts.context_length

    model = max(known, key=rank, default=None)
    if model is None:
        return None
    alike = [it for it in known if it.identity == model.identity]
    engine = _commonest(it.grammar_engine for it in alike)
    return replace(
        model,
        rejection_sampling=any(it.rejection_sampling for it in alike),
        sampling_parameters=frozenset(each for it in alike for each in _applied(it, engine)),
        scores_prompts=any(it.scores_prompts for it in alike),
        self_draft_depth=max(it.self_draft_depth for it in alike),
        grammar_engine=engine,
    )


def _commonest(engines: Iterable[str]) -> str:
    """Return the engine that most have; of equally many the first by name, so that all agree."""
    counts = Counter(sorted(engine for engine in engines if engine))
    return max(counts, key=counts.__getitem__, default="")


def unapplied(used: frozenset[str], server: ModelFacts, model: ModelFacts) -> frozenset[str]:
    """Return the sampling parameters that keep a server from choosing tokens as a model does.

    A target that does not apply one of them would choose other tokens. A drafter is asked without
    them: its tokens are judged under each rule, and under REJECTION by the distribution that it
    drew them from, whatever that was.

    Args:
        used: The parameters that a request uses.
        server: What the server said; or the model, as its servers say together. Then it is those
            of the server that lacks the fewest.
        model: What the request is pinned to.
    """
    if not used:
        return used
    sets = _applied(server, model.grammar_engine)
    return min((used - each for each in sets), key=lambda it: (len(it), sorted(it)))


def _applied(server: ModelFacts, engine: str) -> Iterable[frozenset[str]]:
    """Return the sets of sampling parameters, with grammars only if this engine enforces them."""
    without = () if engine and server.grammar_engine == engine else ("grammar",)
    return [each.difference(without) for each in server.sampling_parameters]


def fits(target: ModelFacts, model: ModelFacts) -> bool:
    """Whether a target can serve requests of a model that are not too long for it.

    The model may be one with a LoRA adapter: the target needs the same adapter, by its name and by
    what it adds.
    """
    own = target.with_lora(model.lora)
    return own is not None and own.identity == model.identity


def commonest_adapters(said: Iterable[ModelFacts | None], model: ModelFacts) -> Mapping[str, str]:
    """Return a model's fingerprint with each LoRA adapter that its servers have, by its name.

    Of several adapters with one name it is the one that most servers have.
    """
    alike = (it for it in said if it and fits(it, model))
    counts = Counter(named for it in alike for named in it.lora_fingerprints)
    return dict(sorted(counts, key=lambda named: (counts[named], named)))


def commonest_with_lora(
    said: Sequence[ModelFacts | None], model: ModelFacts, *, name: str
) -> ModelFacts | None:
    """Return a model with the commonest LoRA adapter of a name, as its servers say; None: none."""
    fingerprint = commonest_adapters(said, model).get(name)
    if fingerprint is None:
        return None
    wanted = replace(model, fingerprint=fingerprint, lora=name)
    return commonest_model(it.with_lora(name) for it in said if it and fits(it, wanted))


def could_replace(target: ModelServer, server: ModelServer, work: Work) -> bool:
    """Whether a target could do the work of a server; a drafter's can be done without."""
    if target.facts is None or server.facts is None:
        return False
    if server.role is Role.DRAFTER:
        return drafter_obstacle(server.facts, target.facts) is None
    model = work.model or server.facts
    has_room = work.limit_length <= target.facts.context_length
    is_able = has_room and not unapplied(work.sampling_used, target.facts, model)
    return is_able and fits(target.facts, model)


def target_obstacle(target: ModelFacts, model: ModelFacts) -> Standing | None:
    """Say what keeps a target from requests of a model; None if nothing does.

    The sentence has every difference, the word the one that explains most of them: a fingerprint
    is of weights, tokenizer and dtype together.
    """
    if fits(target, model):
        return None
    is_namesake = target.model_name == model.model_name
    has_other_tokens = not _same_tokens(target, model)
    if target.fingerprint != model.fingerprint:
        if is_namesake and has_other_tokens:
            word = Word.OTHER_TOKENIZER
        elif is_namesake and target.dtype != model.dtype:
            word = Word.OTHER_DTYPE
        else:
            word = Word.OTHER_MODEL
    elif has_other_tokens:
        word = Word.OTHER_TOKENIZER
    elif target.eos_token_ids != model.eos_token_ids:
        word = Word.OTHER_MODEL
    else:
        word = Word.OTHER_INVARIANCE
    return Standing(word, "; ".join(_differences(target, model)))


def drafter_obstacle(drafter: ModelFacts, model: ModelFacts) -> Standing | None:
    """Say what keeps a drafter from drafting for a model; None if nothing does."""
    if _same_tokens(drafter, model):
        return None
    return Standing(Word.OTHER_TOKENIZER, "; ".join(_other_tokens(drafter, model)))


def _same_tokens(one: ModelFacts, other: ModelFacts) -> bool:
    return (
        one.tokenizer_fingerprint == other.tokenizer_fingerprint
        and one.vocabulary_size == other.vocabulary_size
    )


def _differences(target: ModelFacts, model: ModelFacts) -> Iterator[str]:
    if target.fingerprint != model.fingerprint:
        ours, theirs = (
            f"{it.model_name[:_NAME_CHARACTERS]} ({it.fingerprint[:_DIGITS]})"
            for it in (target, model)
        )
        yield f"its model is {ours}, that of most targets {theirs}"
        yield from _other_files(target, model)
    yield from _other_tokens(target, model)
    if target.dtype != model.dtype:
        ours, theirs = (it.dtype or "a dtype that is not said" for it in (target, model))
        yield f"it computes in {ours}, most targets in {theirs}"
    if target.eos_token_ids != model.eos_token_ids:
        yield "its end tokens are others than most targets'"
    if target.is_invariant != model.is_invariant:
        has, have = ("with" if it.is_invariant else "without" for it in (target, model))
        yield f"it runs {has} --invariant, most targets {have}"


def _other_files(target: ModelFacts, model: ModelFacts) -> Iterator[str]:
    """Say which of the files that a fingerprint is of differ, as far as that is known."""
    if told := tell_difference(target.configuration, model.configuration):
        yield told
        yield "if it is the same model and was only saved anew, it needs their config.json"
    elif (
        target.configuration
        and target.configuration == model.configuration
        and _same_tokens(target, model)
        and (target.dtype, target.eos_token_ids) == (model.dtype, model.eos_token_ids)
    ):
        yield "its config.json says the same, so its weights are others"


def _other_tokens(one: ModelFacts, model: ModelFacts) -> Iterator[str]:
    if one.tokenizer_fingerprint != model.tokenizer_fingerprint:
        ours, theirs = (it.tokenizer_fingerprint[:_DIGITS] or "missing" for it in (one, model))
        yield f"its tokenizer is {ours}, most targets' {theirs}"
    if one.vocabulary_size != model.vocabulary_size:
        ours, theirs = (str(it.vocabulary_size) for it in (one, model))
        yield f"its vocabulary has {ours} tokens, most targets' {theirs}"
