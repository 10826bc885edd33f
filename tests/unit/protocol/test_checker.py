"""The checker sees every invariant broken; and checks none that a method's row does not promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline_protocol.distributed import DistributedDecoding
from paceline_protocol.invariants import Invariant
from paceline_protocol.messages import (
    AbandonVerify,
    CapacityChanged,
    EmitTokens,
    Finish,
    StartVerify,
    TokensDrafted,
)
from paceline_protocol.methods import METHODS, Strategy
from paceline_protocol.speculative import SpeculativeDecoding
from paceline_protocol.task import DecodingTask
from support.chains import drafted, verified
from unit.protocol.checker import CheckedMethod

TASK = DecodingTask((1, 2), 3)
SERVERS = CapacityChanged(targets=(0, 1, 2), drafters=(0,))


class AlwaysNine:
    """A target that says 9."""

    def plain(self, text):
        return 9


class WrongToken(DistributedDecoding):
    def handle(self, event):
        return [
            replace(each, token_ids=(8,)) if isinstance(each, EmitTokens) else each
            for each in super().handle(event)
        ]


class ForgottenVerification(DistributedDecoding):
    def handle(self, event):
        commands = super().handle(event)
        return [each for each in commands if not isinstance(each, AbandonVerify)]


class Impatient(DistributedDecoding):
    def handle(self, event):
        drafted = isinstance(event, TokensDrafted)
        gives_up = self._schedule.abandon_all() if drafted else []
        return gives_up + super().handle(event)


class Repeating(DistributedDecoding):
    def handle(self, event):
        commands = super().handle(event)
        for block in [it for it in commands if isinstance(it, StartVerify) and it.proposal]:
            self._schedule._count += 1
            again = replace(block, verify_id=self._schedule._count, target=2)
            commands.append(again)
        return commands


class Untidy(DistributedDecoding):
    def stop(self):
        return [each for each in super().stop() if isinstance(each, Finish)]


class Miscounting(DistributedDecoding):
    def stop(self):
        self.statistics.drafted += 1
        return super().stop()


BROKEN = [
    pytest.param(Invariant.LOSSLESS, WrongToken, id="a wrong token"),
    pytest.param(Invariant.BUSY_FRONTIER, SpeculativeDecoding, id="SI waits for its drafter"),
    pytest.param(Invariant.NOTHING_WORTHLESS, ForgottenVerification, id="no cancel"),
    pytest.param(Invariant.NO_PREEMPTION, Impatient, id="the frontier's own is given up"),
    pytest.param(Invariant.NOTHING_TWICE, Repeating, id="a block at two targets"),
    pytest.param(Invariant.CLEAN_END, Untidy, id="work left behind"),
    pytest.param(Invariant.CLEAN_END, Miscounting, id="a draft token unaccounted for"),
]


def run(method, promised):
    """Draft a wrong token, reject it, and stop: each break shows on the way."""
    checked = CheckedMethod(
        method(TASK, SERVERS),
        row=replace(METHODS[Strategy.DISTRIBUTED], invariants=frozenset(promised)),
        task=TASK,
        capacity=SERVERS,
        target=AlwaysNine(),
    )
    checked.start()
    checked.handle(drafted(1, (7,)))
    checked.handle(verified(1, 0, 9))
    checked.stop()


@pytest.mark.parametrize(("invariant", "method"), BROKEN)
def test_a_broken_invariant_is_seen_where_it_is_promised(invariant, method):
    with pytest.raises(AssertionError, match=invariant.name):
        run(method, {invariant})


@pytest.mark.parametrize(("invariant", "method"), BROKEN)
def test_what_a_row_does_not_promise_is_not_asked_of_it(invariant, method):
    run(method, ())


def test_a_sound_method_keeps_all_of_them():
    run(DistributedDecoding, Invariant)


class Lazy(DistributedDecoding):
    def _dispatch_chains(self, main_path):
        return []


@pytest.mark.parametrize("method", [DistributedDecoding, Lazy])
def test_a_target_that_idles_while_a_second_chain_waits_is_seen(method):
    servers = CapacityChanged(targets=(0, 1, 2), drafters=(0, 1))
    checked = CheckedMethod(
        method(TASK, servers),
        row=METHODS[Strategy.DISTRIBUTED],
        task=TASK,
        capacity=servers,
        target=AlwaysNine(),
    )
    checked.start()
    checked.handle(drafted(1, (5, 6)))
    second = drafted(2, (8, 7))
    if method is Lazy:
        with pytest.raises(AssertionError, match="waits"):
            checked.handle(second)
    else:
        checked.handle(second)


def test_every_invariant_is_broken_above():
    assert {param.values[0] for param in BROKEN} == set(Invariant)


def test_nothing_is_sent_to_a_drafter_that_is_lost():
    checked = CheckedMethod(
        DistributedDecoding(TASK, SERVERS),
        row=METHODS[Strategy.DISTRIBUTED],
        task=TASK,
        capacity=CapacityChanged(targets=(0, 1), drafters=()),
        target=AlwaysNine(),
    )
    with pytest.raises(AssertionError):
        checked.start()
