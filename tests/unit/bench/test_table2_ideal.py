from dataclasses import replace

import pytest

from paceline_bench.simulated_servers import TABLE2, SimulatedServers
from paceline_bench.table2.ideal import BackendOracle, Plan, ideal_schedule
from paceline_bench.table2.online import make_prompt
from paceline_engine.scheduling.model_text import ModelText
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.terms.calls import SessionSpec
from paceline_protocol.laboratory.simulation import ServerLatency
from paceline_protocol.laboratory.spans import SpanKind
from paceline_protocol.methods import Strategy

PROMPT = make_prompt("a prompt")
SERVERS = SimulatedServers(
    target=ServerLatency(first=70, step=30),
    drafter=ServerLatency(first=7, step=4),
    acceptance_rate=0.6,
)
PLAIN = Plan(strategy=Strategy.AUTOREGRESSIVE, lookahead=0, target_count=1)
PLANS = [
    PLAIN,
    *(Plan(strategy=Strategy.SPECULATIVE, lookahead=k, target_count=1) for k in (1, 3, 8)),
    *(
        Plan(strategy=Strategy.SPECULATIVE, lookahead=k, target_count=1, drafts_ahead=True)
        for k in (1, 3, 8)
    ),
    *(
        Plan(
            strategy=Strategy.DISTRIBUTED, lookahead=k, target_count=n, broadcast_prefill=broadcast
        )
        for k in (1, 3)
        for n in (1, 2, 7)
        for broadcast in (False, True)
    ),
]


class Backend:
    """The drafter and the target as their servers run them: the reference for the oracle."""

    def __init__(self, acceptance_rate):
        waits_not = {"ttft_seconds": 0, "tpot_seconds": 0}
        drafter = SimulatedModel(**waits_not, acceptance_rate=acceptance_rate)
        spec = SessionSpec(reserve_length=4096)
        self._target = ModelText(SimulatedBackend(SimulatedModel(**waits_not)), spec)
        self._drafter = ModelText(SimulatedBackend(drafter), spec)

    def drafts(self, text):
        return self._drafter.draft(text).token_ids[0]

    def continues(self, text):
        return self._target.judge(text).next_token


def si_rounds(lookahead, max_tokens):
    """Drafted and accepted tokens of each round of SI, decided token by token."""
    backend = Backend(SERVERS.acceptance_rate)
    text, end = list(PROMPT), len(PROMPT) + max_tokens
    while len(text) < end:
        drafted = min(lookahead, end - len(text) - 1)
        guess, accepted = list(text), 0
        for _ in range(drafted):
            guess.append(backend.drafts(guess))
        while accepted < drafted and guess[len(text)] == backend.continues(text):
            text.append(guess[len(text)])
            accepted += 1
        text.append(backend.continues(text))
        yield drafted, accepted


def test_plain_decoding_is_a_prefill_and_steps():
    schedule = ideal_schedule(SERVERS, PLAIN, prompt=PROMPT, max_tokens=20)

    assert schedule.total_ns == 70 + 19 * 30
    (call,) = schedule.critical_path
    assert (call.kind, call.is_first, call.forward_count) == (SpanKind.DECODE, True, 20)


@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_si_is_the_sum_of_its_rounds(lookahead):
    plan = Plan(strategy=Strategy.SPECULATIVE, lookahead=lookahead, target_count=1)
    schedule = ideal_schedule(SERVERS, plan, prompt=PROMPT, max_tokens=40)
    rounds = list(si_rounds(lookahead, 40))

    drafts, verifications = sum(drafted for drafted, _ in rounds), len(rounds)
    assert schedule.total_ns == 7 + (drafts - 1) * 4 + 70 + (verifications - 1) * 30
    assert sum(schedule.result.accepted) == sum(accepted for _, accepted in rounds)
    # A draft is one call, however many tokens it streams.
    calls = sum(drafted > 0 for drafted, _ in rounds) + verifications
    assert len(schedule.critical_path) == calls


def test_dsi_with_a_perfect_drafter_waits_for_the_drafts_and_one_forward():
    servers = SimulatedServers(
        target=ServerLatency(first=10, step=10),
        drafter=ServerLatency(first=1, step=1),
        acceptance_rate=1.0,
    )
    plan = Plan(strategy=Strategy.DISTRIBUTED, lookahead=1, target_count=16)
    schedule = ideal_schedule(servers, plan, prompt=PROMPT, max_tokens=12)

    assert schedule.total_ns == 11 + 10
    draft, verification = schedule.critical_path
    assert (draft.kind, draft.forward_count) == (SpanKind.DRAFT, 11)
    assert (verification.kind, verification.duration_ns) == (SpanKind.VERIFY, 10)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_has_the_same_output_and_a_critical_path_as_long_as_itself(plan):
    schedule = ideal_schedule(SERVERS, plan, prompt=PROMPT, max_tokens=25)
    plain = ideal_schedule(SERVERS, PLAIN, prompt=PROMPT, max_tokens=25)

    assert schedule.result.token_ids == plain.result.token_ids
    assert sum(call.duration_ns for call in schedule.critical_path) == schedule.total_ns
    assert schedule.critical_path[-1].kind is not SpanKind.DRAFT


