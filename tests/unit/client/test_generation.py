from paceline import Strategy


def test_strategies_are_called_what_papers_call_them():
    called = {strategy: strategy.abbreviation for strategy in Strategy}
    assert called == {
        Strategy.AUTO: "AUTO",
        Strategy.AUTOREGRESSIVE: "non-SI",
        Strategy.SPECULATIVE: "SI",
        Strategy.DISTRIBUTED: "DSI",
        Strategy.SELF_SPECULATIVE: "self-SI",
        Strategy.UNKNOWN: "unknown",
    }
