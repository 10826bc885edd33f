"""Which lie is told where: each of them once in a brief round, and in a long one in every way."""

from __future__ import annotations

from collections import defaultdict
from itertools import count, cycle
from typing import TYPE_CHECKING, TypeAlias

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.sampling_pb2 import VERIFICATION_RULE_REJECTION
from support.lies.conversation import METHODS, conversation_lies
from support.lies.list_of_lies import field_lies
from support.lies.trials import Arrangement, Cell

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from support.lies.liar import Lie

    Round: TypeAlias = "Mapping[Arrangement, Sequence[tuple[Lie, Cell]]]"

_SAMPLED = {"temperature": 0.8}
_REJECTION = {"rule": VERIFICATION_RULE_REJECTION, **_SAMPLED}
_TREE = {"width": 4, "branches": 3}
_PLAIN = (
    Cell(strategy=pb.STRATEGY_AUTOREGRESSIVE),
    Cell(strategy=pb.STRATEGY_AUTOREGRESSIVE, **_SAMPLED, says_logprobs=False),
    Cell(strategy=pb.STRATEGY_AUTOREGRESSIVE, **_REJECTION),
)
_DRAFTED = (
    Cell(strategy=pb.STRATEGY_SPECULATIVE),
    Cell(strategy=pb.STRATEGY_DISTRIBUTED, **_SAMPLED),
    Cell(strategy=pb.STRATEGY_DISTRIBUTED, **_REJECTION),
    Cell(strategy=pb.STRATEGY_SPECULATIVE, **_TREE, **_SAMPLED),
    Cell(strategy=pb.STRATEGY_DISTRIBUTED, **_TREE, says_logprobs=False),
    Cell(strategy=pb.STRATEGY_SPECULATIVE, **_REJECTION, says_logprobs=False),
)
_SELF_DRAFTED = (
    Cell(strategy=pb.STRATEGY_SELF_SPECULATIVE),
    Cell(strategy=pb.STRATEGY_SELF_SPECULATIVE, **_SAMPLED),
)
_PLANNED = Cell(strategy=pb.STRATEGY_UNSPECIFIED)
# Each method is called by these; whatever is called for any request is asked for by all.
_CELLS = {
    "Draft": _DRAFTED,
    "Verify": (*_DRAFTED, *_SELF_DRAFTED),
    "Decode": _PLAIN,
    # Where another target decides meanwhile, nobody asks for the late call.
    "RenewSession": (*_PLAIN, *_SELF_DRAFTED),
}
_ALL_CELLS = (*_PLAIN, *_DRAFTED, *_SELF_DRAFTED, _PLANNED)

_DRAFTERS = (Arrangement.DRAFTER_ALONE, Arrangement.DRAFTER)
_TARGETS = (Arrangement.TARGET, Arrangement.TARGETS_ALL)
_ARRANGEMENTS = {
    "Draft": _DRAFTERS,
    "Verify": _TARGETS,
    "Decode": _TARGETS,
    "RenewSession": _TARGETS,
    "GetTokenizer": _TARGETS,
    "GetChatTemplate": _TARGETS,
}


def about_fields(*, is_long: bool) -> Round:
    """Return each lie about a field: with one way of decoding, or with each."""
    return _arranged(field_lies(), is_long=is_long)


def about_conversations(*, is_long: bool) -> Round:
    """Return each lie about a conversation: a status at one method, or at each."""
    turns = cycle(METHODS)
    by_kind: dict[str, dict[str, Lie]] = defaultdict(dict)
    for lie in conversation_lies():
        by_kind[lie.kind][lie.method] = lie
    chosen: list[Lie] = []
    for lies in by_kind.values():
        is_status = len(lies) == len(METHODS) and lies["Verify"].is_status
        at = [next(turns)] if is_status and not is_long else METHODS
        chosen.extend(lies[it] for it in at if it in lies)
    return _arranged(chosen, is_long=False)


def _arranged(lies: Sequence[Lie], *, is_long: bool) -> Round:
    """Give each lie its cells and its arrangement, all of them in turn."""
    found: dict[Arrangement, list[tuple[Lie, Cell]]] = {it: [] for it in Arrangement}
    told: dict[str, Iterator[int]] = defaultdict(count)
    for lie in lies:
        arrangements = _ARRANGEMENTS.get(lie.method, tuple(Arrangement))
        cells = _CELLS.get(lie.method, _ALL_CELLS)
        if is_long and lie.method in ("Draft", "Verify", "Decode"):
            used = cells
        else:
            used = (cells[next(told[lie.method]) % len(cells)],)
        for cell in used:
            where = arrangements[next(told[f"{lie.method}'s place"]) % len(arrangements)]
            found[where].append((lie, _fit(cell, where)))
    return found


def _fit(cell: Cell, where: Arrangement) -> Cell:
    """Return a cell in which the liar is asked: plain decoding asks no drafter."""
    asks_drafters = cell in _DRAFTED
    return cell if where not in _DRAFTERS or asks_drafters else _DRAFTED[0]
