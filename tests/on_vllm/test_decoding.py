"""What vLLM computes, decided by our rule: the tokens of plain decoding, however they come."""

from __future__ import annotations

import json
import math
import random
import threading
from array import array
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from on_vllm.conftest import MODEL
from paceline_contract.proposal import Proposal
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.noise import Purpose, noise_bits, uniform
from paceline_engine.deciding.sampling import choose_tokens, token_logprobs, top_logprobs
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Decode, Draft, Item, Judge
from paceline_engine.torch_backend.transformers import TransformersBackend
from paceline_engine.vllm_backend.invariance import check_invariance
from paceline_engine.vllm_backend.row_tasks import row_task
from support.equality import compare
from support.oracle import Sampling

NEVER = threading.Event()
PROMPTS = ("def fibonacci(n):\n", "import os\n\nclass Reader:\n    def read(self, path):\n")
SAMPLINGS = (
    SamplingParameters(),
    SamplingParameters(0.7),
    SamplingParameters(1.0, top_p=0.9, top_k=50, min_p=0.01),
    SamplingParameters(
        0.8, repetition_penalty=1.2, frequency_penalty=0.4, min_tokens=30, logit_bias=((300, 2.0),)
    ),
    SamplingParameters(presence_penalty=1.0, min_tokens=30),
)
TOKENS = 40


def spec_of(sampling, prompt, *, seed=7):
    return SessionSpec(400, sampling, seed=seed, prompt_length=len(prompt), end_token_ids=(0,))


def item(backend, spec, prefix, task, *, cache=None) -> Item:
    return Item(cache or backend.new_cache(spec), spec, prefix=array("I", prefix), task=task)


def run_all(backend, items) -> list[list]:
    """Run items until each is done, and return the outcomes of each."""
    found = {id(each): [] for each in items}
    left = list(items)
    rounds = count()
    while left:
        assert next(rounds) < 1000
        for each, outcome in zip(left, backend.run(left, NEVER), strict=True):
            assert not isinstance(outcome, Exception), outcome
            found[id(each)].append(outcome)
        left = [each for each in left if not each.take(found[id(each)][-1])]
    return [found[id(each)] for each in items]


def decider_config(size):
    """Return so much of vLLM's configuration as the logits processor reads."""
    told = {"vocabulary_size": size, "fingerprint": "a"}
    return SimpleNamespace(additional_config={"paceline": told})


def decoded(outcomes) -> list[int]:
    return [it.judgement.next_token for it in outcomes if it.judgement is not None]


def plain(backend, spec, prompt, length=TOKENS) -> list[int]:
    (outcomes,) = run_all(backend, [item(backend, spec, prompt, Decode(length))])
    return decoded(outcomes)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_vllm_says_what_our_own_engine_says(sampling, backend, tokenizer, oracle):
    own = TransformersBackend(str(MODEL))
    for prompt in (tokenizer.encode(each).ids for each in PROMPTS):
        spec = spec_of(sampling, prompt)
        expected = ModelText(own, spec).draft_chain(prompt, count=TOKENS)
        actual = plain(backend, spec, prompt)
        if sampling.shapes or sampling.top_k:
            assert actual == expected
        else:
            told = Sampling(sampling.temperature, seed=spec.seed)
            compare(oracle, prompt, told, expected=expected, actual=actual)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_that_share_steps_by_chance_are_what_they_are_alone(sampling, backend):
    """Blocks, single tokens, drafts and streams of seven texts, and a session's call again."""
    chance = random.Random(3)
    prompts = [[chance.randrange(2048) for _ in range(chance.randint(1, 90))] for _ in range(7)]
    specs = [spec_of(sampling, prompt, seed=n) for n, prompt in enumerate(prompts)]
    expected = [plain(backend, spec, prompt) for spec, prompt in zip(specs, prompts, strict=True)]
    caches = [backend.new_cache(spec) for spec in specs]
    done = [0] * len(prompts)
    while min(done) < TOKENS:
        items = []
        group = [n for n in range(7) if done[n] < TOKENS and chance.random() < 0.8]
        for n in group:
            prefix, left = prompts[n] + expected[n][: done[n]], TOKENS - done[n]
            right = expected[n][done[n] : done[n] + chance.randint(0, min(6, left - 1))]
            wrong = [(expected[n][-1] + 1) % 2048] * (chance.randint(0, 2) if left > 8 else 0)
            judge = Judge(Proposal((*right, *wrong)))
            task = chance.choice([judge, judge, Draft(min(3, left)), Decode(min(5, left))])
            items.append(item(backend, specs[n], prefix, task, cache=caches[n]))
        for n, each, outcomes in zip(group, items, run_all(backend, items), strict=True):
            if isinstance(each.task, Judge):
                judged = outcomes[-1].judgement
                got = [*each.task.proposal.along(judged.accepted_path), judged.next_token]
            else:
                got = each.prefix[len(prompts[n]) + done[n] :].tolist()
            assert got == expected[n][done[n] : done[n] + len(got)]
            done[n] += len(got) if chance.random() < 0.8 else 0  # else its call is made again


