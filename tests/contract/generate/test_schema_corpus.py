"""Many schemas by every strategy: the same valid answer, and no fewer drafts are accepted."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from paceline import Grammar
from paceline_contract.max_gram import MaxGram
from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.stack_backend.stack import StackBackend
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.in_process import in_process_system
from support.schema_corpus import SCHEMAS
from support.tiny_adapters import write_adapter
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

PROMPT = "import draft\n"
SI = {"strategy": "speculative", "lookahead": 4}
DSI = {"strategy": "distributed", "lookahead": 2}
WAYS = {
    "plain": {"strategy": "autoregressive"},
    "si": SI,
    "si from the text": {**SI, "drafter": "max_gram"},
    "si with trees": {**SI, "width": 3, "branches": 2},
    "dsi": DSI,
    "self": {"strategy": "self_speculative"},
}
MORE_WAYS = {"auto": {}, "dsi with trees": {**DSI, "width": 3}}
QUICK = HostLimits(warm_up_rounds=0)


class Failing(TransformersBackend):
    """A target that computes nothing any more after some forwards of requests."""

    left = 30

    def _forward(self, feeds, interrupt):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("lost")
        return super()._forward(feeds, interrupt)


@asynccontextmanager
async def a_system(pair, folder, *, with_stack=False, kinds=(TransformersBackend,) * 2):
    """Serve two targets that draft for themselves, and a drafter or a stack."""
    adapter = folder / "medusa"
    write_adapter(adapter, pair.target, kind="medusa", tree=[(0,), (1,), (0, 0)])

    def drafter():
        model = TransformersBackend(str(pair.drafter))
        if not with_stack:
            return model
        matrix = ((2, 2, 2), (0, 1, 2), (0, 0, 1))
        larger = TransformersBackend(str(pair.target))
        return StackBackend([larger, model], matrix=matrix, new_max_gram=MaxGram)

    targets = [
        ModelHost(lambda kind=kind: kind(str(pair.target), adapter=str(adapter)), limits=QUICK)
        for kind in kinds
    ]
    drafters = [ModelHost(drafter, limits=QUICK)]
    async with in_process_system(drafters=drafters, targets=targets) as system:
        yield system


async def ask(system, options, **asked):
    return await system.client.generate(
        PROMPT, **{"max_tokens": 80, "seed": 7, **asked}, **options
    ).collect()


class Counts(NamedTuple):
    accepted: int
    judged: int

    @property
    def rate(self) -> float:
        return self.accepted / self.judged


def counts(done) -> Counts:
    took = done.finished.statistics
    return Counts(took.accepted_token_count, took.accepted_token_count + took.rejected_token_count)


async def check(system, schemas, ways, *, temperature) -> Counts:
    """Ask for answers by every way, and compare them; return what became of SI's drafts."""
    total = Counts(0, 0)
    for known in schemas:
        asked = {"temperature": temperature, "grammar": Grammar(json_schema=known.schema)}
        found = await asyncio.gather(*(ask(system, it, **asked) for it in ways.values()))
        texts = {way: done.text for way, done in zip(ways, found, strict=True)}
        assert len({*texts.values()}) == 1, (known.about, texts)
        if found[0].finished.finish_reason == "eos":
            assert known.fits(found[0].text), (known.about, found[0].text)
        of_si = counts(found[[*ways].index("si")])
        total = Counts(total.accepted + of_si.accepted, total.judged + of_si.judged)
    return total


async def test_with_a_stack_the_answers_to_some_schemas_are_those_of_plain_decoding(
    tiny_pair, tmp_path
):
    async with a_system(tiny_pair, tmp_path, with_stack=True) as system:
        await check(system, SCHEMAS[5::25], {**WAYS, **MORE_WAYS}, temperature=1.0)
        await system.settled()


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_way_gives_the_same_answer_and_it_fits_its_schema(
    tiny_pair, tmp_path, temperature
):
    """Each schema is asked for by four ways at each temperature, and by all of them at both."""
    halves = [
        {way: WAYS[way] for way in ("plain", "si", *others)}
        for others in (("si from the text", "dsi"), ("si with trees", "self"))
    ]
    async with a_system(tiny_pair, tmp_path) as system:
        accepted = judged = 0
        for part in (0, 1):
            ways = halves[(part + (temperature > 0)) % 2]
            found = await check(system, SCHEMAS[part::2], ways, temperature=temperature)
            accepted, judged = accepted + found.accepted, judged + found.judged
        some = {"plain": WAYS["plain"], "si": SI, **MORE_WAYS}
        await check(system, SCHEMAS[::16], some, temperature=temperature)
        free = counts(await ask(system, SI, max_tokens=200, temperature=temperature))
        assert accepted / judged >= free.rate
        await system.settled()


async def test_under_rejection_sampling_answers_fit_their_schemas(tiny_pair, tmp_path):
    async with a_system(tiny_pair, tmp_path) as system:
        for way, schemas in (("si", SCHEMAS[3::35]), ("dsi", SCHEMAS[9::35])):
            for known in schemas:
                done = await ask(
                    system,
                    {**WAYS[way], "rule": "rejection"},
                    temperature=1.0,
                    grammar=Grammar(json_schema=known.schema),
                )
                assert done.finished.promise == "rejection"
                ended = done.finished.finish_reason == "eos"
                assert not ended or known.fits(done.text), (known.about, done.text)


@pytest.mark.parametrize(
    "way", ["dsi", *(pytest.param(way, marks=pytest.mark.long) for way in ("plain", "si", "self"))]
)
async def test_a_target_that_is_lost_in_the_middle_changes_no_answer(tiny_pair, tmp_path, way):
    known = next(it for it in SCHEMAS if it.about == "an order")
    asked = {"temperature": 1.0, "grammar": Grammar(json_schema=known.schema), "max_tokens": 160}
    async with a_system(tiny_pair, tmp_path, kinds=(Failing, TransformersBackend)) as system:
        texts, lost = [], 0
        while not lost and len(texts) < 9:
            # Two at once, so that neither target is left out.
            for done in await asyncio.gather(*(ask(system, WAYS[way], **asked) for _ in range(2))):
                texts.append(done.text)
                lost += done.finished.statistics.fallbacks.get("target_lost", 0)
        assert lost, "until a request was at the one that fails"
        assert len({*texts, (await ask(system, WAYS["plain"], **asked)).text}) == 1
        assert known.fits(texts[0])


async def test_after_resumed_tokens_that_break_the_grammar_the_rest_is_free_by_every_way(
    tiny_pair, tmp_path
):
    async with a_system(tiny_pair, tmp_path) as system:
        free = await ask(system, WAYS["plain"], temperature=1.0, max_tokens=24)
        resumed = free.token_ids[:5]
        texts = {
            way: await ask(
                system,
                options,
                temperature=1.0,
                max_tokens=24,
                grammar=Grammar(regex="x{20}"),
                resume_token_ids=resumed,
            )
            for way, options in WAYS.items()
        }
        assert {done.token_ids for done in texts.values()} == {free.token_ids[5:]}
