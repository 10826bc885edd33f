import pytest

from paceline import AsyncClient
from paceline.errors import InvalidFieldError
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline_bench.pair.contest import (
    Contestant,
    Entry,
    Group,
    Method,
    Outcome,
    Rules,
    contest,
    contest_rounds,
    read_prompts,
    times_as_fast,
)
from paceline_bench.pair.contestants import (
    engine_variants,
    library_variants,
    lookup_variants,
    service_variants,
)
from paceline_bench.pair.library import LibraryPair
from support.fake_orchestrator import FakeOrchestrator, serving

RULES = Rules(max_tokens=4, repeats=3, near_tie=0.1)
PROMPTS = [[1, 2], [3, 4]]


def outcome(*token_ids, ms=1.0, **fields):
    return Outcome(
        token_ids=token_ids, elapsed_ns=round(ms * 1e6), **{"target_forwards": 1, **fields}
    )


def contestant(name, decode, *, log=None, group=Group.ENGINE, method=Method.PLAIN):
    async def run(prompt, count):
        if log is not None:
            log.append((name, prompt, count))
        return decode(prompt)

    return Contestant(group, method, name, run)


def entry_of(*repeats):
    return Entry(contestant("x", None), [list(each) for each in repeats])


async def test_everybody_decodes_every_prompt_and_nobody_is_always_first():
    log, steps = [], []
    variants = [contestant(name, lambda _: outcome(7, 8), log=log) for name in "abc"]
    entries = await contest(variants, PROMPTS, rules=RULES, gap=lambda *_: 9.0, on_run=steps.append)
    assert len(steps) == contest_rounds(len(PROMPTS), repeats=RULES.repeats)
    warm_up, timed = log[:6], log[6:]
    assert [name for name, *_ in warm_up] == list("abc") * 2
    assert [prompt for _, prompt, _ in timed] == ([PROMPTS[0]] * 3 + [PROMPTS[1]] * 3) * 3
    assert {count for *_, count in log} == {4}
    assert "".join(name for name, *_ in timed) == "abcbca" + "bcacab" + "cababc"
    assert [[len(repeats) for repeats in entry.outcomes] for entry in entries] == [[3, 3]] * 3
    assert not any(entry.near_ties or entry.wrong for entry in entries)


@pytest.mark.parametrize(
    ("tokens", "gap", "near_ties", "wrong"),
    [
        ((7, 8, 9), 9.0, 0, 0),
        ((7, 5, 5), 0.05, 6, 0),
        ((7, 5, 5), 0.2, 0, 6),
        ((7, 8), 0.0, 0, 6),
        ((7, 8, 9, 1), 0.0, 0, 6),
    ],
)
async def test_texts_are_compared_with_the_first_contestants(tokens, gap, near_ties, wrong):
    asked = []

    def measure(prefix, choices):
        asked.append((prefix, choices))
        return gap

    variants = [
        contestant("plain", lambda _: outcome(7, 8, 9)),
        contestant("other", lambda _: outcome(*tokens)),
    ]
    plain, other = await contest(variants, PROMPTS, rules=RULES, gap=measure)
    assert plain.is_identical
    assert (other.near_ties, other.wrong, other.is_identical) == (near_ties, wrong, not wrong)
    assert {choices for _, choices in asked} <= {(5, 8)}
    assert {prefix for prefix, _ in asked} <= {(1, 2, 7), (3, 4, 7)}


def test_one_slow_repeat_does_not_count():
    entry = entry_of(
        [outcome(1, 2, ms=4), outcome(1, 2, ms=90), outcome(1, 2, ms=6)],
        [outcome(1, 2, ms=2), outcome(1, 2, ms=2), outcome(1, 2, ms=2)],
    )
    assert entry.repeats_ms_per_token == [1.5, 23, 2]
    assert entry.ms_per_token == 2
    assert entry.tokens_per_second == 500


def test_a_speed_lies_within_its_repeats():
    """Each prompt's own median would not: here it would be 1 ms, and every repeat takes 5."""
    entry = entry_of(
        [outcome(1, ms=13), outcome(1, ms=1), outcome(1, ms=1)],
        [outcome(1, ms=1), outcome(1, ms=13), outcome(1, ms=1)],
        [outcome(1, ms=1), outcome(1, ms=1), outcome(1, ms=13)],
    )
    assert entry.ms_per_token == min(entry.repeats_ms_per_token) == 5


def test_a_machine_that_slows_down_for_a_while_favours_nobody():
    """By their medians, 4 and 3 ms, the second would be the faster one."""
    assert times_as_fast([2, 4, 6], [3, 3, 9]) == 1.5
    assert times_as_fast([3, 3, 9], [2, 4, 6]) == pytest.approx(2 / 3)


def test_an_entry_tells_what_it_took():
    entry = entry_of(
        [outcome(1, 2, 3, target_forwards=2, accepted=1, rejected=1, forward_ns=3_000_000)],
        [outcome(1, 2, 3, target_forwards=1, accepted=2, forward_ns=6_000_000)],
    )
    assert entry.tokens_per_forward == 2
    assert entry.acceptance_rate == 0.75
    assert entry.forward_ms_per_token == 1.5
    assert entry.first_token_ms is None


