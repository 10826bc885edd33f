"""All faults by chance, one after the other, while streams of every kind run: nothing is wrong.

The short form of `make chaos`, which gives another seed and 100,000 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.chaos.run import chaos

# Of both kinds of victims, also in the short form.
FEWEST_HITS = 6
LONGEST_RUN_SECONDS = 3600


@pytest.mark.long
@pytest.mark.timeout(LONGEST_RUN_SECONDS)
async def test_chaos_changes_no_token_and_leaves_nothing_behind(request):
    option = request.config.getoption
    seed, path = option("--chaos-seed"), option("--chaos-history")
    print(f"--chaos-seed={seed}")
    history = await chaos(seed=seed, tokens=option("--chaos-tokens"), fewest_hits=FEWEST_HITS)
    if path:
        history.write(Path(path))
    summary = history.summary()
    print(json.dumps(summary, indent=1))
    assert not summary["findings"]
    assert history.token_count >= option("--chaos-tokens")
