from __future__ import annotations

import threading
import time
from array import array
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.model_backend import Feed
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.simulated import (
    SimulatedBackend,
    SimulatedModel,
    simulated_tokenizer,
)
from paceline_engine.terms.backend import ForwardInterrupted, Interrupt, ModelLoadError
from paceline_engine.terms.calls import SessionSpec
from unit.engine.conftest import continuation, instant, path

SPEC = SessionSpec(4096)
PROMPT = [1, 2, 3]


def test_the_text_is_a_function_of_salt_seed_and_prefix():
    spec = SessionSpec(4096, SamplingParameters(temperature=1.0), seed=5)
    text = continuation(ModelText(instant(), spec), PROMPT, 20)
    assert continuation(ModelText(instant(), spec), PROMPT, 20) == text
    others = [
        continuation(ModelText(instant(salt=1), spec), PROMPT, 20),
        continuation(ModelText(instant(), SPEC), PROMPT, 20),
        continuation(ModelText(instant(), spec), [1, 9, 3], 20),
    ]
    assert all(not set(zip(text, other, strict=True)) & {(x, x) for x in text} for other in others)


def test_greedy_text_does_not_depend_on_the_seed():
    seeded = SessionSpec(4096, seed=5)
    assert continuation(ModelText(instant(), seeded), PROMPT, 5) == continuation(
        ModelText(instant(), SPEC), PROMPT, 5
    )


def test_a_block_is_judged_as_plain_decoding_would():
    oracle = continuation(ModelText(instant(), SPEC), PROMPT, 8)
    for wrong_at in range(5):
        block = oracle[:4]
        if wrong_at < 4:
            block[wrong_at] ^= 1
        judged = ModelText(instant(), SPEC).judge(PROMPT, block, logprobs=True)
        assert (judged.accepted_path, judged.next_token) == (path(wrong_at), oracle[wrong_at])
        assert judged.logprobs == (0.0,) * (wrong_at + 1)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9, 1.0])
def test_a_drafter_agrees_as_often_as_it_is_told_to(rate):
    # n = 4000; Hoeffding: off by more than 0.05 with p = 2 exp(-2 n 0.05^2) = 4e-9.
    target, drafter = ModelText(instant(), SPEC), ModelText(instant(acceptance_rate=rate), SPEC)
    text, agreed = array("I", PROMPT), 0
    for _ in range(4000):
        (drafted,) = drafter.draft(text).token_ids
        text.extend(target.draft(text).token_ids)
        agreed += drafted == text[-1]
    assert agreed / 4000 == pytest.approx(rate, abs=0.05 if 0 < rate < 1 else 0)


def test_a_first_forward_takes_ttft_and_the_others_tpot():
    model = SimulatedModel(ttft_seconds=0.02, tpot_seconds=0.005, row_seconds=0.001)
    backend = SimulatedBackend(model)
    text = ModelText(backend, SPEC)

    def seconds(*row_counts, others=()):
        feeds = [Feed(text.cache, array("I", range(count)), scored_count=1) for count in row_counts]
        feeds += [
            Feed(backend.new_cache(SPEC), array("I", range(n)), scored_count=1) for n in others
        ]
        return backend._forward_seconds(feeds)

    assert seconds(500) == 0.02
    started = time.monotonic()
    text.draft(PROMPT)
    assert time.monotonic() - started >= 0.02
    assert seconds(1) == 0.005
    assert seconds(5) == pytest.approx(0.009)
    assert seconds(2, 1, 2) == pytest.approx(0.009), "rows of several texts cost what one's do"
    assert seconds(5, others=[500]) == 0.02, "a first forward beside them takes as long as alone"
    assert seconds(30, others=[500]) == pytest.approx(0.034)


def test_a_wait_can_be_interrupted_and_nothing_is_kept_of_it():
    model = SimulatedModel(ttft_seconds=0.0, tpot_seconds=3600)
    interrupt = Interrupt()
    text = ModelText(SimulatedBackend(model), SPEC, interrupt=interrupt)
    (first,) = text.draft(PROMPT).token_ids
    threading.Timer(0.01, interrupt.set).start()
    with pytest.raises(ForwardInterrupted):
        text.draft([*PROMPT, first])
    assert text.cache.token_ids.tolist() == PROMPT


