"""What `paceline bench cascade` searches, counts and tells."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paceline import DrafterKind, Strategy
from paceline_bench.cascade import search
from paceline_bench.cascade.bundled_variants import drafted_variants, told_row
from paceline_bench.cascade.prose import prose_prompts
from paceline_bench.cascade.recipes import (
    ALL_STAGES,
    DRAFTER,
    DRAFTER_AND_TEXT,
    GRIDS,
    TEXT_ALONE,
    TINY,
    TINY_AND_TEXT,
    Recipe,
)
from paceline_bench.cascade.search import (
    KnownText,
    Search,
    Tally,
    halved,
    measured_cost,
)
from paceline_bench.variants import walltime_improvement
from paceline_engine.deciding.cascade import parse_matrix

PROMPT = (5, 17, 9, 5, 17)
COUNT = 20


FOLDERS = {DRAFTER: Path("models/small"), TINY: Path("models/smaller")}
COSTS = {DRAFTER: 0.1, TINY: 0.05}


def test_the_improvement_counts_forwards_at_their_costs():
    def improvement(**forwards):
        return walltime_improvement(12, target_forwards=4, drafter_forwards=forwards, costs=COSTS)

    assert improvement() == 3
    assert improvement(drafter=10) == 2.4
    assert improvement(drafter=10, tiny=20) == 2
    tallies = Tally(5, 2, Counter(drafter=4)) + Tally(7, 2, Counter(drafter=6, tiny=20))
    assert tallies.improvement(COSTS) == 2


@pytest.fixture(scope="module")
def known(engine):
    return KnownText(PROMPT, engine.plain(PROMPT, COUNT).token_ids)


@pytest.mark.parametrize("lookahead", [1, 3, 8])
def test_a_played_text_takes_what_it_takes_with_a_target(engine, known, lookahead):
    decoded = engine.speculative(lookahead)(PROMPT, COUNT)
    tally = Search({TINY: engine.drafter}, [known]).tally(Recipe(lookahead, (TINY,), ((1,),)))
    drafted = sum(block.drafted for block in decoded.blocks)
    assert tally == Tally(COUNT, len(decoded.forward_ns), Counter(tiny=drafted))


def test_max_gram_below_the_drafter_saves_its_forwards_and_changes_no_draft(engine):
    # What the drafter itself says repeats before long, and is right here.
    text = KnownText(PROMPT, tuple(engine.speculative(4)(PROMPT, COUNT).token_ids))
    played = Search({DRAFTER: engine.drafter}, [text])
    alone = played.tally(Recipe(8, (DRAFTER,), ((1,),)))
    below = played.tally(Recipe(8, (DRAFTER,), ((8, 0), (0, 4))))
    assert below.target_forwards == alone.target_forwards
    assert below.drafter_forwards[DRAFTER] < alone.drafter_forwards[DRAFTER]


def test_each_model_of_a_stack_is_counted_by_itself(engine):
    text = KnownText(PROMPT, tuple(engine.plain(PROMPT, COUNT).token_ids))
    played = Search({DRAFTER: engine.target, TINY: engine.drafter}, [text])
    # What drafts is the target's own model, so each block is right.
    tally = played.tally(Recipe(4, (DRAFTER, TINY), ((4, 0), (0, 1))))
    assert tally.target_forwards == COUNT // 5
    below = tally.drafter_forwards
    assert 0 < below[TINY] <= below[DRAFTER] <= COUNT - tally.target_forwards
    horizontal = played.tally(Recipe(4, (DRAFTER, TINY), ((1, 3), (0, 0)))).drafter_forwards
    assert horizontal[TINY] > horizontal[DRAFTER]


def test_max_gram_alone_copies_what_repeats():
    period = (1, 2, 3)
    text = KnownText(period * 2, period * 4)
    # Five tokens and one more, twice.
    assert Search({}, [text]).tally(Recipe(5)) == Tally(12, 2)
    assert Search({}, [text, text]).tally(Recipe(5)) == Tally(24, 4)


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


def test_each_variant_is_searched_at_its_own_cost(engine, known):
    played = Search({DRAFTER: engine.drafter}, [known])
    recipes = [Recipe(count, (DRAFTER,), ((1,),)) for count in (1, 12)]
    dear, cheap = (played.best(recipes, costs={DRAFTER: cost}) for cost in (100.0, 0.0))
    assert played.tally(dear).drafter_forwards < played.tally(cheap).drafter_forwards
    assert played.tally(cheap).target_forwards <= played.tally(dear).target_forwards


def test_what_a_drafters_forward_costs_is_the_median_of_what_it_took_of_the_targets(monkeypatch):
    took = {"target": iter([4, 4, 40, 4, 4]), "drafter": iter([1, 2, 1, 100, 1])}
    monkeypatch.setattr(search, "measure_rows", lambda model, *_, **__: {1: next(took[model])})
    assert measured_cost("target", "drafter", PROMPT) == 0.25


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        (DRAFTER_AND_TEXT, ["max-gram"]),
        (TINY_AND_TEXT, ["max-gram"]),
        (ALL_STAGES, ["models/smaller", "max-gram"]),
    ],
)
def test_a_server_is_told_the_stages_and_the_matrix_of_a_recipe(name, stages):
    for recipe in GRIDS[name]:
        *then, cascade = recipe.drafter_flags(FOLDERS)
        assert then == [f"--then={stage}" for stage in stages]
        matrix = parse_matrix(cascade.removeprefix("--cascade="), stage_count=1 + len(stages))
        assert matrix == recipe.matrix
        assert recipe.lookahead == sum(matrix[0])


def test_what_is_no_stack_is_told_nothing():
    for name in (DRAFTER, TINY, TEXT_ALONE):
        assert not any(recipe.drafter_flags(FOLDERS) for recipe in GRIDS[name])


def test_a_recipe_says_who_drafts_how_many_tokens_for_whom():
    assert str(Recipe(4, (TINY,), ((1,),))) == "k = 4"
    assert str(Recipe(14, (DRAFTER,), ((4, 10), (0, 2)))) == "k = 4+10, 2 for drafter"
    three = Recipe(9, (DRAFTER, TINY), ((2, 3, 4), (0, 1, 6), (0, 0, 5)))
    assert str(three) == "k = 2+3+4, 1+6 for drafter, 5 for tiny"


RECIPES = {
    TINY: Recipe(3, (TINY,), ((1,),)),
    DRAFTER_AND_TEXT: Recipe(14, (DRAFTER,), ((4, 10), (0, 2))),
    TEXT_ALONE: Recipe(16),
}


def test_each_drafter_drafts_for_si_and_for_dsi():
    clients = {name: f"client of {name}" for name in RECIPES}
    (plain, none), *variants = drafted_variants(clients, RECIPES, targets=3)
    assert (plain.strategy, none) == (Strategy.AUTOREGRESSIVE, None)
    assert [variant.name for variant, _ in variants] == [
        f"{strategy}, {name}" for name in RECIPES for strategy in ("SI", "DSI")
    ]
    for variant, recipe in variants:
        name = variant.name.partition(", ")[2]
        assert recipe == RECIPES[name]
        assert variant.client == clients[name]
        kind = DrafterKind.MAX_GRAM if name == TEXT_ALONE else DrafterKind.SERVER
        assert variant.drafter is kind
        # DSI with the planner's lookahead.
        wanted = (recipe.lookahead, 1) if variant.name.startswith("SI") else (None, 3)
        assert (variant.lookahead, variant.targets) == wanted


def test_swi_is_told_of_forwards_that_take_turns():
    row = {"strategy": "SI", "tokens": 12, "target_forwards": 4, "drafter_models": {"small": 10}}
    costs = {"measured": {"small": 0.1}, "parameters": {"small": 0.2}}
    recipe = RECIPES[DRAFTER_AND_TEXT]
    told = told_row(row, recipe=recipe, costs=costs)
    assert told["swi"] == {"measured": 2.4, "parameters": 2}
    assert told["parameters"] == "k = 4+10, 2 for drafter"
    overlapping = row | {"strategy": "DSI", "lookaheads": [2, 3]}
    told = told_row(overlapping, recipe=recipe, costs=costs)
    assert (told["swi"], told["parameters"]) == (None, "4+10, 2 for drafter; lookahead 2 or 3")
    alone = told_row(overlapping, recipe=RECIPES[TINY], costs=costs)
    assert alone["parameters"] == "lookahead 2 or 3"


def test_prose_is_one_paragraph_of_each_file_in_turn_and_no_example(tmp_path):
    words = " ".join(f"word{n}" for n in range(30))
    example = " ".join([">>>", *["x"] * 40])
    for name, first in [("a.py", "one"), ("b.py", "two")]:
        paragraphs = f"Short.\n\n{first} {words}\n\n{example}\n\nsecond {first} {words}"
        (tmp_path / name).write_text(f'def f():\n    """{paragraphs}"""\n')
    found = prose_prompts(["a.py", "gone.py", "b.py"], library=tmp_path)
    assert [each.split()[0] for each in found] == ['"""one', '"""two', '"""second', '"""second']
    assert all(len(each.split()) == 24 for each in found)
