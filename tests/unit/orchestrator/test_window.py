"""What a draft has found so far, and which of it is its chain."""

from __future__ import annotations

import pytest

from paceline_contract.proposal import Proposal
from paceline_orchestrator.decoding.session_tokens import Window

PREFIX = (7, 8)


def test_a_chain_is_what_comes() -> None:
    window = Window(PREFIX, 4, final_length=2)

    assert window.chain_of(Proposal((1, 2))) == (0, 1)
    window.advance(2)
    assert window.length == 4
    assert window.chain_of(Proposal((3,), (2,))) == (0,)
    assert window.chain_of(Proposal((3,), (1,))) is None


def test_a_trees_chain_are_the_first_children_of_it() -> None:
    #   7 8 ─┬─ 1 ─┬─ 2 ── 5
    #        └─ 3  └─ 4
    window = Window(PREFIX, 4, final_length=2, width=2)

    assert window.chain_of(Proposal((1, 3), (0, 0))) == (0,)
    window.advance(1)
    assert window.chain_of(Proposal((2, 4, 6), (1, 1, 2))) == (0,)
    window.advance(1)
    assert window.chain_of(Proposal((5,), (3,))) == (0,)


@pytest.mark.parametrize(
    "piece",
    [
        Proposal((1, 3)),
        Proposal((1, 3), (0, 3)),
        Proposal((1, 3), (0, -1)),
        Proposal((1, 1), (0, 0)),
        Proposal((1, 2, 3), (0, 0, 0)),
    ],
    ids=["no parents", "a later parent", "no index", "equal siblings", "too wide"],
)
def test_what_is_no_tree_of_the_width_is_none(piece: Proposal) -> None:
    assert Window(PREFIX, 4, final_length=2, width=2).chain_of(piece) is None


@pytest.mark.parametrize(
    ("path", "leads"), [((), True), ((0,), True), ((0, 2), True), ((1, 2), False), ((3,), False)]
)
def test_a_path_follows_the_parents(path: tuple[int, ...], *, leads: bool) -> None:
    assert Proposal((1, 3, 2), (0, 0, 1)).leads_along(path) is leads


def test_the_trunk_of_a_tree_is_the_first_child_of_each_token():
    assert Proposal((1, 2, 3)).trunk == (0, 1, 2)
    assert Proposal((9, 1, 8, 2), (0, 0, 1, 1)).trunk == (0, 2)
    assert Proposal().trunk == ()
