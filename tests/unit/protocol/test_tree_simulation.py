"""Trees on the virtual clock: what simulated drafters find, and what targets say of it."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_contract.proposal import Proposal
from paceline_engine.terms.draft_tree import DraftTree
from paceline_protocol.laboratory.drafted_tree import DraftedTree
from paceline_protocol.laboratory.oracles import AgreementOracle, judge_tree
from paceline_protocol.laboratory.simulation import ServerLatency, simulate
from paceline_protocol.laboratory.spans import SpanKind
from paceline_protocol.messages import (
    BlockVerified,
    EmitTokens,
    Finish,
    FinishReason,
    StartDraft,
    StartVerify,
    TokensDrafted,
)
from paceline_protocol.ranks import LLAMA_SHARES, runner_up_shares
from support.examples import examples

PROMPT_LENGTH = 3


class TreeRounds:
    """Draft a tree, verify all of it, repeat: the least that uses trees."""

    def __init__(self, prompt, *, max_tokens, depth, width, branches):
        self.prefix, self.end = prompt, len(prompt) + max_tokens
        self.depth, self.width, self.branches = depth, width, branches
        self.count, self.forwards, self.proposal = 0, 0, Proposal()

    def start(self):
        self.count, self.forwards, self.proposal = self.count + 1, 0, Proposal()
        return [
            StartDraft(
                self.count,
                0,
                self.prefix,
                max_tokens=self.depth,
                width=self.width,
                branch_count=self.branches,
            )
        ]

    def handle(self, event):
        match event:
            case TokensDrafted(proposal=news):
                before = self.proposal
                self.proposal = Proposal(
                    before.token_ids + news.token_ids, before.parents + news.parents
                )
                self.forwards += 1
                if self.forwards == self.depth:
                    return [StartVerify(self.count, 0, self.prefix, self.proposal, depth=0)]
            case BlockVerified(accepted_path=path, next_token=next_token):
                assert self.proposal.leads_along(path)
                tokens = (*self.proposal.along(path), next_token)[: self.end - len(self.prefix)]
                self.prefix += tokens
                emitted = EmitTokens(tokens, (True,) * (len(tokens) - 1) + (False,))
                if len(self.prefix) == self.end:
                    return [emitted, Finish(FinishReason.LENGTH)]
                return [emitted, *self.start()]
        return []


def run(
    *,
    width,
    branches,
    acceptance_rate=0.6,
    shares=None,
    seed=0,
    max_tokens=40,
    drafter=None,
    target=None,
):
    oracle = AgreementOracle(
        acceptance_rate, seed=seed, length=PROMPT_LENGTH + max_tokens + 10, shares=shares
    )
    result = simulate(
        TreeRounds(
            oracle.prompt(PROMPT_LENGTH),
            max_tokens=max_tokens,
            depth=4,
            width=width,
            branches=branches,
        ),
        oracle,
        targets=[target or ServerLatency(10, 10)],
        drafters=[drafter or ServerLatency(1, 1)],
    )
    assert result.token_ids == [2 * (PROMPT_LENGTH + n) for n in range(max_tokens)]
    return result


def test_the_right_token_has_the_first_rank_with_the_acceptance_rate_and_later_ones_by_the_decay():
    """20,000 draws; each share within 5 standard errors: false alarm below 1e-5."""
    count, rate, decay = 20_000, 0.6, 0.4
    oracle = AgreementOracle(rate, seed=4, length=count + 1, shares=runner_up_shares(decay))
    ranks = Counter()
    for position in range(1, count + 1):
        token_ids = [token for token, _ in oracle.rank(0, [0] * position, width=6)]
        assert len(set(token_ids)) == 6
        ranks[token_ids.index(2 * position) if 2 * position in token_ids else None] += 1
    for rank in range(6):
        share = rate if rank == 0 else (1 - rate) * decay * (1 - decay) ** (rank - 1)
        error = (share * (1 - share) / count) ** 0.5
        assert ranks[rank] / count == pytest.approx(share, abs=5 * error)


def test_wider_drafts_find_what_narrower_ones_do_and_the_chain_is_the_same():
    oracle = AgreementOracle(0.5, seed=1, length=200)
    for position in range(1, 200):
        text = [0] * position
        wide = oracle.rank(0, text, width=8)
        assert wide[0][0] == oracle.draft(0, text)
        assert [right for right, _ in wide[:3]] == [
            right for right, _ in oracle.rank(0, text, width=3)
        ]


def test_no_token_is_right_after_a_wrong_one():
    oracle = AgreementOracle(0.9, seed=1, length=50)
    for position in range(2, 50):
        found = oracle.rank(0, [0] * (position - 1) + [7], width=4)
        assert all(token % 2 for token, _ in found)


def test_a_published_vector_has_its_own_shares_of_the_rejections():
    shares = [round(sum(LLAMA_SHARES[: width - 1]), 2) for width in (2, 3, 4)]
    assert shares == [0.30, 0.45, 0.51]
    oracle = AgreementOracle(0.0, seed=3, length=4000, shares=LLAMA_SHARES)
    found = sum(
        2 * position in [token for token, _ in oracle.rank(0, [0] * position, width=3)]
        for position in range(1, 4000)
    )
    # Three standard errors of 4,000 draws, and some.
    assert found / 4000 == pytest.approx(0.45, abs=0.03)


@settings(max_examples=examples(60), deadline=None)
@given(
    branches=st.integers(0, 4),
    width=st.integers(1, 4),
    weights=st.lists(st.integers(0, 9), min_size=64, max_size=64),
    steps=st.integers(1, 5),
)
def test_a_simulated_tree_grows_as_a_model_servers(branches, width, weights, steps):
    tree, theirs = DraftedTree(branches), DraftTree(branches)
    draws, token_ids = itertools.cycle(weights), itertools.count()
    for _ in range(steps):
        ranked = [
            sorted(
                ((next(token_ids), next(draws) / 10) for _ in range(width)), key=lambda it: -it[1]
            )
            for _ in tree.due
        ]
        news, grown = tree.grow(ranked), theirs.grown(ranked)
        expected = grown.news_since(theirs)
        assert (news.token_ids, news.parents) == (
            tuple(expected.token_ids),
            tuple(expected.parents),
        )
        theirs = grown
        assert tree.due == tuple(index + 1 for index in theirs.due)


@pytest.mark.parametrize(("width", "branches"), [(2, 0), (3, 2), (4, 3)])
def test_a_trees_verdict_is_that_of_its_chain_that_goes_furthest(width, branches):
    result = run(width=width, branches=branches)
    oracle = AgreementOracle(0.6, seed=0, length=60)
    verified = [span for span in result.spans if span.kind is SpanKind.VERIFY]
    assert {len(span.token_ids) for span in verified} == {width * (1 + 3 * (1 + branches))}
    for span in verified:
        proposal = Proposal(tuple(span.token_ids), tuple(span.parents))
        prefix = oracle.prompt(span.position)
        path, next_token = judge_tree(oracle, prefix, proposal)
        chains = [chain_to(proposal, index) for index in range(len(proposal))]
        verdicts = [(oracle.judge(prefix, proposal.along(chain)), chain) for chain in chains]
        (accepted, token_id), chain = max(verdicts, key=lambda each: each[0])
        assert (tuple(chain[:accepted]), token_id) == (path, next_token)


def chain_to(proposal, index):
    path = [index]
    while parent := proposal.parents[path[-1]]:
        path.append(parent - 1)
    return path[::-1]


def test_alternatives_make_fewer_rounds_and_what_follows_on_them_fewer_still():
    forwards = [
        sum(run(width=width, branches=branches, seed=seed).target_forwards for seed in range(20))
        for width, branches in ((1, 0), (3, 0), (3, 4))
    ]
    assert forwards[0] > 1.1 * forwards[1] > 1.1 * 1.1 * forwards[2]


def test_rows_of_trees_have_their_price():
    """With this seed nothing is right, and each round brings the target's one token."""
    drafter, target = ServerLatency(1, 1, row=1), ServerLatency(10, 10, row=1)
    result = run(
        width=3,
        branches=2,
        acceptance_rate=0.01,
        shares=(0.01, 0.01),
        max_tokens=2,
        drafter=drafter,
        target=target,
    )
    first, prefill, second, verified = (span.end - span.start for span in result.spans)
    branching = 3 * (1 + 2)  # three forwards with two rows beside the chain's
    assert (first, prefill) == (1 + branching, 10)  # a first forward has a price of its own
    assert second == 1 + branching  # both hold all but the correction
    tree_size = 3 + 3 * (3 + 3 + 3)
    assert verified == 10 + tree_size


def test_a_drafter_that_goes_on_where_it_has_branched_off_has_nothing_to_catch_up_with():
    tree = DraftedTree(1)
    tree.grow([[(5, 0.6), (6, 0.3)]])  # due: 5, and 6 beside it
    assert tree.held_length([5]) == tree.held_length([6]) == 0
    tree.grow([[(7, 0.6), (8, 0.3)], [(9, 0.9), (4, 0.05)]])  # due: 7, and 9 after 6
    assert [tree.held_length([*path, 3]) for path in ([5], [6], [5, 7], [6, 9], [8])] == [
        1,
        1,
        1,
        1,
        0,
    ]
    tree.grow([[(1, 1.0)], [(2, 1.0)]])
    assert tree.held_length([6, 9]) == 2
