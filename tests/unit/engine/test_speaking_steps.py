"""Steps of a drafter of another vocabulary, with a model whose rows are written by hand."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models

from paceline_contract.proposal import Proposal
from paceline_engine.deciding.cascade import Draw, ReviewTask
from paceline_engine.deciding.row_reading import RowsRead
from paceline_engine.simulated import SimulatedBackend, SimulatedModel
from paceline_engine.speaking.speaking_backend import SpeakingBackend
from paceline_engine.speaking.vocabulary import Vocabulary
from paceline_engine.terms.calls import SessionSpec
from paceline_engine.terms.items import Draft, Item, Outcome
from unit.engine.conftest import NEVER

LETTERS = "abcdefxyz"


def vocabulary_of(*merges: tuple[str, str], dropout: float | None = None) -> Vocabulary:
    """Return a vocabulary of letters, and what pairs of its tokens become."""
    tokens = {text: each for each, text in enumerate([*LETTERS, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(tokens, [*merges], dropout=dropout))
    return Vocabulary(tokenizer.to_str().encode(), size=len(tokens), name="letters")


TO_ALPHABET = (("e", "f"), ("d", "ef"), ("c", "def"), ("b", "cdef"), ("a", "bcdef"))
TARGET, DRAFTER = vocabulary_of(("x", "y"), ("xy", "z")), vocabulary_of(*TO_ALPHABET)


class Alphabet(SimulatedBackend):
    """After a letter mostly the next one, after "d" x, and seldom the whole alphabet."""

    def __init__(self, context_length: int = 64) -> None:
        super().__init__(SimulatedModel(context_length=context_length))
        self.tokenizer = b""
        self.description = replace(self.description, vocabulary_size=DRAFTER.size)

    def run(self, items, interrupt, *, row_limit=None):
        """Compute rows."""
        answers = []
        for item in items:
            ids = [*item.prefix, *item.task.proposal.token_ids]
            rows = torch.stack([self._row(each) for each in ids[len(item.prefix) - 1 :]])
            answers.append(Outcome(len(rows), judgement=RowsRead((), 0, rows=rows)))
        return answers

    def _row(self, token: int) -> torch.Tensor:
        row = torch.full((DRAFTER.size,), 0.1 / DRAFTER.size)
        following = LETTERS.index("x") if token == LETTERS.index("d") else token + 1
        row[following % DRAFTER.size] += 0.9
        return row


def speaking(model: Alphabet) -> SpeakingBackend:
    return SpeakingBackend(model, target=TARGET, drafter=DRAFTER, tokenizer=b"")


def item_for(backend: SpeakingBackend, text: str, *, task) -> Item:
    spec = SessionSpec(reserve_length=64)
    prefix = array("I", map(LETTERS.index, text))
    return Item(backend.new_cache(spec), spec, prefix=prefix, task=task)


@pytest.mark.parametrize("count", range(1, 5))
def test_a_draft_ends_where_tokens_are_composed_after_the_beginning_of_a_longer_one(count):
    backend = speaking(Alphabet())
    item = item_for(backend, "z" + "abcd"[4 - count :], task=Draft(1))
    for _ in range(20):
        (outcome,) = backend.run([item], NEVER)
        assert isinstance(outcome, Outcome)
        if item.take(outcome):
            break
    assert item.found_count


@pytest.mark.parametrize("length", range(6, 12))
def test_whether_a_token_is_reviewed_does_not_depend_on_the_tokens_after_it(length):
    """Else under REJECTION its distribution would not be the one that is reported."""
    backend = speaking(Alphabet(context_length=12))
    draws = tuple(Draw(LETTERS.index(letter)) for letter in "abbb")
    first = []
    for count in (1, len(draws)):
        proposal = Proposal(tuple(each.token_id for each in draws[:count]))
        task = ReviewTask(proposal, draws=draws[:count])
        (outcome,) = backend.run([item_for(backend, "z" * length, task=task)], NEVER)
        first.append(outcome.judgement.draws[0])
    assert first[0] == first[1]


def test_merges_are_not_left_out_by_chance():
    """A file may have what its training had; then no sequence would be the one before again."""
    told = vocabulary_of(*TO_ALPHABET, dropout=1.0)
    assert told.encode(b"abcdef") == DRAFTER.encode(b"abcdef")