def test_a_row_is_decided_with_the_noise_of_the_contract(backend):
    """Bit for bit: alike scores leave nothing but noise, with the seeds of the vectors."""
    from paceline_engine.vllm_backend.row_decider import RowDecider

    vectors = Path(__file__).parents[1] / "contract" / "vectors" / "noise.json"
    cases = {
        (int(it["seed"]), int(it["position"])) for it in json.loads(vectors.read_text())["vectors"]
    }
    size = 2048
    config = decider_config(size)
    for seed, position in sorted(cases):
        if position > 1 << 16:  # a position is as many tokens
            continue
        decider = RowDecider(config, torch.device("cpu"), False)
        spec = SessionSpec(1, SamplingParameters(1.0), seed=seed)
        params = SimpleNamespace(extra_args=row_task(spec, fingerprint="a"))
        prompt = [0] * min(position, 1)
        added = [(1, params, prompt, [0] * (position - len(prompt)))]
        decider.update_state(SimpleNamespace(removed=[], added=added, moved=[]))
        bits = [
            noise_bits(seed, position, token_id=it, purpose=Purpose.EXACT) for it in range(size)
        ]
        noise = [-math.log(-math.log(uniform(each))) for each in bits]
        # The model's head may be wider than the vocabulary.
        logits = torch.zeros(3, size + 8)
        chosen = decider.apply(logits).argmax(-1).tolist()
        assert chosen == [0, noise.index(max(noise)), 0], "rows of no task are left alone"


def test_the_decider_follows_rows_that_vllm_moves():
    from vllm.v1.sample.logits_processor import MoveDirectionality as Move

    from paceline_engine.vllm_backend.row_decider import RowDecider

    config = decider_config(50)
    decider = RowDecider(config, torch.device("cpu"), False)
    specs = [SessionSpec(1, SamplingParameters(1.0), seed=n) for n in range(4)]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))

    def tell(*, removed=(), added=(), moved=()):
        new = [
            (
                row,
                SimpleNamespace(extra_args=row_task(specs[n], fingerprint="a")),
                [1] * (n + 1),
                [],
            )
            for row, n in added
        ]
        decider.update_state(SimpleNamespace(removed=removed, added=new, moved=moved))

    def chosen_by(order):
        rows = [logits[row : row + 1] for row in range(len(order))]
        return [
            choose_tokens(
                row, first_position=n + 1, parameters=specs[n].sampling, seed=specs[n].seed
            )[0]
            for row, n in zip(rows, order, strict=True)
        ]

    tell(added=[(0, 0), (1, 1), (2, 2), (3, 3)])
    assert decider.apply(logits.clone()).argmax(-1).tolist() == chosen_by([0, 1, 2, 3])
    tell(removed=[1], moved=[(3, 1, Move.UNIDIRECTIONAL), (0, 2, Move.SWAP)])
    assert decider.apply(logits[:3].clone()).argmax(-1).tolist() == chosen_by([2, 3, 0])


def test_a_decider_ends_its_process_where_the_serving_node_has_another_model():
    """Else the text would be of neither model, and nobody would know."""
    from paceline_engine.vllm_backend.row_decider import RowDecider

    decider = RowDecider(decider_config(50), torch.device("cpu"), False)
    params = SimpleNamespace(extra_args=row_task(SessionSpec(1), fingerprint="b"))
    with pytest.raises(SystemExit):
        decider.update_state(SimpleNamespace(removed=[], added=[(0, params, [1], [])], moved=[]))


def test_given_tokens_are_scored_as_by_our_own_engine(backend, tokenizer):
    own = TransformersBackend(str(MODEL))
    tokens = tokenizer.encode(PROMPTS[1] * 12).ids
    with torch.inference_mode():
        whole = own.model(torch.tensor([tokens])).logits[0]
    logits = whole[:-1, : own.description.vocabulary_size]
    spec = SessionSpec(400)
    cache = backend.new_cache(spec)
    task = Judge(Proposal(tuple(tokens[1:])), score=True, logprobs=True, top_logprobs=3)
    for _ in range(2):  # the second time its rows are in the cache, where vLLM has no scores
        (outcomes,) = run_all(backend, [item(backend, spec, tokens[:1], task, cache=cache)])
        judged = outcomes[-1].judgement
        assert judged.accepted_path == tuple(range(len(tokens) - 1))
        assert judged.logprobs == pytest.approx(token_logprobs(logits, tokens[1:]), abs=1e-3)
        for told, expected in zip(judged.top_logprobs, top_logprobs(logits, 3), strict=True):
            assert [each for _, each in told] == pytest.approx(
                [each for _, each in expected], abs=1e-3
            )


def test_what_is_not_invariant_is_refused(backend, monkeypatch):
    """One bit of one log probability differs where requests share a step."""
    step = backend.engine.step

    def disturbed():
        outputs = step()
        if len(outputs) > 1:
            (row,) = outputs[0].outputs[0].logprobs
            likeliest = max(row.values(), key=lambda it: it.logprob)
            likeliest.logprob = math.nextafter(likeliest.logprob, 0)
        return outputs

    monkeypatch.setattr(backend.engine, "step", disturbed)
    with pytest.raises(ModelLoadError, match="cannot be served with --invariant"):
        check_invariance(backend)
