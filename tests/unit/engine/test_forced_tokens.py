"""Tokens that a grammar forces: drafted without a forward, and right."""

from __future__ import annotations

import json
import random
from contextlib import aclosing

import numpy as np
import pytest

from paceline_contract.calls import DraftOptions, VerificationRule, VerifyOptions
from paceline_contract.max_gram import MaxGram
from paceline_contract.proposal import NOTHING, Proposal, SparseDistribution
from paceline_contract.sampling import Grammar, GrammarKind, SamplingParameters
from paceline_engine.deciding.grammars import GrammarCompiler
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_adapters import write_adapter
from support.tiny_models import build_tokenizer
from unit.engine.conftest import call_on, chain, running

TOKENIZER = build_tokenizer(300)
PROMPT = [5, 6] * 10
FIRST = "the name of a customer: "
GRAMMARS = [
    Grammar(GrammarKind.REGEX, FIRST + r"[a-c]{2}, and (nothing|no one) else"),
    Grammar(
        GrammarKind.JSON_SCHEMA,
        json.dumps(
            {
                "properties": {"quantity": {"type": "integer"}, "end": {"const": "<|end|> of it"}},
                "required": ["quantity", "end"],
                "additionalProperties": False,
            }
        ),
    ),
]
RULES = [VerificationRule.EXACT, VerificationRule.REJECTION]


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_token_is_forced_if_and_only_if_no_other_is_allowed(grammar):
    compiler = GrammarCompiler(TOKENIZER.to_str().encode(), vocabulary_size=300, eos_token_ids=[0])
    chance, forced_count = random.Random(1), 0
    for _ in range(10):
        path, answer = compiler.path(grammar), []
        while not path.is_complete and path.length < 100:
            forced, start = path.forced(50), path.length
            assert path.forced(1) == forced[:1]
            for token in forced:
                other = compiler.path(grammar)  # which knows of no run
                other.add([*answer, *forced[: path.length - start]])
                assert [*np.flatnonzero(other.allowed())] == [token]
                assert [*np.flatnonzero(path.allowed())] == [token]
                path.add([token])
            path.cut(start)
            allowed = np.flatnonzero(path.allowed())
            # Where a special token stands for a text, nothing is said.
            assert forced or len(allowed) > 1 or TOKENIZER.decode(allowed)[0] == "<"
            forced_count += bool(forced)
            answer.append(int(chance.choice(allowed)))
            path.add(answer[-1:])
        assert path.forced(50) == [], "the end is no token to draft"
    assert forced_count > 50


def spec(rule=VerificationRule.EXACT, *, grammar=GRAMMARS[0], temperature=1.0) -> SessionSpec:
    sampling = SamplingParameters(temperature=temperature, grammar=grammar)
    return SessionSpec(200, sampling, seed=3, rule=rule, prompt_length=len(PROMPT))


@pytest.fixture(scope="module")
def stack(target, drafter) -> StackBackend:
    return StackBackend(
        [target, drafter], matrix=((2, 2, 2), (0, 1, 2), (0, 0, 1)), new_max_gram=MaxGram
    )


@pytest.fixture(scope="module")
def self_drafting(tiny_pair, tmp_path_factory) -> TransformersBackend:
    folder = tmp_path_factory.mktemp("adapters") / "medusa"
    write_adapter(folder, tiny_pair.target, kind="medusa", tree=[(0,), (1,), (0, 0)])
    return TransformersBackend(str(tiny_pair.target), adapter=str(folder))


async def drafted(backend, options, rule=VerificationRule.EXACT):
    """Return what a draft finds after the prompt: a proposal, and how many forwards it took."""
    async with running(backend) as host:
        await host.prepare_session(spec(rule))
        session = host.open_session(spec(rule)).session_id
        call, found, forward_count = call_on(session, 1, base=[], append=PROMPT), NOTHING, 0
        async with aclosing(host.draft(call, options)) as pieces:
            async for piece in pieces:
                if options.width == 1:
                    found = found.followed_by(piece.proposal)
                else:
                    start = len(found)
                    found = Proposal(
                        (*found.token_ids, *piece.proposal.token_ids),
                        (*found.parents, *piece.proposal.parents),
                        forced=(*found.forced, *(start + it for it in piece.proposal.forced)),
                    )
                forward_count += piece.timing.forward_count
        return found, forward_count