def test_greedy_rejection_sends_point_masses():
    spec = SessionSpec(64, rule=VerificationRule.REJECTION)
    drafted = ModelText(instant(), spec).draft(PROMPT)
    assert drafted.distributions == (SparseDistribution(drafted.token_ids, (1.0,)),)


def test_the_tokenizer_reads_any_text_and_writes_words():
    tokenizer = Tokenizer.from_str(simulated_tokenizer(2048).decode())
    assert tokenizer.get_vocab_size() == 2048
    text = "naïve  \n\t→ 漢字 🚴 " + "".join(map(chr, range(32, 127)))
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([256, 257]) == " ba be"
    assert simulated_tokenizer(2048) == simulated_tokenizer(2048)
    assert simulated_tokenizer(255) is None


def test_drafter_and_target_share_a_tokenizer_and_nothing_else():
    target, drafter = instant().description, instant(acceptance_rate=0.5).description
    assert target.tokenizer_fingerprint == drafter.tokenizer_fingerprint
    assert target.fingerprint != drafter.fingerprint


@pytest.mark.parametrize(
    "settings",
    [{"acceptance_rate": 1.1}, {"acceptance_rate": float("nan")}, {"vocabulary_size": 1}],
)
def test_settings_out_of_their_limits_are_refused(settings):
    with pytest.raises(ModelLoadError):
        instant(**settings)


def test_a_tiny_vocabulary_works():
    assert set(continuation(ModelText(instant(vocabulary_size=2), SPEC), [0], 50)) == {0, 1}


SELF_RATES = (0.8, 0.5, 0.3)


def self_drafting(**settings):
    return ModelText(instant(self_rates=SELF_RATES, **settings), SPEC)


def test_its_own_guesses_are_right_as_often_as_they_are_told_to():
    # n = 2000; Hoeffding: off by more than 0.05 with p = 2 exp(-2 n 0.05^2) = 9e-5. It is no draw:
    # the same text each time.
    count, target = 2000, self_drafting(self_nodes=30)
    text = [*PROMPT, *continuation(target, PROMPT, count + 4)]
    tree = target.judge(PROMPT, propose=True).proposal
    # The first guesses at each depth: those after the best one before.
    levels = [[], [], []]
    best = [0]
    for index, (parent, depth) in enumerate(zip(tree.parents, tree.depths(), strict=True)):
        if parent == best[depth]:
            levels[depth].append(index)
            best += [index + 1] * (len(best) == depth + 1)
    ranks = [[], [], []]
    for length in range(len(PROMPT), len(PROMPT) + count):
        guesses = target.judge(text[:length], propose=True).proposal
        for place, level in enumerate(levels):
            tokens = guesses.along(level[:3])
            right = text[length + 1 + place]
            ranks[place].append(tokens.index(right) if right in tokens else 3)
    for rate, own in zip(SELF_RATES, ranks, strict=True):
        expected = [rate, (1 - rate) * 0.4, (1 - rate) * 0.4 * 0.6]
        assert [own.count(rank) / count for rank in range(3)] == pytest.approx(expected, abs=0.05)


def test_what_it_proposes_is_the_tree_of_the_likeliest_guesses():
    target = self_drafting(self_nodes=5)
    proposal = target.judge(PROMPT, propose=True).proposal
    # Worths .8; .4 and beside it .16; .12 and beside it .112. The first one's runner-up: .08.
    assert proposal.parents == (0, 1, 1, 2, 2)
    assert instant(self_rates=SELF_RATES, self_nodes=5).description.self_draft_depth == 3


def test_drafting_for_itself_changes_nothing_else():
    plain = instant()
    assert plain.description.self_draft_depth == 0
    assert plain.description.fingerprint == instant(self_rates=SELF_RATES).description.fingerprint
    judged = self_drafting().judge(PROMPT, [1, 2], logprobs=True, propose=True)
    assert judged.proposal.token_ids
    assert replace(judged, proposal=Proposal()) == ModelText(plain, SPEC).judge(
        PROMPT, [1, 2], logprobs=True
    )


def test_rates_out_of_their_limits_are_refused():
    with pytest.raises(ModelLoadError, match="self_rates"):
        instant(self_rates=(0.5, 1.5))
