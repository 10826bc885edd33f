"""`paceline bench shaping`: the cost of biases, penalties and grammars."""
