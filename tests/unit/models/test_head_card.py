"""What `models/head_card.py` measures of a head, and when it writes that into the card."""

from __future__ import annotations

import pytest

import head_card
from paceline_engine.torch_backend.adapters.card import AdapterCard
from support.tiny_adapters import write_adapter
from support.tiny_models import tiny_pair

__all__ = ["tiny_pair"]

PROMPTS = {"chats": [[5, 6, 7], [8, 9]], "code": [[11, 12, 13, 14]]}
TOKENS, REACH = 9, 2


@pytest.fixture
def head(tiny_pair, tmp_path, monkeypatch):
    monkeypatch.setattr(head_card, "read_prompts", lambda _: PROMPTS)
    chain = ((0,), (0, 0))
    return write_adapter(tmp_path / "head", tiny_pair.target, kind="eagle", tree=chain, reach=REACH)


def measure(tiny_pair, head):
    options = ("--target", str(tiny_pair.target), "--head", str(head), "--tokens", str(TOKENS))
    return head_card.main([*options, "--guesses", "16", "--write"])


def test_what_was_decided_and_accepted_is_on_the_card(tiny_pair, head, capsys):
    assert measure(tiny_pair, head) == 0
    assert "all texts identical" in capsys.readouterr().out
    measured = AdapterCard.read(head).training["measured"]
    assert measured.pop("settings")["tokens"] == TOKENS
    assert measured.keys() == {
        "chats, chain",
        "code, chain",
        "chats, tree of 16",
        "code, tree of 16",
    }
    for name, row in measured.items():
        # The first token of each text came with its prompt.
        assert row["tokens"] == len(PROMPTS[name.split(",")[0]]) * (TOKENS - 1)
        # A forward decides one token, and what it accepts before that; the last may be cut off.
        decided = 1 + sum(row["accepted_at_least"])
        assert row["tokens_per_forward"] <= decided + 1e-2
        assert row["tokens_per_forward"] >= 1
        cut_off = (decided - row["tokens_per_forward"]) * row["tokens"] / row["tokens_per_forward"]
        assert cut_off < len(PROMPTS[name.split(",")[0]]) * REACH + 0.1


def test_a_head_with_which_a_text_is_another_gets_no_result(tiny_pair, head, monkeypatch, capsys):
    decode = head_card.decode

    def wrong(*arguments, guesses, **named):
        texts, found = decode(*arguments, guesses=guesses, **named)
        return [[*texts[0][:-1], 1 + texts[0][-1]], *texts[1:]] if guesses else texts, found

    monkeypatch.setattr(head_card, "decode", wrong)
    assert measure(tiny_pair, head) == 1
    assert "TEXTS DIFFER" in capsys.readouterr().out
    assert "measured" not in AdapterCard.read(head).training
