"""How a request is decoded: what was measured, what it forecasts, and the choice."""
