from paceline_bench.echo import measure_echoes


async def test_a_bare_call_takes_longer_than_its_sleep_and_its_two_ways():
    echoes = await measure_echoes([0, 2_000_000, 2_000_000])

    assert list(echoes) == [0, 2_000_000]
    for sleep_ns, echo in echoes.items():
        assert echo.sleep_ns == sleep_ns
        assert echo.count >= 21
        assert echo.overhead_ns > 0
        assert echo.one_way_ns > 0
        assert echo.back_ns > 0
