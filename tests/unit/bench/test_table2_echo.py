from paceline_bench.table2.echo import BareCall, summarise_echoes, time_echoes


def bare_call(sleep_ns, overhead_ns):
    return BareCall(
        sleep_ns=sleep_ns,
        overhead_ns=overhead_ns,
        one_way_ns=overhead_ns // 2,
        back_ns=overhead_ns // 4,
    )


async def test_a_bare_call_takes_longer_than_its_sleep_and_its_two_variants():
    calls = await time_echoes([0, 2_000_000, 2_000_000])

    # Round by round, so that no sleep has a better or worse time than another.
    assert [call.sleep_ns for call in calls] == [0, 2_000_000] * (len(calls) // 2)
    assert len(calls) >= 2 * 15
    for call in calls:
        assert call.overhead_ns > 0
        assert call.one_way_ns > 0
        assert call.back_ns > 0


def test_calls_before_and_after_a_row_count_alike():
    before = [bare_call(5, overhead) for overhead in range(100, 1100, 100)]
    after = [bare_call(5, overhead) for overhead in range(1100, 2100, 100)]

    echo = summarise_echoes([*before, bare_call(7, 40), *after])[5]

    assert (echo.sleep_ns, echo.count) == (5, 20)
    assert (echo.overhead_low_ns, echo.overhead_ns, echo.overhead_high_ns) == (300, 1050, 1800)
    assert (echo.one_way_ns, echo.back_ns) == (525, 262)


def test_each_sleep_has_its_own_summary():
    echoes = summarise_echoes([bare_call(5, 100), bare_call(7, 40)])

    assert {sleep: echo.overhead_ns for sleep, echo in echoes.items()} == {5: 100, 7: 40}