TWO_TOKENS = SimulatedServers(
    target=ServerLatency(first=30, step=30),
    drafter=ServerLatency(first=20, step=20),
    acceptance_rate=0.9,
    vocabulary_size=2,
)
BINARY = make_prompt("a prompt", vocabulary_size=2)


def test_the_text_extends_drafts_in_no_time_and_gains_where_the_drafter_is_slow():
    plain = ideal_schedule(TWO_TOKENS, PLAIN, prompt=BINARY, max_tokens=60)
    dsi = Plan(strategy=Strategy.DISTRIBUTED, lookahead=2, target_count=4)
    extended = replace(dsi, is_extended=True)
    alone, beside = (
        ideal_schedule(TWO_TOKENS, plan, prompt=BINARY, max_tokens=60) for plan in (dsi, extended)
    )
    assert plain.result.token_ids == alone.result.token_ids == beside.result.token_ids
    assert sum(call.duration_ns for call in beside.critical_path) == beside.total_ns
    by_text = [span for span in beside.result.spans if span.machine == (False, 1)]
    assert by_text
    assert all(span.start == span.end for span in by_text)
    assert any(len(span.token_ids) > 1 for span in by_text)
    answered = [span for span in beside.result.spans if span.machine == (False, 0)]
    assert beside.result.drafter_forwards == sum(len(span.token_ids) for span in answered)
    assert beside.total_ns < alone.total_ns


def test_nodes_have_the_vocabulary_of_simulated_models():
    model = SimulatedModel(ttft_seconds=0, tpot_seconds=0)
    assert SERVERS.vocabulary_size == model.vocabulary_size


def test_of_two_tokens_the_text_guesses_half():
    """2,000 guesses, within 5 standard errors."""
    oracle, text, right, count = BackendOracle(TWO_TOKENS, length=4000), list(BINARY), 0, 2000
    for _ in range(count):
        _, token_id = oracle.judge(text, ())
        right += oracle.draft(1, text) == token_id
        text.append(token_id)
    assert right / count == pytest.approx(0.5, abs=5 * (0.25 / count) ** 0.5)


def test_the_oracle_says_what_the_backend_says():
    backend, oracle = Backend(0.6), BackendOracle(SERVERS, length=300)
    text = list(PROMPT)
    agreed = 0
    for _ in range(100):
        draft, token = oracle.draft(0, text), oracle.judge(text, ())[1]
        assert (draft, token) == (backend.drafts(text), backend.continues(text))
        assert oracle.judge(text, (draft,))[0] == (draft == token)
        agreed += draft == token
        text.append(token)
    assert 40 < agreed < 80


def test_the_rows_are_those_of_the_paper():
    assert len(TABLE2) == 10
    vicuna = TABLE2[0]
    assert vicuna.name == "vicuna-13b/cnn-dm"
    assert vicuna.servers.target == ServerLatency(first=202_072_000, step=37_700_000)
    assert vicuna.servers.drafter == ServerLatency(first=2_600_000, step=2_500_000)
    assert all(0.5 < row.servers.acceptance_rate < 1 for row in TABLE2)
    assert sum(row.paper_speed_up for row in TABLE2) / 10 == pytest.approx(1.52, abs=0.01)
    for row in TABLE2:
        assert row.reference.dsi < row.reference.si
        assert row.reference.repaired_dsi < row.reference.repaired_si


def test_the_oracle_ranks_as_a_drafter_of_that_rank_decay_does():
    """3,000 places; the second is right with 0.4 x 0.5, within 5 standard errors."""
    oracle = BackendOracle(replace(SERVERS, rank_decay=0.5), length=4000)
    text, second, count = list(PROMPT), 0, 3000
    for _ in range(count):
        ranked = oracle.rank(0, text, width=3)
        assert ranked[0][0] == oracle.draft(0, text)
        _, right = oracle.judge(text, ())
        second += ranked[1][0] == right
        text.append(right)
    assert second / count == pytest.approx(0.2, abs=5 * (0.2 * 0.8 / count) ** 0.5)
