"""What a session is believed to hold is never more, or other, than what it holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_orchestrator.decoding.session_tokens import HeldTokens
from support.prefix_digest import prefix_digest

FINAL = tuple(range(100, 130))
GUESSES = st.lists(st.integers(0, 2), max_size=4)


class SessionModel:
    """The server's end of the one rule, which refuses what the wire refuses."""

    def __init__(self):
        self.tokens = []

    def begin(self, base_length, digest, token_ids):
        assert base_length <= len(self.tokens)
        assert prefix_digest(self.tokens[:base_length]) == digest
        self.tokens = [*self.tokens[:base_length], *token_ids]


STEPS = st.tuples(
    st.integers(0, 3),  # tokens that become final before the call
    GUESSES,  # what the prefix assumes beyond them
    GUESSES,  # the block
    st.sampled_from(["answered", "unanswered", "never arrived", "lost"]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_a_session_is_never_asked_for_what_it_may_not_hold(steps):
    held, session, final_length = HeldTokens(), SessionModel(), 1
    for gained, assumed, block, fate in steps:
        final_length += gained
        prefix = (*FINAL[:final_length], *assumed)
        base_length, digest = held.begin(prefix)
        if fate == "lost":
            held.forget()
            session = SessionModel()
            continue
        if fate == "never arrived":
            continue
        session.begin(base_length, digest, prefix[base_length:])
        assert session.tokens == list(prefix)
        session.tokens += block
        if fate == "answered":
            held.confirm(prefix, block, final_length=final_length)


def test_only_what_is_new_is_sent():
    held = HeldTokens()
    assert held.begin((1, 2, 3))[0] == 0
    held.confirm((1, 2, 3), (4, 5), final_length=3)
    assert held.begin((1, 2, 3, 4, 9))[0] == 4


def test_a_call_that_was_not_answered_proves_nothing():
    held = HeldTokens()
    held.begin((1, 2, 3))
    held.confirm((1, 2, 3), (4, 5), final_length=3)
    held.begin((1, 2, 3, 9))
    assert held.begin((1, 2, 3, 4, 5))[0] == 3


def test_final_tokens_are_never_looked_at_again():
    looked_at = []

    class Watched(tuple):
        def __getitem__(self, index):
            looked_at.append(index.start if isinstance(index, slice) else index)
            return super().__getitem__(index)

    held, text = HeldTokens(), tuple(range(1000))
    held.begin(text)
    held.confirm(text, (7,), final_length=998)
    assert held.begin(Watched((*text, 8)))[0] == 1000
    assert min(looked_at) == 998


def test_streamed_tokens_are_held():
    held = HeldTokens()
    held.begin((1, 2))
    held.confirm((1, 2), final_length=2)
    held.extend((3, 4))
    assert held.begin((1, 2, 3, 4))[0] == 4
