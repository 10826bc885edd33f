"""A drafter that scores some tokens: the text is that of plain decoding, with its other tokens."""

from __future__ import annotations

import pytest

from paceline_engine.sessions.host import HostLimits, ModelHost
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.draft_vocabularies import narrowed
from support.in_process import in_process_system

PROMPTS = ([5, 6, 7, 8, 9], [17, 250, 3, 90, 41, 8])
TOKENS = 60
SAMPLINGS = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 6},
)
WAYS = (
    {"strategy": "speculative", "drafter": "server", "lookahead": 4},
    {"strategy": "speculative", "drafter": "server_and_max_gram", "lookahead": 4, "width": 3},
    {"strategy": "distributed", "drafter": "server", "lookahead": 2, "targets": 2},
    {"strategy": "distributed", "drafter": "server_and_max_gram", "targets": 2, "width": 2},
    {"strategy": "auto"},
)


def host(folder):
    return ModelHost(lambda: TransformersBackend(str(folder)), limits=HostLimits(warm_up_rounds=0))


@pytest.fixture(scope="module")
def narrow_folder(tiny_pair, tmp_path_factory):
    """The drafter, which scores half of the tokens."""
    made = tmp_path_factory.mktemp("narrow") / "drafter"
    return narrowed(tiny_pair.drafter, made, token_ids=range(0, 300, 2))


@pytest.mark.long
async def test_every_strategy_gives_the_tokens_of_plain_decoding(tiny_pair, narrow_folder):
    targets = [host(tiny_pair.target) for _ in range(2)]
    judged = {"accepted": 0, "rejected": 0}
    unscored = 0
    async with in_process_system(drafters=[host(narrow_folder)], targets=targets) as system:

        async def decode(prompt, **options):
            stream = system.client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, **options)
            return await stream.collect()

        for sampling in SAMPLINGS:
            for prompt in PROMPTS:
                plain = await decode(prompt, strategy="autoregressive", **sampling)
                unscored += sum(each % 2 for each in plain.token_ids)
                for way in WAYS:
                    done = await decode(prompt, **way, **sampling)
                    assert done.token_ids == plain.token_ids, (way, sampling)
                    statistics = done.finished.statistics
                    judged["accepted"] += statistics.accepted_token_count
                    judged["rejected"] += statistics.rejected_token_count
    # Drafts were of use, and the texts have tokens that were never drafted.
    assert min(judged.values()) > TOKENS, judged
    assert unscored > TOKENS
