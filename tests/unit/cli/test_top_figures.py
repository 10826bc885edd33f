"""`paceline top`: each of its numbers, worked out from pages on which no two numbers are alike."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paceline_cli.top_figures import figures, totals
from paceline_cli.top_view import draw, view
from paceline_cli.top_watch import Scrape, Snapshot
from paceline_local.metrics_pages import Page, Source
from paceline_local.metrics_samples import Readings, parse_page

SECONDS = 4.0
GENERATE = 'code="{}",method="paceline.v1.OrchestratorService/Generate"'


def readings(now, gained, **histograms):
    """What a server says, and what it gained in four seconds; of histograms (sum, count) gained."""
    pages = [dict(now), dict(gained)]
    for name, (total, count) in histograms.items():
        for page, factor in zip(pages, (10, 1), strict=True):
            page[f"{name}_sum"], page[f"{name}_count"] = factor * total + factor - 1, factor * count
    before_and_now = [
        parse_page("".join(f"paceline_{name} {value}\n" for name, value in page.items()))
        for page in pages
    ]
    return Readings(*before_and_now, SECONDS)


def a_target(*, scale=1):
    now = {"sessions_active": 5, "num_requests_running": 2, "num_requests_waiting": 9}
    gained = {
        "forwards_total": 28,
        "forward_rows_total": 52,
        "spec_decode_num_draft_tokens_total": 40,
        "spec_decode_num_accepted_tokens_total": 30,
        'wasted_tokens_total{reason="rejected"}': 6,
        'wasted_tokens_total{reason="superseded"}': 8,
        "calls_cancelled_total": 12,
        "calls_superseded_total": 20,
    }
    return readings(
        {**{name: scale * n for name, n in now.items()}, "kv_cache_usage_perc": 0.3 / scale},
        {name: scale * n for name, n in gained.items()},
        queue_seconds=(scale * 0.3, scale * 15),
        forward_seconds=(scale * 1.4, scale * 28),
    )


def an_orchestrator():
    return readings(
        {
            "incoming_requests_total": 77,
            "num_requests_running": 6,
            "num_requests_waiting": 53,
            "verifications_in_flight": 21,
            "stream_verifiers": 17,
            "desired_verifiers": 23,
        },
        {
            "incoming_requests_total": 10,
            f"rpcs_total{{{GENERATE.format('OK')}}}": 5,
            f"rpcs_total{{{GENERATE.format('CANCELLED')}}}": 2,
            f"rpcs_total{{{GENERATE.format('UNAVAILABLE')}}}": 1,
            f"rpcs_total{{{GENERATE.format('INTERNAL')}}}": 13,
            'rpcs_total{code="INTERNAL",method="paceline.v1.OrchestratorService/Other"}': 44,
            "spec_decode_num_draft_tokens_total": 200,
            'spec_decode_num_wasted_tokens_total{reason="rejected"}': 18,
            'spec_decode_num_wasted_tokens_total{reason="discarded"}': 46,
            "corrections_ahead_total": 14,
            "branch_rows_total": 50,
            "branch_rows_accepted_total": 11,
            "worthless_rpcs_cancelled_total": 36,
            'fallbacks_total{kind="target_lost"}': 7,
            'fallbacks_total{kind="load_changed"}': 15,
        },
        queue_seconds=(6.9, 3),
        time_to_first_token_seconds=(1.2, 8),
        inter_token_latency_seconds=(2.6, 104),
        rpc_hop_seconds=(0.27, 90),
        speedup_vs_autoregressive=(18.2, 7),
        speculation_parallelism=(33, 6),
        request_spec_decode_acceptance_rate=(4.2, 5),
    )


def test_each_figure_of_a_target_is_of_its_own_counters():
    assert figures("target", [a_target()]) == pytest.approx(
        {
            "sessions": 5,
            "running": 2,
            "waiting": 9,
            "forwards_per_second": 7,
            "positions_per_second": 13,
            "queue_seconds": 0.02,
            "forward_seconds": 0.05,
            "accepted_share": 0.75,
            "wasted_per_second": 3.5,
            "cancelled_per_second": 8,
            "memory_share": 0.3,
        }
    )


def test_of_a_pool_counts_add_up_means_weigh_calls_and_memory_is_the_fullest_ones():
    told = figures("target", [a_target(), a_target(scale=3)])
    assert (told["sessions"], told["running"], told["waiting"]) == (20, 8, 36)
    assert told["forwards_per_second"] == 28, "both were read four seconds apart, not eight"
    assert told["queue_seconds"] == pytest.approx(0.02)
    assert told["memory_share"] == 0.3


def known(numbers):
    return {name: number for name, number in numbers.items() if number is not None}


def test_a_drafter_judges_nothing_and_an_orchestrator_runs_requests():
    drafter = figures("drafter", [a_target()])
    assert drafter["accepted_share"] is drafter["wasted_per_second"] is None
    assert drafter["forwards_per_second"] == 7
    told = figures("orchestrator", [an_orchestrator()])
    assert known(told) == pytest.approx(
        {"waiting": 53, "running": 6, "queue_seconds": 2.3, "cancelled_per_second": 9}
    )
    assert not known(figures("target", []))


def test_each_total_is_of_its_own_counters():
    assert totals([an_orchestrator()], [a_target()], told_running=99) == pytest.approx(
        {
            "running": 6,
            "waiting": 53,
            "requests_per_second": 2.5,
            "failures_per_second": 3.5,  # neither what ended well nor another method's
            "tokens_per_second": 28,  # the first of each request, and those after one another
            "first_token_seconds": 0.15,
            "token_gap_seconds": 0.025,
            "hop_seconds": 0.003,
            "speed_up": 2.6,
            "targets_per_stream": 5.5,
            "verifications": 21,
            "acceptance_rate": 0.84,  # not the 0.75 of whole blocks that targets tell
            "rejected_per_second": 4.5,
            "discarded_per_second": 11.5,
            "wasted_share": 0.32,
            "corrections_per_second": 3.5,
            "branch_rows_per_second": 12.5,
            "branch_won_share": 0.22,
            "cancelled_per_second": 9,
            "repairs_per_second": 1.75,  # to follow the load is none
            "asked_targets": 21,
            "wanted_targets": 23,
        }
    )


def test_without_an_orchestrators_metrics_there_is_what_it_told_and_what_targets_accept():
    told = totals([], [a_target(), a_target(scale=3)], told_running=8)
    assert known(told) == {"running": 8, "acceptance_rate": 0.75}


def test_several_orchestrators_ask_together_and_want_the_same_targets():
    told = totals([an_orchestrator(), an_orchestrator()], [], told_running=None)
    names = ("running", "asked_targets", "wanted_targets")
    assert [told[name] for name in names] == [12, 42, 23]


def test_the_numbers_stand_behind_their_own_words():
    source = Source("o", "127.0.0.1", 1)
    snapshot = Snapshot((Scrape(Page(source, "127.0.0.1"), an_orchestrator()),), None)
    console = Console(width=400, highlight=False, file=io.StringIO())
    console.print(draw(view(snapshot), title="x", console=console))
    facts = [line.split(maxsplit=1) for line in console.file.getvalue().splitlines()[2:7]]
    dot = " \N{MIDDLE DOT} "
    assert {name: words.rstrip().split(dot) for name, words in facts} == {
        "requests": [
            *("6 running", "53 waiting", "2.5/s come", "3.5/s fail", "first token after 150.0 ms"),
            *("25.0 ms between tokens", "3.0 ms network"),
        ],
        "tokens": [
            *("28.0/s", "acceptance 84%", "2.6 times as fast as decoded plainly"),
            *("SP 5.5 targets per stream", "21 verifications now"),
        ],
        "trees": [
            *("3.5/s corrections ahead", "12.5/s rows of branches", "22% of them became output"),
        ],
        "waste": [
            *("32% of the draft tokens", "4.5/s rejected", "11.5/s discarded"),
            *("9.0/s calls cancelled", "1.8/s repairs"),
        ],
        "targets": [
            "streams ask for 21",
            "an autoscaler would still have 23 for the last minutes' peak",
        ],
    }
