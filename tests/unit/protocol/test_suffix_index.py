from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_contract.suffix_index import Match, SuffixIndex, Tie

ties = st.sampled_from(Tie)
texts = st.lists(st.integers(0, 2), max_size=40)
edits = st.lists(
    st.one_of(
        st.lists(st.integers(0, 2), min_size=1, max_size=12),  # append these
        st.integers(0, 40),  # cut to so many
    ),
    max_size=12,
)


def search(text: list[int], *, tie: Tie, longest: int) -> Match:
    """Look at every place; the oracle."""

    def common(place: int) -> int:
        length = 0
        while length <= min(place, longest - 1) and text[place - length] == text[-1 - length]:
            length += 1
        return length

    places = range(len(text) - 1)
    length = max(map(common, places), default=0)
    if not length:
        return Match(0, 0)
    ends = [place for place in places if common(place) == length]
    return Match(length, (ends[0] if tie is Tie.EARLIEST else ends[-1]) + 1)


@given(edits, ties, st.integers(1, 8))
def test_the_index_finds_what_a_search_finds(edits, tie, longest):
    index, text = SuffixIndex(tie=tie, longest=longest), []
    for edit in edits:
        if isinstance(edit, int):
            index.truncate(edit)
            del text[edit:]
        else:
            for token in edit:
                index.extend([token])
                text.append(token)
                assert index.match == search(text, tie=tie, longest=longest)
        assert index.match == search(text, tie=tie, longest=longest)
    assert index.tokens(0, len(index)).tolist() == text


@given(texts, texts, st.integers(0, 40), ties)
def test_to_follow_another_text_is_to_have_been_that_text(before, after, start, tie):
    start = min(start, len(before))
    index = SuffixIndex(tie=tie)
    index.extend(before)
    index.follow(after, start=start)
    fresh = SuffixIndex(tie=tie)
    fresh.extend(before[:start] + after)
    assert len(index) == len(fresh)
    assert index.match == fresh.match


@given(texts, texts)
def test_what_was_cut_leaves_nothing_behind(text, tail):
    index, fresh = SuffixIndex(tie=Tie.LATEST), SuffixIndex(tie=Tie.LATEST)
    index.extend(text)
    fresh.extend(text)
    index.extend(tail)
    index.truncate(len(text))
    assert shape(index._root) == shape(fresh._root)


def shape(node):
    """Return a node as plain data, whatever order its children came in."""
    children = {token: shape(child) for token, child in node.children.items()}
    return node.depth, node.first, node.last, children


def test_a_tokens_work_does_not_grow_with_the_text():
    counted = CountedIndex(longest=16)
    text = [(place * place // 7 + place) % 23 for place in range(4000)] + [5] * 4000
    most = 0
    for token in text:
        before = counted.comparisons
        counted.extend([token])
        most = max(most, counted.comparisons - before)
    assert most <= 16


class CountedIndex(SuffixIndex):
    comparisons = 0

    def _common(self, child, place, *, known, deepest):
        common = super()._common(child, place, known=known, deepest=deepest)
        self.comparisons += common - known + 1
        return common
