"""One method after another on the same text: nothing is lost, wrong, asked twice or left behind."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import Proposal
from paceline_protocol.invariants import Invariant
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    EmitTokens,
    LookaheadChanged,
    StartDecode,
    StartDraft,
    StartVerify,
    StopDecode,
    StopDraft,
    TokensDecoded,
)
from paceline_protocol.methods import METHODS, Strategy, create_method
from paceline_protocol.succession import SuccessiveDecoding
from paceline_protocol.task import DecodingTask, DispatchPolicy
from support.chains import drafted
from unit.protocol.checker import CheckedMethod
from unit.protocol.test_invariants import models, tasks, trees, weathers
from unit.protocol.world import World

_SERVERS = CapacityChanged(targets=(0, 1), drafters=(0,))
_TASK = DecodingTask(prompt=(7,), max_tokens=12, lookahead=2)
_FOR_ANY = {s: m for s, m in METHODS.items() if not m.self_drafts}


def successor(strategy, task):
    """Make the method of a strategy for what is left of a task."""

    def create(emitted, capacity):
        rest = replace(
            task,
            prompt=task.prompt + emitted,
            max_tokens=task.max_tokens - len(emitted),
            broadcast_prefill=False,
            keep_prefill=False,
        )
        return create_method(strategy, rest, capacity=capacity)

    return create


def begin(strategy, task=_TASK, servers=_SERVERS):
    return SuccessiveDecoding(create_method(strategy, task, capacity=servers), servers)


class _Changing(World):
    """A world in which methods follow each other, in turn, after so many events each."""

    def __init__(self, *args, strategies, every, **options):
        super().__init__(*args, **options)
        self.strategies, self.every, self.count = strategies, every, 0

    def _next_event(self):
        self.count += 1
        if self.count % self.every == 0:
            strategy = self.strategies[self.count // self.every % len(self.strategies)]
            self.method.method.become(self._create(strategy), drafts=METHODS[strategy].drafts)
        elif self.count % self.every == 1:
            return LookaheadChanged(self.method.task.lookahead + self.count % 5)
        return super()._next_event()

    def _create(self, strategy):
        create = successor(strategy, self.method.task)

        def begin_anew(emitted, capacity):
            self.method.warm_drafters.clear()  # each method has a first draft
            return create(emitted, capacity)

        return begin_anew


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    strategies=st.lists(st.sampled_from([*_FOR_ANY]), min_size=2, max_size=4),
    task=tasks | trees,
    models=models,
    weather=weathers,
    seed=st.integers(0, 10**9),
    every=st.sampled_from([1, 3, 7]),
    target_count=st.integers(1, 3),
    drafter_count=st.integers(0, 2),
    text=st.booleans(),
)
def test_what_holds_for_each_method_holds_for_several_in_turn(
    strategies, task, models, weather, seed, every, target_count, drafter_count, text
):
    task = replace(
        task,
        rule=VerificationRule.EXACT,
        dispatch=DispatchPolicy.WORK_CONSERVING,
        max_tokens=min(task.max_tokens, 30),
    )
    servers = CapacityChanged(
        tuple(range(target_count)),
        tuple(range(drafter_count + text)),
        text=drafter_count if text else None,
    )
    # A change takes the frontier from one method and gives it to the next.
    kept = frozenset(Invariant) - {Invariant.BUSY_FRONTIER, Invariant.NO_PREEMPTION}
    method = CheckedMethod(
        begin(strategies[0], task, servers),
        row=replace(METHODS[Strategy.DISTRIBUTED], invariants=kept),
        task=task,
        capacity=servers,
        target=models,
    )
    _Changing(
        method,
        models,
        servers=servers,
        weather=weather,
        seed=seed,
        strategies=strategies,
        every=every,
    ).run()


def test_a_method_ends_with_its_verdict_and_plain_decoding_goes_on():
    method = begin(Strategy.SPECULATIVE)
    method.start()
    method.handle(drafted(1, [5, 6]))
    method.become(successor(Strategy.AUTOREGRESSIVE, _TASK), drafts=False)
    commands = method.handle(BlockVerified(1, (0,), 8))
    assert [type(it) for it in commands] == [EmitTokens, StartDecode]
    assert commands[1].prefix == (7, 5, 8)
    assert commands[1].max_tokens == 10
    assert method.statistics.accepted == 1
    assert method.statistics.rejected == 1


def test_what_ran_ahead_is_withdrawn_and_what_was_only_about_to_is_not_begun():
    method = begin(Strategy.DISTRIBUTED)
    first = method.start()
    draft, verify = (
        next(it for it in first if isinstance(it, c)) for c in (StartDraft, StartVerify)
    )
    more = method.handle(drafted(draft.draft_id, [5, 6]))
    ahead = next(it for it in more if isinstance(it, StartVerify))
    method.become(successor(Strategy.AUTOREGRESSIVE, _TASK), drafts=False)
    commands = method.handle(BlockVerified(verify.verify_id, (), 5))
    assert AbandonVerify(ahead.verify_id, by_rejection=False) in commands
    assert StopDraft(draft.draft_id, by_rejection=False) in commands
    assert [it for it in commands if isinstance(it, StartDraft | StartVerify)] == []
    assert method.handle(BlockVerified(ahead.verify_id, (0,), 9)) == [], "it comes too late"


def test_a_method_that_does_not_pay_by_its_latest_verdict_makes_no_call_more():
    rejected_counts = []

    def reconsider():
        rejected_counts.append(method.statistics.rejected)
        method.become(successor(Strategy.AUTOREGRESSIVE, _TASK), drafts=False)

    first = create_method(Strategy.SPECULATIVE, _TASK, capacity=_SERVERS)
    method = SuccessiveDecoding(first, _SERVERS, reconsider=reconsider)
    method.start()
    method.handle(drafted(1, [5, 6]))
    assert rejected_counts == [], "nothing is final yet"
    commands = method.handle(BlockVerified(1, (0,), 8))
    assert rejected_counts == [1], "its latest verdict counts"
    assert [type(it) for it in commands] == [EmitTokens, StartDecode]


def test_nobody_reconsiders_a_text_that_has_ended():
    asked = []
    task = replace(_TASK, max_tokens=1)
    first = create_method(Strategy.AUTOREGRESSIVE, task, capacity=_SERVERS)
    method = SuccessiveDecoding(first, _SERVERS, reconsider=lambda: asked.append(1))
    method.start()
    method.handle(TokensDecoded(1, (4,)))
    assert asked == []


def test_a_block_of_si_becomes_longer_with_all_that_is_drafted():
    method = begin(Strategy.SPECULATIVE)
    method.start()
    assert method.handle(LookaheadChanged(4)) == []
    commands = method.handle(drafted(1, [5, 6]))
    assert commands == [StartDraft(2, 0, (7, 5, 6), max_tokens=2, chunk_tokens=2)]
    verify = method.handle(drafted(2, [1, 2]))[-1]
    assert verify.proposal == Proposal((5, 6, 1, 2))


def test_a_method_that_drafts_waits_for_a_drafter():
    alone = CapacityChanged(targets=(0,), drafters=())
    method = begin(Strategy.AUTOREGRESSIVE, servers=alone)
    method.start()
    method.become(successor(Strategy.SPECULATIVE, _TASK), drafts=True)
    assert [type(it) for it in method.handle(TokensDecoded(1, (4,)))] == [EmitTokens]
    method.handle(CapacityChanged(targets=(0,), drafters=(0,)))
    commands = method.handle(TokensDecoded(1, (5,)))
    assert [type(it) for it in commands] == [EmitTokens, StopDecode, StartDraft]
    assert commands[2].prefix == (7, 4, 5)


def test_a_change_that_is_taken_back_leaves_the_method_as_it_was():
    method = begin(Strategy.AUTOREGRESSIVE)
    method.start()
    method.become(successor(Strategy.SPECULATIVE, _TASK), drafts=True)
    method.stay()
    assert method.handle(TokensDecoded(1, (4,))) == [EmitTokens((4,), (False,))]


def test_calls_count_on_and_answers_to_those_before_are_ignored():
    method = begin(Strategy.SPECULATIVE)
    method.start()
    method.handle(drafted(1, [5, 6]))
    method.become(successor(Strategy.SPECULATIVE, replace(_TASK, lookahead=4)), drafts=True)
    again = method.handle(BlockVerified(1, (0, 1), 8))[-1]
    assert again == StartDraft(2, 0, (7, 5, 6, 8), max_tokens=4, chunk_tokens=4)
    assert method.handle(drafted(1, [1, 1, 1, 1])) == []
    verify = method.handle(drafted(2, [1, 2, 3, 4]))[-1]
    assert verify.verify_id == 2
    assert verify.proposal == Proposal((1, 2, 3, 4))


def test_a_text_that_ends_with_a_method_has_no_other():
    task = replace(_TASK, max_tokens=3)
    method = begin(Strategy.SPECULATIVE, task)
    method.start()
    method.handle(drafted(1, [5, 6]))
    method.become(successor(Strategy.AUTOREGRESSIVE, task), drafts=False)
    commands = method.handle(BlockVerified(1, (0, 1), 8))
    assert not any(isinstance(it, StartDecode) for it in commands)
    assert method.stop() == []
