from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_engine.deciding.cascade import CascadeDraft, Draw, MatrixError, parse_matrix

BLOCK = 10


def model(salt: int, agreement: int):
    """Return a model: greedy, of four tokens, that mostly says what the others say."""

    def choose(text):
        common = hash((7, *text[-2:])) % 4
        return common if hash((salt, *text[-3:])) % 10 < agreement else hash((salt, *text)) % 4

    return choose


def mag(text, count):
    """Return what followed the last token where it stood first; sometimes nothing."""
    for place, token in enumerate(text[:-1]):
        if token == text[-1]:
            return (text[place + 1 :] * count)[:count]
    return []


def review(choose, text, tail):
    """Return the accepted tokens of a tail, and one more."""
    emitted = []
    for token in tail:
        own = choose(text + emitted)
        emitted.append(own)
        if own != token:
            return emitted
    return [*emitted, choose(text + emitted)]


def algorithm(stages, reviewer, ids, matrix, *, outermost=True):
    """The digest's restatement of the paper's code: `iterate`, without the target's review."""
    if not stages:
        return ids + mag(ids, BLOCK)
    start, current = len(ids), ids
    for i in range(len(stages)):
        while len(current) - start < sum(matrix[0][: i + 1]):
            inner = [row[i + 1 :] for row in matrix[i + 1 :]]
            before = len(current)
            current = algorithm(stages[i + 1 :], stages[i], current, inner, outermost=False)
            if len(current) == before:
                break  # Max-Gram found nothing
    if outermost:
        return current
    return ids + review(reviewer, ids, current[start:])


def run(draft: CascadeDraft, models, prompt, *, reviews=None, at_least=None):
    """Let a draft's reviews be done, and return the tokens it found, step by step."""
    steps = [draft.take_found()]
    while draft.wanted is not None and (at_least is None or len(flat(steps)) < at_least):
        wanted = draft.wanted
        if reviews is not None:
            reviews.append(wanted)
        text = prompt + [draw.token_id for draw in wanted.text]
        tail = [draw.token_id for draw in wanted.tail]
        draft.answer([Draw(token) for token in review(models[wanted.stage], text, tail)])
        steps.append(draft.take_found())
    return [[draw.token_id for draw in step] for step in steps]


def flat(steps):
    return list(chain.from_iterable(steps))


def max_gram(prompt):
    def propose(text, count):
        return [Draw(each) for each in mag(prompt + [draw.token_id for draw in text], count)]

    return propose


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=12)
salts = st.integers(0, 10**6)
entries = st.integers(0, 6)


@given(prompts, salts, st.integers(1, 3), st.data())
def test_it_drafts_what_the_algorithm_does(prompt, salt, model_count, data):
    models = [model(salt + n, agreement=9 - 2 * n) for n in range(model_count)]
    size = model_count + 1
    matrix = [[data.draw(entries) if c >= r else 0 for c in range(size)] for r in range(size)]
    for row in matrix:
        row[-1] = BLOCK
    expected = algorithm([*models, mag], None, prompt, matrix)[len(prompt) :]
    # Asked for much more, so that the end shortens nothing of the first round.
    draft = CascadeDraft(
        tuple(map(tuple, matrix)), propose=max_gram(prompt), token_count=len(expected) + 100
    )
    found = run(draft, models, prompt, at_least=len(expected))
    assert flat(found)[: len(expected)] == expected


@given(prompts, salts, st.integers(1, 40), st.data())
def test_a_vertical_cascade_drafts_what_its_largest_model_alone_does(prompt, salt, count, data):
    models = [model(salt, 9), model(salt + 1, 6)]
    matrix = (
        (data.draw(st.integers(1, 9)), 0, 0),
        (0, data.draw(entries), data.draw(entries)),
        (0, 0, data.draw(entries)),
    )
    draft = CascadeDraft(matrix, propose=max_gram(prompt), token_count=count)
    found = flat(run(draft, models, prompt))
    alone = list(prompt)
    for _ in range(count):
        alone.append(models[0](alone))
    assert found == alone[len(prompt) :]


@given(prompts, salts, st.integers(1, 30), st.data())
def test_no_model_computes_beyond_what_was_asked_for(prompt, salt, count, data):
    models = [model(salt, 9), model(salt + 1, 6)]
    matrix = tuple(tuple(data.draw(entries) if c >= r else 0 for c in range(3)) for r in range(3))
    reviews = []
    draft = CascadeDraft(matrix, propose=max_gram(prompt), token_count=count)
    found = flat(run(draft, models, prompt, reviews=reviews))
    assert len(found) == count
    assert all(len(each.text) + len(each.tail) < count for each in reviews)


def test_the_horizontal_cascade_goes_from_model_to_model():
    models = [lambda _: 0, lambda _: 1, lambda _: 2]
    matrix = ((2, 3, 1), (0, 0, 0), (0, 0, 0))
    draft = CascadeDraft(matrix, token_count=12)
    assert flat(run(draft, models, [9])) == [0, 0, 1, 1, 1, 2] * 2


def test_tokens_are_handed_over_as_soon_as_no_model_of_the_stack_reviews_them_any_more():
    models = [lambda text: len(text) % 5, lambda text: len(text) % 5]
    draft = CascadeDraft(((8, 0), (0, 3)), token_count=8)
    steps = run(draft, models, [0])
    assert [len(step) for step in steps] == [0, 0, 0, 0, 4, 0, 0, 0, 4]


def test_where_max_gram_finds_nothing_the_largest_model_finds_a_token():
    draft = CascadeDraft(((0, 5), (0, 5)), propose=lambda text, count: [], token_count=3)
    assert flat(run(draft, [lambda _: 1], [9])) == [1, 1, 1]


def test_a_matrix_is_read():
    assert parse_matrix("[[5, 10], [0, 10]]", stage_count=2) == ((5, 10), (0, 10))


@pytest.mark.parametrize(
    ("matrix", "said"),
    [
        ("[[5, 10]", "is no matrix"),
        ("{}", "is no matrix"),
        ("[5, 10]", "is no matrix"),
        ([[5, 10], [0, 10, 1]], "needs 2 rows of 2"),
        ([[5]], "needs 2 rows of 2"),
        ([[5, 1.5], [0, 1]], r"\[0\]\[1\] is 1.5"),
        ([[5, -1], [0, 1]], r"\[0\]\[1\] is -1, not in \[0, 1024\]"),
        ([[5, True], [0, 1]], r"\[0\]\[1\] is True"),
        ([[5, 1], [1, 1]], r"\[1\]\[0\] is 1, below the diagonal"),
        ([[0, 0], [0, 1]], "all zeros"),
    ],
)
def test_what_is_no_matrix_is_refused(matrix, said):
    text = matrix if isinstance(matrix, str) else json.dumps(matrix)
    with pytest.raises(MatrixError, match=said):
        parse_matrix(text, stage_count=2)