def test_what_is_not_told_is_not_made_up():
    entry = entry_of([outcome(1), outcome(1, forward_ns=5)])
    assert entry.forward_ms_per_token is None
    assert entry.acceptance_rate is None


async def test_the_library_and_the_engine_agree_on_tiny_models(tiny_pair, engine):
    library = LibraryPair(
        str(tiny_pair.target),
        str(tiny_pair.drafter),
        dtype="float32",
        device="cpu",
        vocabulary_size=300,
    )
    variants = [*library_variants(library, (2, 4)), *engine_variants(engine, (2, 4))]
    assert [variant.name for variant in variants] == [
        "bare loop",
        "generate",
        "generate, assisted, lookahead 2",
        "generate, assisted, lookahead 4",
        "generate, prompt lookup",
        "non-SI",
        "SI, lookahead 2",
        "SI, lookahead 4",
    ]
    rules = Rules(max_tokens=16, repeats=1, near_tie=1e-4)
    entries = await contest(variants, [[5, 6, 7], [9, 10]], rules=rules, gap=engine.gap)
    assert {(entry.near_ties, entry.wrong) for entry in entries} == {(0, 0)}
    by_name = {entry.contestant.name: entry for entry in entries}
    assert by_name["bare loop"].tokens_per_forward == by_name["non-SI"].tokens_per_forward == 1
    ours, theirs = by_name["SI, lookahead 4"], by_name["generate, assisted, lookahead 4"]
    assert ours.tokens_per_forward == pytest.approx(theirs.tokens_per_forward, rel=0.2)
    assert 0 < ours.acceptance_rate <= 1


async def test_everybody_drafts_from_the_text_with_the_same_lookahead(tiny_pair, engine):
    library = LibraryPair(
        str(tiny_pair.target),
        str(tiny_pair.drafter),
        dtype="float32",
        device="cpu",
        vocabulary_size=300,
    )
    fake = FakeOrchestrator()
    async with serving(fake), AsyncClient(fake.address) as client:
        variants = list(lookup_variants(library, engine, client, lookahead=3, pids=[]))
        *local, _, _ = outcomes = [await variant.run([5, 6, 7] * 3, 12) for variant in variants]
    assert len({each.token_ids for each in local}) == 1
    assert {variant.lookahead for variant in variants if variant.method is Method.LOOKUP} == {3}
    by_group = {variant.group: each for variant, each in zip(variants, outcomes, strict=True)}
    for group in (Group.LIBRARY, Group.ENGINE):
        # Of what it drafted some was right, and never more than three tokens of a forward.
        assert 12 // 4 <= by_group[group].target_forwards < 12
    plain, lookup = fake.requests
    assert (plain.strategy, plain.target_count) == (pb.STRATEGY_AUTOREGRESSIVE, 1)
    assert (lookup.strategy, lookup.lookahead) == (pb.STRATEGY_SPECULATIVE, 3)
    assert lookup.drafter == pb.DRAFTER_KIND_MAX_GRAM


async def test_the_services_are_asked_for_the_same_in_every_variant():
    fake = FakeOrchestrator()
    async with serving(fake), AsyncClient(fake.address) as client:
        variants = list(service_variants(client, (2,), pids=[]))
        outcomes = [await variant.run([5, 6, 7], 4) for variant in variants]
    assert [(variant.name, variant.lookahead) for variant in variants] == [
        ("non-SI", None),
        ("SI, lookahead 2", 2),
        ("DSI", None),
    ]
    asked = [
        (request.strategy, request.lookahead if request.HasField("lookahead") else None)
        for request in fake.requests
    ]
    assert asked == [
        (pb.STRATEGY_AUTOREGRESSIVE, None),
        (pb.STRATEGY_SPECULATIVE, 2),
        (pb.STRATEGY_DISTRIBUTED, None),
    ]
    for request in fake.requests:
        assert (list(request.token_ids.ids), request.max_tokens) == ([5, 6, 7], 4)
        assert request.ignore_eos
    for each in outcomes:
        assert (each.token_ids, each.target_forwards) == ((3, 4, 5, 6), 4)
        assert each.elapsed_ns > 0


def test_prompts_are_lines_of_text_or_of_json(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('{"text": "a\\nb", "file": "x"}\nplain words\n\n')
    assert read_prompts(path) == ["a\nb", "plain words"]


@pytest.mark.parametrize(
    ("content", "word"),
    [("", "none"), ("\n\n", "none"), ("a\n{nonsense\n", "line 2"), ('{"file": "x"}', "line 1")],
)
def test_a_file_without_prompts_is_one_clear_line(tmp_path, content, word):
    path = tmp_path / "prompts"
    path.write_text(content)
    with pytest.raises(InvalidFieldError, match=word) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
