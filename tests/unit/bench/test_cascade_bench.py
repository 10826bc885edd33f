"""What `paceline bench cascade` searches, counts and tells."""

from __future__ import annotations

import pytest

from paceline_bench.cascade import search
from paceline_bench.cascade.chart import draw_cascade
from paceline_bench.cascade.prose import prose_prompts
from paceline_bench.cascade.recipes import CASCADE, GRIDS, MAX_GRAM, SPECULATIVE, Recipe
from paceline_bench.cascade.search import (
    KnownText,
    Search,
    Tally,
    halved,
    measured_cost,
    walltime_improvement,
)
from paceline_bench.cascade.tables import report
from paceline_engine.cascade import parse_matrix

PROMPT = (5, 17, 9, 5, 17)
COUNT = 20


def test_the_improvement_counts_forwards_at_their_costs():
    assert walltime_improvement(12, target_forwards=12, drafter_forwards=0, cost=0.1) == 1
    assert walltime_improvement(12, target_forwards=4, drafter_forwards=10, cost=0.1) == 2.4
    assert (Tally(5, 2, 4) + Tally(7, 2, 6)).improvement(0.1) == 2.4


@pytest.fixture(scope="module")
def known(engine):
    return KnownText(PROMPT, engine.plain(PROMPT, COUNT).token_ids)


@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_a_played_text_takes_what_it_takes_with_a_target(engine, known, lookahead):
    decoded = engine.speculative(lookahead)(PROMPT, COUNT)
    tally = Search(engine.drafter, [known]).tally(Recipe(lookahead, ((1,),)))
    drafted = sum(block.drafted for block in decoded.blocks)
    assert tally == Tally(COUNT, len(decoded.forward_ns), drafted)


def test_max_gram_below_the_drafter_saves_its_forwards_and_changes_no_draft(engine):
    # What the drafter itself says repeats before long, and is right here.
    text = KnownText(PROMPT, tuple(engine.speculative(4)(PROMPT, COUNT).token_ids))
    played = Search(engine.drafter, [text])
    alone = played.tally(Recipe(8, ((1,),)))
    below = played.tally(Recipe(8, ((8, 0), (0, 4))))
    assert below.target_forwards == alone.target_forwards
    assert below.drafter_forwards < alone.drafter_forwards


def test_max_gram_alone_copies_what_repeats():
    period = (1, 2, 3)
    text = KnownText(period * 2, period * 4)
    # Five tokens and one more, twice.
    assert Search(None, [text]).tally(Recipe(5)) == Tally(12, 2, 0)
    assert Search(None, [text, text]).tally(Recipe(5)) == Tally(24, 4, 0)


def test_a_search_halves_what_is_left_while_it_doubles_the_texts():
    asked = []

    def score(recipe, text_count):
        asked.append(text_count)
        # The best of all looks mediocre at first.
        return 5.5 if recipe.lookahead == 1 and text_count == 8 else -recipe.lookahead

    recipes = [Recipe(lookahead) for lookahead in (8, 7, 6, 5, 4, 3, 2, 1)]
    assert halved(recipes, text_count=8, score=score) == Recipe(1)
    assert [asked.count(each) for each in (2, 4, 8)] == [8, 4, 2]
    assert halved(recipes, text_count=1, score=lambda it, _: it.lookahead) == Recipe(8)


def test_each_way_is_searched_at_its_own_cost(engine, known):
    played = Search(engine.drafter, [known])
    recipes = [Recipe(count, ((1,),)) for count in (1, 12)]
    dear, cheap = (played.best(recipes, cost=cost) for cost in (100.0, 0.0))
    assert played.tally(dear).drafter_forwards < played.tally(cheap).drafter_forwards
    assert played.tally(cheap).target_forwards <= played.tally(dear).target_forwards


def test_what_a_drafters_forward_costs_is_the_median_of_what_it_took_of_the_targets(monkeypatch):
    took = {"target": iter([4, 4, 40, 4, 4]), "drafter": iter([1, 2, 1, 100, 1])}
    monkeypatch.setattr(search, "measure_rows", lambda model, *_, **__: {1: next(took[model])})
    assert measured_cost("target", "drafter", PROMPT) == 0.25


def test_a_server_is_told_the_matrix_of_a_recipe():
    for recipe in GRIDS[CASCADE]:
        then, cascade = recipe.drafter_flags
        assert then == "--then=max-gram"
        assert parse_matrix(cascade.removeprefix("--cascade="), stage_count=2) == recipe.matrix
        assert recipe.lookahead == sum(recipe.matrix[0])
    assert not any(recipe.drafter_flags for recipe in (*GRIDS[SPECULATIVE], *GRIDS[MAX_GRAM]))
    assert str(Recipe(14, ((4, 10), (0, 2)))) == "k = 4+10, 2 for the drafter"


def test_prose_is_one_paragraph_of_each_file_in_turn_and_no_example(tmp_path):
    words = " ".join(f"word{n}" for n in range(30))
    example = " ".join([">>>", *["x"] * 40])
    for name, first in [("a.py", "one"), ("b.py", "two")]:
        paragraphs = f"Short.\n\n{first} {words}\n\n{example}\n\nsecond {first} {words}"
        (tmp_path / name).write_text(f'def f():\n    """{paragraphs}"""\n')
    found = prose_prompts(["a.py", "gone.py", "b.py"], library=tmp_path)
    assert [each.split()[0] for each in found] == ['"""one', '"""two', '"""second', '"""second']
    assert all(len(each.split()) == 24 for each in found)


ROW = {
    "name": CASCADE,
    "texts": "code",
    "strategy": "SI",
    "parameters": "k = 4+10, 2 for the drafter",
    "swi": {"measured": 2.5, "parameters": 3.0},
    "tokens_per_forward": 4.0,
    "drafter_forwards": 1234,
    "acceptance_rate": None,
    "tokens_per_second": 100.0,
    "times_as_fast": 2.0,
    "repeats_times_as_fast": [1.5, 2.5],
    "identical": True,
}
CONTENT = {
    "rows": [ROW, ROW | {"texts": "prose", "identical": False}],
    "searched": [
        {"texts": "code", "cost": "measured", "parameters": "k = 4", "name": name, "swi": swi}
        for name, swi in [(SPECULATIVE, 2.0), (CASCADE, 1.5)]
    ],
    "costs": {"measured": 0.2, "parameters": 0.05},
}


def test_the_report_says_what_is_worse_and_what_is_missing():
    told = report(CONTENT)
    line = "| 2.50 | 3.00 | 4.00 | 1,234 | - | 100 | 2.00x | identical |"
    assert f"| {CASCADE} | k = 4+10, 2 for the drafter {line}" in told
    assert "DIFFERENT" in told
    assert "the drafter is WORSE than without, 0.75x" in told
    assert "a second model below the target" in told
    better = [{**each, "swi": 2.0} for each in CONTENT["searched"]]
    assert "at least as good as without, 1.00x" in report(CONTENT | {"searched": better})


def test_it_is_drawn():
    assert len(draw_cascade(CONTENT).axes) == 2
