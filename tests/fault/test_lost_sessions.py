"""A session that is evicted, or holds other tokens than it should, costs time and never a token."""

from __future__ import annotations

import pytest

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.in_process import in_process_system
from support.oracle import Oracle, Sampling

# More than one window of plain decoding.
PROMPT, TOKENS = [5, 6, 7, 8, 9, 10], 80
# On a busy machine the damage may come after the last call.
ATTEMPTS = 4


@pytest.fixture(scope="module")
def models(tiny_pair):
    """A drafter's and two targets', loaded once: each test has hosts of its own."""
    return [TransformersBackend(str(getattr(tiny_pair, it))) for it in ("drafter", *["target"] * 2)]


@pytest.fixture(scope="module")
def expected(tiny_pair):
    return tuple(Oracle(tiny_pair.target).decode(PROMPT, Sampling(), TOKENS))


def host(model):
    return ModelHost(lambda: model, limits=HostLimits(warm_up_rounds=0))


def evict(session, of):
    of.close_session(session.session_id)


def swap_last_token(session, of):
    length = session.held_length
    if length:
        last = session._prefix.tokens()[-1]
        session._prefix.truncate(length - 1)
        session._prefix.extend([(last + 1) % of.description.vocabulary_size])


def forget_last_tokens(session, of):
    session._prefix.truncate(max(0, session.held_length - 3))


def tamper(damage, hosts):
    """Damage every session of some hosts; say how many there were."""
    sessions = [(session, each) for each in hosts for session in each._sessions]
    for session, each in sessions:
        damage(session, each)
    return len(sessions)


# Every two of a strategy, a damage and a role meet; plain decoding has no drafter.
CASES = [
    ("autoregressive", evict, "targets"),
    ("autoregressive", swap_last_token, "targets"),
    ("autoregressive", forget_last_tokens, "targets"),
    ("speculative", evict, "drafters"),
    ("speculative", swap_last_token, "targets"),
    ("speculative", forget_last_tokens, "drafters"),
    ("distributed", evict, "targets"),
    ("distributed", swap_last_token, "drafters"),
    ("distributed", forget_last_tokens, "targets"),
]


@pytest.mark.parametrize(("strategy", "damage", "role"), CASES)
async def test_a_damaged_session_costs_no_token(strategy, damage, role, models, expected):
    drafter, *targets = map(host, models)
    repair = "session_lost" if damage is evict else "prefix_resent"
    async with in_process_system(drafters=[drafter], targets=targets) as system:
        for _ in range(ATTEMPTS):
            generation = system.client.generate(
                PROMPT,
                strategy=strategy,
                max_tokens=TOKENS,
                lookahead=3,
                targets=2,
                ignore_eos=True,
            )
            damaged = 0
            async for _ in generation:
                damaged += tamper(damage, getattr(system, role))
            done = await generation.collect()
            assert done.token_ids == expected
            await system.settled()
            repairs = done.finished.statistics.fallbacks.get(repair, 0)
            if repairs:
                break
        assert damaged > 0
        assert repairs > 0
