"""REJECTION keeps the target's distribution: the streams' tokens against the exact probabilities.

Given the text before it, each token of a stream must be distributed as the target says. So its
rank, drawn uniformly from [F(before it), F(with it)) where F adds up the target's probabilities, is
uniform in [0, 1) and independent of the rank before. F adds up in the order of draft_probs over
target_probs: of all orders this one shows an output that leans towards the drafter undiluted, since
that ratio is what the likelihood of such an output is monotone in.

Power: a strategy gives STREAMS * LENGTH ranks. Each of its two tests (ranks, pairs of neighbours)
raises a false alarm with probability FALSE_ALARM (Pearson's chi-square; seeds are fixed, so what is
left to chance is which of two calls is faster), and finds ranks whose distribution over CELLS is
further than DETECTED from uniform, in total variation, with probability 0.99. `make test` draws
SHORT_STREAMS, and finds SHORT_DETECTED. That it finds the drafter's distribution is
tested, too.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.distributions import fit
from support.draft_vocabularies import narrowed
from support.in_process import in_process_system

STREAMS, LENGTH, CELLS, NEIGHBOUR_CELLS = 6, 400, 20, 5
FALSE_ALARM, DETECTED = 1e-6, 0.1
SHORT_STREAMS, SHORT_DETECTED = 1, 0.25
PROMPT, TEMPERATURE, PAUSE_SECONDS = [3, 1, 4, 1, 5], 0.8, 0.005
SCORED = (0, 1, 2, 4, 5, 7, 9, 10, 13, 15)


@pytest.fixture(scope="module")
def drafter_model(sixteen_token_model, tmp_path_factory):
    """The target with noise on its head: it guesses well, and wrong often enough."""
    directory = tmp_path_factory.mktemp("sixteen-drafter")
    model = AutoModelForCausalLM.from_pretrained(sixteen_token_model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        head = model.lm_head.weight
        head += 0.7 * head.std() * torch.randn(head.shape, generator=noise)
    model.save_pretrained(directory)
    shutil.copy(sixteen_token_model / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def narrow_drafter(drafter_model, tmp_path_factory):
    """The drafter, which scores ten of the sixteen tokens."""
    made = tmp_path_factory.mktemp("narrow") / "drafter"
    return narrowed(drafter_model, made, token_ids=SCORED)


@pytest.fixture(scope="module")
def models(sixteen_token_model, drafter_model):
    """The target and the drafter, to know the exact probabilities from."""
    return [
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        for directory in (sixteen_token_model, drafter_model)
    ]


def host(directory, *, pause_seconds=0.0):
    """Serve a model; a target pauses in its forwards, so that the drafter gets ahead of it."""
    backend = TransformersBackend(str(directory))
    backend.decoder.layers[0].register_forward_pre_hook(lambda *_: time.sleep(pause_seconds))
    return ModelHost(lambda: backend, limits=HostLimits(warm_up_rounds=0))


@torch.inference_mode()
def ranks(token_ids, *, target, drafter, generator, scored=slice(None)):
    """Return each token's rank under the target, given the tokens before it.

    Args:
        scored: The tokens that the drafter scores; the others have the draft probability 0.
    """
    text = torch.tensor([[*PROMPT, *token_ids]])
    target_probs, draft_probs = (
        (model(text).logits[0, len(PROMPT) - 1 : -1].double() / TEMPERATURE).softmax(-1).numpy()
        for model in (target, drafter)
    )
    drafted = np.zeros_like(draft_probs)
    drafted[:, scored] = draft_probs[:, scored]
    order = np.argsort(drafted / target_probs, axis=-1)
    reached = np.cumsum(np.take_along_axis(target_probs, order, axis=-1), axis=-1)
    place = np.argmax(order == np.array(token_ids)[:, None], axis=-1)
    rows = np.arange(len(token_ids))
    share = target_probs[rows, token_ids]
    return reached[rows, place] - share * generator.random(len(token_ids))


def fit_uniform(streams):
    """Test the ranks, and the pairs of neighbours."""
    alone = Counter(int(rank * CELLS) for stream in streams for rank in stream)
    pairs = Counter(
        (int(left * NEIGHBOUR_CELLS), int(right * NEIGHBOUR_CELLS))
        for stream in streams
        for left, right in zip(stream[::2], stream[1::2], strict=False)
    )
    grid = [(left, right) for left in range(NEIGHBOUR_CELLS) for right in range(NEIGHBOUR_CELLS)]
    return (
        fit(alone, dict.fromkeys(range(CELLS), 1 / CELLS)),
        fit(pairs, dict.fromkeys(grid, 1 / len(grid))),
    )


@pytest.mark.parametrize(
    ("strategy", "drafter_kind", "target_count", "stream_count", "detected"),
    [
        ("distributed", "server_and_max_gram", 3, SHORT_STREAMS, SHORT_DETECTED),
        *(
            pytest.param(*way, STREAMS, DETECTED, marks=mark)
            for mark, *way in (
                (pytest.mark.long, "speculative", "server", 1),
                (pytest.mark.long, "distributed", "server_and_max_gram", 3),
                (pytest.mark.long, "speculative", "max_gram", 1),
                (pytest.mark.full, "distributed", "server", 1),
                (pytest.mark.full, "distributed", "server", 3),
                (pytest.mark.full, "distributed", "max_gram", 2),
            )
        ),
    ],
)
async def test_every_token_is_distributed_as_the_targets(
    strategy,
    drafter_kind,
    target_count,
    stream_count,
    detected,
    sixteen_token_model,
    drafter_model,
    models,
):
    texts = await draw_texts(
        sixteen_token_model,
        drafter_model,
        strategy=strategy,
        drafter_kind=drafter_kind,
        target_count=target_count,
        stream_count=stream_count,
    )
    check_distribution(texts, models, detected=detected)


@pytest.mark.parametrize(
    ("strategy", "stream_count", "detected"),
    [
        pytest.param("speculative", STREAMS, DETECTED, marks=pytest.mark.full),
        pytest.param("distributed", STREAMS, DETECTED, marks=pytest.mark.long),
    ],
)
async def test_it_is_so_if_the_drafter_scores_some_tokens_only(
    strategy, stream_count, detected, sixteen_token_model, narrow_drafter, models
):
    texts = await draw_texts(
        sixteen_token_model,
        narrow_drafter,
        strategy=strategy,
        drafter_kind="server",
        target_count=1,
        stream_count=stream_count,
    )
    check_distribution(texts, models, detected=detected, scored=SCORED)


async def draw_texts(
    target_folder, drafter_folder, *, strategy, drafter_kind, target_count, stream_count
):
    """Let a system write texts, some of whose drafts are accepted and some rejected."""
    texts, judged = [], Counter()
    targets = [host(target_folder, pause_seconds=PAUSE_SECONDS) for _ in range(target_count)]
    async with in_process_system(drafters=[host(drafter_folder)], targets=targets) as system:
        for seed in range(stream_count):
            done = await system.client.generate(
                PROMPT,
                max_tokens=LENGTH,
                temperature=TEMPERATURE,
                seed=seed,
                rule="rejection",
                strategy=strategy,
                drafter=drafter_kind,
                lookahead=3,
                targets=target_count,
                ignore_eos=True,
            ).collect()
            assert done.finished.promise == "rejection"
            texts.append(done.token_ids)
            judged["accepted"] += done.finished.statistics.accepted_token_count
            judged["rejected"] += done.finished.statistics.rejected_token_count
            judged["max-gram"] += done.finished.statistics.max_gram_drafted_token_count
    # What a text without a pattern repeats by chance is rarely right.
    fewest = stream_count * LENGTH / (50 if drafter_kind == "max_gram" else 10)
    assert min(judged["accepted"], judged["rejected"]) > fewest, judged
    assert bool(judged["max-gram"]) == (drafter_kind != "server")
    return texts


def check_distribution(texts, models, *, detected, scored=slice(None)):
    """Check that texts are distributed as the target says, and that another way would show."""
    target, drafter = models
    generator = np.random.default_rng(0)
    found, neighbours = fit_uniform(
        [
            ranks(it, target=target, drafter=drafter, generator=generator, scored=scored)
            for it in texts
        ]
    )
    assert min(found.p_value, neighbours.p_value) > FALSE_ALARM, (found, neighbours)
    assert found.detected_distance(false_alarm=FALSE_ALARM) < detected


def test_the_drafters_own_distribution_would_be_found_out(models):
    target, drafter = models
    generator = np.random.default_rng(1)
    texts = draw(drafter, generator)
    found, _ = fit_uniform(
        [ranks(it, target=target, drafter=drafter, generator=generator) for it in texts]
    )
    assert found.p_value < FALSE_ALARM
    found, neighbours = fit_uniform(
        [ranks(it, target=drafter, drafter=target, generator=generator) for it in texts]
    )
    assert min(found.p_value, neighbours.p_value) > FALSE_ALARM


@torch.inference_mode()
def draw(model, generator):
    """Sample texts from a model, without any of our code."""
    tokens, cache, texts = torch.tensor([PROMPT] * STREAMS), None, []
    for _ in range(LENGTH):
        step = model(tokens, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        probs = (step.logits[:, -1].double() / TEMPERATURE).softmax(-1).cumsum(-1)
        tokens = (probs < torch.from_numpy(generator.random((STREAMS, 1)))).sum(-1, keepdim=True)
        texts.append(tokens[:, 0])
    return torch.stack(texts, dim=1).tolist()
