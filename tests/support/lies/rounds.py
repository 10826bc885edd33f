"""Which lie is told where: some of each field and status in a brief round, all in a long one."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count, cycle
from typing import TYPE_CHECKING, TypeAlias

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1.sampling_pb2 import VERIFICATION_RULE_REJECTION
from support.lies.conversation import METHODS, conversation_lies
from support.lies.list_of_lies import OUTSIDE, UNWRITTEN, FieldLie, field_lies
from support.lies.trials import Arrangement, Cell
from support.lies.wrong_values import MANY, TOO_MANY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from support.lies.liar import Lie

    Round: TypeAlias = "Mapping[Arrangement, Sequence[tuple[Lie, Cell]]]"

_WORK = ("Draft", "Verify", "Decode")
_MANY, _TOO_MANY = f"{MANY:,}", f"{TOO_MANY:,}"
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


def about_fields() -> Round:
    """Return some lies about each field: one of each group, and all that its comment forbids."""
    return _arranged(_some_of_each_field())


def about_each_way() -> Round:
    """Return each lie about a field: where a value is wrong, with each way of decoding."""
    told = {*_some_of_each_field()}
    return _arranged([it for it in field_lies() if _depends(it) or it not in told], is_long=True)


def _depends(lie: FieldLie) -> bool:
    """Whether the way of decoding matters.

    Bytes are looked at before values, and what a call took is read in one place, whatever the way.
    """
    is_value = lie.group != UNWRITTEN and lie.kind not in (_MANY, _TOO_MANY)
    return lie.method in _WORK and is_value and not lie.path.startswith("timing")


def about_long_lists() -> Round:
    """Return the lies that are lists of so many numbers that a message has just room for them."""
    return _arranged([it for it in field_lies() if it.kind == _MANY])


def _some_of_each_field() -> list[FieldLie]:
    """Return a lie of each group about each field, and of each kind one at least."""
    groups: dict[tuple[str, str, str], list[FieldLie]] = defaultdict(list)
    for lie in field_lies():
        if lie.kind != _MANY:
            groups[lie.method, lie.path, lie.group].append(lie)
    kinds: Counter[str] = Counter()
    found: list[FieldLie] = []
    for (_, _, group), lies in groups.items():
        some = lies if group == OUTSIDE else [min(lies, key=lambda it: kinds[it.kind])]
        kinds.update(it.kind for it in some)
        found.extend(some)
    for lie in field_lies():
        if lie.kind != _MANY and not kinds[lie.kind]:
            kinds[lie.kind] += 1
            found.append(lie)
    return found


def about_conversations(*, is_brief: bool) -> Round:
    """Return lies about a conversation: some statuses and all others, or the other statuses.

    Some are each code with every seventh ending, of 32: so each ending is told with two codes.
    Each status is told at one method.
    """
    turns, endings = cycle(METHODS), count()
    chosen: list[Lie] = []
    for kind, lies in _conversations().items():
        if not _is_status(lies):
            chosen.extend(lies.values() if is_brief else ())
            continue
        method = next(turns)
        if is_brief == ("," in kind or next(endings) % 7 == 0):
            chosen.append(lies[method])
    return _arranged(chosen)


def about_each_status() -> Round:
    """Return each lie about a conversation, at each method."""
    return _arranged([lie for lies in _conversations().values() for lie in lies.values()])


def _conversations() -> dict[str, dict[str, Lie]]:
    """Return the lies about a conversation by kind and method."""
    by_kind: dict[str, dict[str, Lie]] = defaultdict(dict)
    for lie in conversation_lies():
        by_kind[lie.kind][lie.method] = lie
    return by_kind


def _is_status(lies: Mapping[str, Lie]) -> bool:
    return len(lies) == len(METHODS) and lies["Verify"].is_status


def _arranged(lies: Sequence[Lie], *, is_long: bool = False) -> Round:
    """Give each lie its cells and its arrangement, all of them in turn."""
    found: dict[Arrangement, list[tuple[Lie, Cell]]] = {it: [] for it in Arrangement}
    told: dict[str, Iterator[int]] = defaultdict(count)
    for lie in lies:
        arrangements = _ARRANGEMENTS.get(lie.method, tuple(Arrangement))
        cells = _CELLS.get(lie.method, _ALL_CELLS)
        if is_long and isinstance(lie, FieldLie) and _depends(lie):
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
