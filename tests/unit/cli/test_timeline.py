import xml.etree.ElementTree as ET

from paceline import TimelineEvent, TimelineEventKind
from paceline_cli.timeline import draw_timeline

SVG = "{http://www.w3.org/2000/svg}"


def event(kind, server, start, end=None, *, position=0, tokens=(), call=0, **branches):
    return TimelineEvent(
        kind=TimelineEventKind(kind),
        server=server,
        start_ns=start,
        end_ns=start if end is None else end,
        position=position,
        token_ids=tuple(tokens),
        call_id=call,
        speculation_depth=0,
        **branches,
    )


def draw(events, title="t"):
    return ET.fromstring(draw_timeline(events, title=title))


REQUEST = [
    event("drafted", "drafter-0", 0, 10, position=3, tokens=[5], call=1),
    event("drafted", "drafter-0", 10, 20, position=4, tokens=[6], call=1),
    event("verifying", "target-0", 0, 100, position=3, call=2),
    event("verifying", "target-1", 20, 60, position=3, tokens=[5, 6], call=3),
    event("cancelled", "target-1", 60, call=3),
    event("accepted", "orchestrator", 100, position=3, tokens=[5]),
    event("corrected", "orchestrator", 100, position=4, tokens=[7]),
    event("discarded", "orchestrator", 100, position=4, tokens=[6], call=1),
]


def bars(picture):
    """List the bars: style, left edge and width."""
    found = []
    for group in picture.iter(SVG + "g"):
        box = group.find(SVG + "rect")
        if box is not None:
            found.append((box.get("class"), float(box.get("x")), float(box.get("width"))))
    return found


def test_there_is_one_bar_for_each_forward_and_unused_ones_are_hatched():
    picture = draw(REQUEST)
    assert [style for style, _, _ in bars(picture)] == [
        "draft",
        "draft lost",
        "verify",
        "verify lost",
    ]
    hatched = [g for g in picture.iter(SVG + "g") if len(g.findall(SVG + "rect")) == 2]
    assert len(hatched) == 2


def test_branches_have_a_shade_of_their_own_which_the_legend_explains_where_it_is_used():
    legend = "branches"
    tree = draw(
        [
            event("drafted", "drafter-0", 0, 10, tokens=[5], branch_token_count=2),
            event("verifying", "target-0", 0, 10, tokens=[5], branch_token_count=2),
            event("verifying", "target-1", 0, 10, is_branch=True),
            event("accepted", "orchestrator", 10, tokens=[5]),
        ]
    )
    groups = [[box.get("class") for box in g.findall(SVG + "rect")] for g in tree.iter(SVG + "g")]
    assert groups[:3] == [["draft", "branch"], ["verify", "branch"], ["branch"]]
    titles = " ".join(title.text for title in tree.iter(SVG + "title"))
    assert titles.count("2 beside the chain") == 2
    assert titles.count("of a branch") == 1
    assert legend in [text.text for text in tree.iter(SVG + "text")]
    assert legend not in [text.text for text in draw(REQUEST).iter(SVG + "text")]


def test_bars_lie_on_one_time_axis():
    drafts, whole = bars(draw(REQUEST))[:2], bars(draw(REQUEST))[2]
    assert drafts[0][1] == whole[1]
    assert 9 < whole[2] / drafts[0][2] < 12


def test_each_process_has_a_lane_and_marks_show_what_became_final():
    picture = draw(REQUEST)
    words = [text.text for text in picture.iter(SVG + "text")]
    assert [w for w in words if w in {"drafter-0", "target-0", "target-1", "output"}] == [
        "drafter-0",
        "target-0",
        "target-1",
        "output",
    ]
    titles = [title.text for title in picture.iter(SVG + "title")]
    assert any("corrected" in title for title in titles)
    assert (
        "target-1 · verifying, not used · 0.0 to 0.0 ms · 2 tokens from position 3 · depth 0"
        in titles
    )


def test_spans_that_overlap_on_one_server_are_stacked():
    one_row = draw([event("verifying", "target-0", 0, 10), event("verifying", "target-0", 10, 20)])
    two_rows = draw([event("verifying", "target-0", 0, 15), event("verifying", "target-0", 10, 20)])
    assert float(two_rows.get("height")) > float(one_row.get("height"))


def test_text_is_escaped_and_no_events_are_no_problem():
    picture = draw([], title="<script> & more")
    assert any(text.text == "<script> & more" for text in picture.iter(SVG + "text"))


def test_a_draft_token_behind_the_end_of_the_output_is_not_used():
    picture = draw(
        [
            event("drafted", "drafter-0", 0, 10, position=3, tokens=[5], call=1),
            event("drafted", "drafter-0", 10, 20, position=4, tokens=[6], call=1),
            event("accepted", "orchestrator", 30, position=3, tokens=[5]),
        ]
    )
    assert [style for style, _, _ in bars(picture)] == ["draft", "draft lost"]
