"""Sessions with a grammar or other shaping: how they are opened, and what stays of them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from dataclasses import replace

import pytest

from paceline.errors import InvalidFieldError, OverloadedError
from paceline_contract.sampling import SAMPLING_PARAMETERS, Grammar, GrammarKind, SamplingParameters
from paceline_engine.deciding.shaping import Shaper
from paceline_engine.sessions import host as host_module
from paceline_engine.sessions.host import HostLimits
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.calls import SessionSpec
from support.tiny_models import build_tokenizer
from unit.engine.conftest import call_on, chain, running, until

PROMPT = [5, 6] * 30
TOKENIZER = build_tokenizer(300)


class Compiling(SimulatedBackend):
    """Compiles a grammar when it is let go on."""

    def __init__(self):
        super().__init__(SimulatedModel(ttft_seconds=0.0, tpot_seconds=0.0))
        self.description = replace(
            self.description, samples_by=SAMPLING_PARAMETERS, grammar_engine="fake"
        )
        self.entered, self.known, self.let_go = [], set(), threading.Event()

    def knows_grammar(self, grammar):
        return grammar in self.known

    def compile_grammar(self, grammar):
        self.entered.append(grammar)
        assert self.let_go.wait(30)
        self.known.add(grammar)


def grammar(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def spec(sampling: SamplingParameters, *, share: str = "") -> SessionSpec:
    return SessionSpec(100, sampling, prompt_length=len(PROMPT), share=share)


async def test_a_slow_grammar_is_told_to_be_asked_for_again_and_delays_no_other_tenant(
    monkeypatch,
):
    monkeypatch.setattr(host_module, "_COMPILING_SECONDS", 0.01)
    backend = Compiling()
    slow, known = (SamplingParameters(grammar=grammar(text)) for text in ("slow", "known"))
    backend.known.add(known.grammar)
    async with running(backend) as host:
        try:
            for _ in range(2):
                with pytest.raises(OverloadedError) as refused:
                    await host.prepare_session(spec(slow, share="one"))
                assert refused.value.retry_after_seconds > 0
            assert backend.entered == [slow.grammar], "a tenant's grammars take turns"
            await host.prepare_session(spec(known, share="one"))
            with pytest.raises(OverloadedError):
                await host.prepare_session(spec(slow, share="two"))
            assert len(backend.entered) == 2, "and do not wait for another tenant's"
        finally:
            backend.let_go.set()
        await until(lambda: slow.grammar in backend.known)
        monkeypatch.setattr(host_module, "_COMPILING_SECONDS", 30)  # on a busy machine, too
        next_one = SamplingParameters(grammar=grammar("next"))
        await host.prepare_session(spec(next_one, share="one"))
        assert next_one.grammar in backend.known


async def test_a_tenant_that_leaves_does_not_compile_two_grammars_at_once(monkeypatch):
    monkeypatch.setattr(host_module, "_COMPILING_SECONDS", 0.01)
    backend = Compiling()
    async with running(backend) as host:
        try:
            first, second = (spec(SamplingParameters(grammar=grammar(text))) for text in "ab")
            leaving = asyncio.create_task(host.prepare_session(first))
            await until(lambda: backend.entered)
            leaving.cancel()
            await asyncio.wait([leaving])
            with pytest.raises(OverloadedError):
                await host.prepare_session(second)
            assert backend.entered == [first.sampling.grammar]
        finally:
            backend.let_go.set()


async def test_shaping_needs_to_be_told_where_the_answer_begins(target):
    """An orchestrator that does not know these parameters hands them on without that."""
    async with running(target) as host:
        asked = replace(spec(SamplingParameters(presence_penalty=1.0)), prompt_length=0)
        with pytest.raises(InvalidFieldError, match="prompt_length"):
            host.open_session(asked)


async def test_what_shaped_a_session_is_freed_with_it(target):
    kept = HostLimits(keep_seconds=60, warm_up_rounds=0)
    async with running(target, limits=kept) as host:
        for sampling in (SamplingParameters(presence_penalty=1.0), SamplingParameters()):
            session = host.open_session(spec(sampling)).session_id
            await host.verify(call_on(session, 1, base=[], append=PROMPT))
            host.close_session(session)
        # Its tokens are kept, for texts that begin alike.
        gc.collect()
        assert not [it for it in gc.get_objects() if type(it) is Shaper]


async def test_a_draft_that_is_too_complex_for_the_grammar_is_rejected_like_any_other(
    target, monkeypatch
):
    monkeypatch.setattr(host_module, "_COMPILING_SECONDS", 30)  # on a busy machine, too
    schema = {"type": "object", "properties": {f"p{number}": {} for number in range(1500)}}
    text = f'start: "a" | value\nvalue: %json {json.dumps(schema)}'
    (letter,) = TOKENIZER.encode("a").ids
    sampling = SamplingParameters(
        grammar=Grammar(GrammarKind.LARK, text), logit_bias=((letter, 100.0),)
    )
    draft = TOKENIZER.encode('{"p0":1,').ids
    async with running(target) as host:
        await host.prepare_session(spec(sampling))
        session = host.open_session(spec(sampling)).session_id
        verdict = await host.verify(call_on(session, 1, base=[], append=PROMPT), chain(draft))
        assert (verdict.accepted_path, verdict.next_token) == ((), letter)
