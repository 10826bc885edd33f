"""Models whose state cannot be taken back: proposals are judged one row at a time.

What they say is compared with the library's own decoding in `test_architectures.py`.
"""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.rwkv import modeling_rwkv

from paceline.errors import CacheExhaustedError
from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.cascade import Draw, ReviewTask
from paceline_engine.deciding.decisions import judge_by
from paceline_engine.deciding.row_reading import RowsTask
from paceline_engine.scheduling.latencies import LatencyMeter, measure
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.sessions.host import HostLimits
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.backend import ModelLoadError, TokenMemory
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Item, Judge
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.families import VOCABULARY_SIZE, build_family
from support.held_memory import held_bytes
from unit.engine.asking import opened
from unit.engine.conftest import NEVER, chain, continuation, path, running

SPEC = SessionSpec(128)
PROMPT = [*range(7, 27)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return build_family("rwkv", tmp_path_factory.mktemp("family") / "rwkv")


@pytest.fixture(scope="module")
def backend(directory):
    return TransformersBackend(str(directory))


def test_a_block_costs_a_row_for_each_accepted_token_and_the_server_says_so(backend):
    oracle = continuation(ModelText(backend, SPEC), PROMPT, 9)
    for accepted in range(9):
        text = ModelText(backend, SPEC)
        text.draft(PROMPT)
        wrong = (oracle[accepted] + 1) % VOCABULARY_SIZE
        judged = text.judge(PROMPT, [*oracle[:accepted], wrong, *oracle[:3]][:8])
        assert judged.accepted_path == path(accepted)
        assert judged.next_token == oracle[accepted]
        assert text.row_count == 1 + accepted
    what = backend.description
    assert (what.shares_forwards, what.takes_trees) == (False, False)
    meter, ticks = LatencyMeter(), iter(range(0, 10**12, 1000))
    measure(backend, meter, rounds=1, interrupt=NEVER, clock_ns=lambda: next(ticks))
    assert {each.rows: each.median_ns for each in meter.latencies().forwards} == {
        rows: 1000 * rows for rows in (1, 2, 4, 8, 16)
    }


@pytest.mark.parametrize("seed", range(3))
def test_sampled_blocks_are_judged_as_if_all_rows_were_there(backend, directory, seed):
    spec = SessionSpec(64, SamplingParameters(1.3, top_k=4), rule=VerificationRule.REJECTION)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    drafter = ModelText(backend, spec)
    counts = {Judge: set(), ReviewTask: set()}
    for n in range(8):
        chance = random.Random(10 * seed + n)
        prefix = [chance.randrange(VOCABULARY_SIZE) for _ in range(12)]
        block, distributions = [], []
        for _ in range(5):
            found = drafter.draft([*prefix, *block])
            block.extend(found.token_ids)
            distributions.extend(found.distributions)
        # Drawn for another prefix, so that some are rejected.
        asked = [chance.randrange(VOCABULARY_SIZE), *prefix[1:]] if n % 2 else prefix
        draws = tuple(
            Draw(it, distribution=of) for it, of in zip(block, distributions, strict=True)
        )
        with torch.inference_mode():
            rows = model(torch.tensor([asked + block])).logits[0, len(asked) - 1 :]
        for task in (
            Judge(chain(block, distributions), logprobs=True, top_logprobs=2),
            ReviewTask(chain(block, distributions), draws=draws, stage=1),
        ):
            item = Item(backend.new_cache(spec), spec, prefix=array("I", asked), task=task)
            (outcome,) = backend.run([item], NEVER)
            expected = judge_by(rows, task, spec=spec, position=len(asked))
            found = outcome.judgement
            assert (found.accepted_path, found.next_token) == (
                expected.accepted_path, expected.next_token,
            )  # fmt: skip
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
            counts[type(task)].add(len(found.accepted_path))
    for found in counts.values():
        assert 5 in found
        assert len(found) > 1


def test_rows_that_are_only_read_are_all_computed(backend, directory):
    """As a drafter of another vocabulary reads them: nothing is decided, so nothing is rejected."""
    block = [40, 3, 9, 200]
    item = Item(
        backend.new_cache(SPEC), SPEC, prefix=array("I", PROMPT), task=RowsTask(chain(block))
    )
    (outcome,) = backend.run([item], NEVER)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.tensor([PROMPT + block])).logits[0, len(PROMPT) - 1 :].softmax(-1)
    assert outcome.judgement.rows.shape == rows.shape
    assert torch.allclose(outcome.judgement.rows, rows, atol=1e-5)


def test_a_drafter_goes_back_to_a_copy_and_not_to_the_start(backend):
    text, fresh = ModelText(backend, SPEC), ModelText(backend, SPEC)
    prefix = PROMPT[:]
    for accepted in (3, 0, 5, 1, 2, 0):
        drafted = text.draft_chain(prefix, count=6)
        assert drafted == continuation(fresh, prefix, 6)
        prefix = [*prefix, *drafted[:accepted], (drafted[accepted] + 1) % VOCABULARY_SIZE]
        text.draft(prefix)
        assert text.row_count <= 1 + accepted + 4


def test_a_text_holds_no_more_memory_than_is_counted_for_it(tmp_path):
    """With its copies, which in a hybrid have keys and values, too."""
    backend = TransformersBackend(str(build_family("jamba", tmp_path)))
    cache, length = backend.new_cache(SPEC), 0
    for length in range(90, 121, 6):
        task = Judge(chain([]))
        item = Item(cache, SPEC, prefix=array("I", [*range(length)]), task=task)
        backend.run([item], NEVER)
    memory = backend.token_memory()
    counted = memory.bytes_per_text + length * memory.bytes_per_token
    assert memory.bytes_per_text < held_bytes(cache) <= counted


def test_a_library_that_forgets_its_state_is_refused(directory, monkeypatch):
    whole = modeling_rwkv.RwkvForCausalLM.forward

    def forgetful(self, input_ids=None, state=None, use_cache=None):
        return whole(self, input_ids, use_cache=use_cache)

    monkeypatch.setattr(modeling_rwkv.RwkvForCausalLM, "forward", forgetful)
    with pytest.raises(ModelLoadError, match="are not those of the whole text"):
        TransformersBackend(str(directory))


class Recurrent(SimulatedBackend):
    """An instant model each of whose sequences takes the memory of 100 tokens more."""

    def token_memory(self) -> TokenMemory:
        return TokenMemory(
            free_bytes=5000, usable_share=1.0, bytes_per_token=10, bytes_per_text=995
        )


async def test_a_sequences_state_counts_beside_its_tokens():
    limits = HostLimits(warm_up_rounds=0, token_budget=500, fits_memory=True)
    model = Recurrent(SimulatedModel(ttft_seconds=0, tpot_seconds=0))
    async with running(model, limits=limits) as host:
        session = opened(host, SessionSpec(150))
        assert host.statistics().tokens_reserved == 250
        opened(host, SessionSpec(40, share="another"))
        with pytest.raises(CacheExhaustedError, match="160 tokens wanted, 110 of 500 free"):
            opened(host, SessionSpec(60, share="third"))
        host.close_session(session)
        assert host.statistics().tokens_reserved == 140
