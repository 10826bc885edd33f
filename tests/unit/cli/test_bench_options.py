"""What the benchmarks understand, and what they refuse in one line before anything is started."""

from __future__ import annotations

import shlex

import pytest

from paceline_bench.cascade import command as cascade
from paceline_bench.gateway import command as gateway
from paceline_bench.load import command as load
from paceline_bench.pair import command as pair
from paceline_bench.self_drafting import command as self_drafting
from paceline_bench.shaping import command as shaping
from paceline_bench.soak import command as soak
from paceline_bench.table2 import command as table2
from paceline_cli.__main__ import main
from paceline_serving.command_line import parse

BENCHMARKS = {
    "cascade": (cascade.CascadeSettings, cascade._EXAMPLES),
    "gateway": (gateway.GatewayBenchSettings, gateway._EXAMPLES),
    "load": (load.LoadSettings, load._EXAMPLES),
    "pair": (pair.PairSettings, pair._EXAMPLES),
    "self": (self_drafting.SelfSettings, self_drafting._EXAMPLES),
    "shaping": (shaping.ShapingBenchSettings, shaping._EXAMPLES),
    "soak": (soak.SoakSettings, soak._EXAMPLES),
    "table2": (table2.Table2Settings, table2._EXAMPLES),
}
EXAMPLES = [line for _, examples in BENCHMARKS.values() for line in examples.splitlines() if line]


def read(line):
    """Parse a benchmark's name and its options."""
    name, *options = shlex.split(line)
    return parse(BENCHMARKS[name][0], options, program="it", environment={})


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_are_understood(line):
    command, *_ = line.split("    ")
    assert command.startswith("paceline bench ")
    read(command.removeprefix("paceline bench ").replace("~", "/home"))


@pytest.mark.parametrize(
    "options",
    [
        "--rows phi3-14b/mbpp --rows vicuna-7b/alpaca",
        "--rows phi3-14b/mbpp,vicuna-7b/alpaca,phi3-14b/mbpp",
    ],
)
def test_rows_of_table_2_are_named_with_commas_or_again_and_measured_once_each(options):
    chosen = table2._chosen(read(f"table2 {options}"))
    assert [row.name for row in chosen] == ["phi3-14b/mbpp", "vicuna-7b/alpaca"]


def test_a_number_of_rows_means_the_first_ones():
    names = [row.name for row in table2._chosen(read("table2"))]
    assert len(names) == 10
    assert [row.name for row in table2._chosen(read("table2 --rows 3"))] == names[:3]


def test_streams_go_from_one_to_sixty_four_with_every_strategy():
    settings = read("load")
    assert settings.streams == (1, 2, 4, 8, 16, 32, 64)
    assert settings.strategies == ("non-si", "si", "dsi", "auto")
    assert settings.orchestrators == (1, 2)
    assert settings.parts == ("scaling", "strategies")


def test_a_small_load_can_be_asked_for():
    settings = read("load --streams 1,4-5,16 --tokens 32 --strategies auto --json a.json")
    assert settings.streams == (1, 4, 5, 16)
    assert (settings.tokens, settings.strategies) == (32, ("auto",))
    assert settings.json_file.name == "a.json"


def test_real_models_have_defaults_of_their_own():
    settings = read("load --backend transformers --tokens 8")
    assert settings.streams == (1, 4, 16, 64)
    assert settings.strategies == ("non-si", "si", "auto")
    assert (settings.targets, settings.drafters, settings.threads) == (1, 1, 1)
    assert (settings.prompt_tokens, settings.tokens) == (64, 8)


