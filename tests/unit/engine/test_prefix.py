from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from paceline_contract import prefix as module
from paceline_contract.prefix import TokenPrefix
from support.prefix_digest import prefix_digest

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=700)


@given(st.lists(st.one_of(TOKENS, st.floats(0, 1)), max_size=8), st.floats(0, 1))
# Beyond checkpoints that a truncation must forget: random lists are seldom so long.
@example([[0] * 600, 0.4, [1] * 600], 1.0)
def test_growing_and_shrinking_gives_the_digest_that_the_proto_names(changes, share):
    prefix, model = TokenPrefix(), []
    for change in changes:
        if isinstance(change, list):
            prefix.extend(change)
            model.extend(change)
        else:
            kept = int(change * len(model))
            prefix.truncate(kept)
            del model[kept:]
        length = int(share * len(model))
        assert prefix.tokens().tolist() == model
        assert prefix.digest() == prefix_digest(model)
        assert prefix.digest(length) == prefix_digest(model[:length])


def test_a_digest_hashes_few_tokens_again_however_long_the_text_is(monkeypatch):
    prefix, hashed = TokenPrefix(range(10_000)), []

    def watched(tokens):
        hashed.append(len(tokens))
        return little_endian(tokens)

    little_endian = module._little_endian
    monkeypatch.setattr(module, "_little_endian", watched)
    prefix.digest()
    prefix.truncate(9_000)
    prefix.extend([7])
    prefix.digest()
    assert sum(hashed) < 3 * 256