@pytest.mark.parametrize(
    ("rule", "width"),
    [(VerificationRule.EXACT, 1), (VerificationRule.EXACT, 3), (VerificationRule.REJECTION, 1)],
)
@pytest.mark.parametrize("chunk_tokens", [1, 7])
async def test_a_draft_needs_forwards_only_for_tokens_that_are_not_forced(
    drafter, rule, width, chunk_tokens, monkeypatch
):
    options = DraftOptions(max_tokens=60, chunk_tokens=chunk_tokens, width=width)
    found, forward_count = await drafted(drafter, options, rule)
    text = TOKENIZER.decode(found.along(found.trunk), skip_special_tokens=False)
    assert text.startswith(FIRST)
    assert len(found.forced) > 15
    assert set(found.forced) <= set(found.trunk)
    assert forward_count == len(found.trunk) - len(found.forced)
    if rule is VerificationRule.REJECTION:
        assert all([*found.distributions[it].probabilities] == [1.0] for it in found.forced)
    monkeypatch.setattr(type(drafter), "forced", lambda *_, **__: NOTHING)
    without, slow_count = await drafted(drafter, options, rule)
    assert without.token_ids == found.token_ids
    assert slow_count == len(without.trunk)


@pytest.mark.parametrize("rule", RULES)
async def test_a_stack_drafts_forced_tokens_without_a_forward(stack, rule, monkeypatch):
    found, forward_count = await drafted(stack, DraftOptions(max_tokens=40), rule)
    assert len(found) == 40
    assert TOKENIZER.decode(found.token_ids).startswith(FIRST)
    assert len(found.forced) > 15
    assert len(found.distributions) == (40 if rule is VerificationRule.REJECTION else 0)
    assert forward_count <= 40 - len(found.forced)
    monkeypatch.setattr(TransformersBackend, "forced", lambda *_, **__: NOTHING)
    without, slow_count = await drafted(stack, DraftOptions(max_tokens=40), rule)
    assert not without.forced
    assert forward_count < slow_count


async def judged(backend, proposal, rule=VerificationRule.EXACT, *, answer=()):
    async with running(backend) as host:
        await host.prepare_session(spec(rule))
        session = host.open_session(spec(rule)).session_id
        call = call_on(session, 1, base=[], append=[*PROMPT, *answer])
        return await host.verify(call, proposal, options=VerifyOptions(propose=True))


async def test_a_verdict_comes_with_the_tokens_that_are_forced_after_it(target, self_drafting):
    whole = TOKENIZER.encode(FIRST).ids
    for backend in (target, self_drafting):
        verdict = await judged(backend, NOTHING)
        assert verdict.next_token == whole[0]
        forced = verdict.proposal.along(verdict.proposal.forced)
        assert [*forced] == whole[1:]
        assert verdict.proposal.leads_along(verdict.proposal.forced)
        assert len(verdict.proposal) == len(forced), "no guess of the model's own fits"
    under_rejection = await judged(target, NOTHING, VerificationRule.REJECTION)
    assert under_rejection.proposal == NOTHING


async def test_own_guesses_that_the_grammar_refuses_are_left_out(self_drafting):
    verdict = await judged(self_drafting, NOTHING, answer=TOKENIZER.encode(FIRST).ids)
    letters = {TOKENIZER.decode([token]) for token in verdict.proposal.token_ids}
    assert verdict.proposal.forced == ()
    assert letters <= {"a", "b", "c", ","}


RIGHT, WRONG = TOKENIZER.encode(FIRST).ids[:3], TOKENIZER.encode("Q").ids[0]


@pytest.mark.parametrize(
    ("proposal", "path"),
    [
        (chain([*RIGHT[:2], WRONG, RIGHT[2]]), (0, 1)),
        (Proposal((WRONG, RIGHT[0], WRONG, RIGHT[1]), (0, 0, 1, 2)), (1, 3)),
    ],
)
async def test_a_draft_is_cut_where_the_grammar_refuses_it(target, proposal, path):
    verdict = await judged(target, proposal)
    assert (verdict.accepted_path, verdict.next_token) == (path, RIGHT[2])
    assert verdict.timing.row_count == len(PROMPT) + 2, "no row is spent on the rest"


async def test_under_rejection_a_refused_token_is_judged_by_what_it_was_drawn_from(target):
    token_ids = (RIGHT[0], WRONG, RIGHT[1])
    each = [SparseDistribution((token, RIGHT[1]), (0.5, 0.5)) for token in token_ids[:2]]
    draft = chain(token_ids, [*each, SparseDistribution(token_ids[2:], (1.0,))])
    verdict = await judged(target, draft, VerificationRule.REJECTION)
    assert (verdict.accepted_path, verdict.next_token) == ((0,), RIGHT[1])
    assert verdict.timing.row_count == len(PROMPT) + len(draft), "nothing is cut"


async def test_where_branches_are_extended_each_step_needs_its_forward(drafter):
    options = DraftOptions(max_tokens=8, width=3, branch_count=2)
    found, forward_count = await drafted(drafter, options)
    assert (found.forced, forward_count) == ((), 8)