def test_fifty_thousand_requests_may_cost_a_hundred_bytes_each():
    settings = read("soak")
    assert (settings.requests, settings.limit_bytes) == (50_000, 100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("cascade --chart cascade.xyz", "must end in .svg or .png"),
        ("load --streams 0", "--streams: '0' is not within 1 to 512"),
        ("load --streams 8-2", "--streams: '8-2' goes down; write it as 2-8"),
        ("load --streams 1,x", "--streams: 'x' is no number and no range"),
        ("load --strategies fast", "no strategy 'fast'; there are non-si, si, dsi, auto"),
        ("load --parts pair", "there is no part 'pair'; there are scaling, strategies"),
        ("load --parts ,", "--parts: name at least one of scaling, strategies"),
        ("load --chart load.xyz", "must end in .svg or .png"),
        ("load --stream 1", "did you mean --streams?"),
        ("load --backend gpu", "--backend: Input should be 'simulated' or 'transformers'"),
        ("load --rounds 2", "--rounds goes with --backend transformers only"),
        (
            "load --backend transformers --target-ms 9",
            "--target-ms goes with --backend simulated only",
        ),
        ("pair --parts acceptance,speed", "no part 'speed'; there are acceptance, "),
        ("pair --lookaheads 2,0", "--lookaheads: '0' is not within 1 to 32"),
        ("pair --lookaheads 99", "--lookaheads: '99' is not within 1 to 32"),
        ("pair --chart pair.xyz", "must end in .svg or .png"),
        ("pair --random-target 40", "'40' is not LAYERSxWIDTH, such as 40x5120"),
        ("pair --random-target 4x128", "--random-target and --random-drafter go together"),
        ("pair --dtype int8", "--dtype: "),
        ("pair --target 1", "did you mean"),
        ("soak --requests 2", "--requests: Input should be greater than or equal to 10"),
        ("soak --leaving 2", "--leaving: Input should be less than or equal to 1"),
        ("soak --request 1", "did you mean --requests?"),
        ("table2 --rows 11", "--rows: there are 10 rows"),
        ("table2 --rows 2 --rows vicuna-7b/alpaca", "there is no row '2'"),
        ("table2 --rows gpt", "there is no row 'gpt'; there are vicuna-13b/cnn-dm"),
        ("table2 --si-lookaheads 0-3", "--si-lookaheads: '0-3' is not within 1 to 64"),
        ("table2 --dsi-lookaheads few", "'few' is no number and no range"),
        ("table2 --grid 1", "--grid: a grid has two or more of each"),
        ("table2 --grid 2 --rows 3", "so --rows does not go with it"),
        ("table2 --grid 2 --extended", "so --extended does not go with it"),
        ("table2 --extended --width 2", "--extended has two tokens, too few for a --width of 2"),
        ("self --chart self.xyz", "--chart: must end in .svg or .png"),
        ("self --guesses 2", "--guesses goes with --adapter"),
        ("self --adapter a --sweep --guesses 2", "--guesses does not go with --sweep"),
        ("self --adapter a --sweep --per-gpu", "--per-gpu does not go with --sweep"),
        ("table2 --grid 2 --si-lookaheads 1", "so --si-lookaheads does not go with it"),
        ("table2 --grid 2 --dsi-lookaheads 1", "so --dsi-lookaheads does not go with it"),
        ("table2 --chart t.pdf", "--chart: must end in .svg or .png"),
    ],
)
def test_what_cannot_be_is_one_line(capsys, options, message):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *options.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_texts_that_do_not_fit_the_models_are_refused_before_anything_is_started(capsys):
    assert main(["bench", "load", "--backend=transformers", "--prompt-tokens=961"]) != 0
    assert capsys.readouterr().err == (
        "paceline: --prompt-tokens: with 64 more exceeds the models' context of 1024\n"
    )


def test_a_sweep_over_trees_has_trees_and_thresholds_of_its_own():
    settings = read("self --adapter a --sweep --widths 2,4 --sizes 8 --prune-below 0,0.1")
    assert (settings.widths, settings.sizes, settings.prune_below) == ((2, 4), (8,), (0, 0.1))
    assert read("self --adapter a --sweep").widths == (1, 2, 3)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("self --sweep", "--sweep needs an --adapter"),
        ("self --adapter a --widths 2", "--widths goes with --sweep"),
        ("self --adapter a --prune-below 0.1", "--prune-below goes with --sweep"),
    ],
)
def test_what_goes_with_a_sweep_alone_is_refused_without_it(line, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *line.split()])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
