"""Turns that send all that was said: the text of plain decoding, and most of it computed once."""

from __future__ import annotations

from paceline import Strategy
from support.equality import compare
from support.oracle import Sampling

TURNS, TOKENS, NEW = 4, 12, 60


def test_each_turn_is_the_oracles_and_computes_what_is_new(bundled, oracle, tokenizer, prompts):
    # In conversations that take turns, none finds its target by having been there a moment ago.
    words = tokenizer.encode("\n".join(prompts[40:])).ids
    said = [words[400 * n :][:NEW] for n in range(3)]
    before, sent, told = reused(bundled), 0, 0
    with bundled.client() as client:
        for turn in range(TURNS):
            for n in range(3):
                prompt, sampling = said[n], Sampling(temperature=0.8, top_p=0.9, seed=turn)
                completion = client.generate(
                    prompt,
                    strategy=Strategy.DISTRIBUTED,
                    max_tokens=TOKENS,
                    ignore_eos=True,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    seed=sampling.seed,
                    targets=1,
                ).collect()
                answer = list(completion.token_ids)
                told += completion.finished.usage.cached_prompt_token_count
                expected = list(oracle.decode(prompt, sampling, TOKENS))
                compare(oracle, prompt, sampling, expected=expected, actual=answer)
                new = words[400 * n + NEW * (turn + 1) :][:NEW]
                sent += len(prompt) if turn else 0
                said[n] = [*prompt, *answer, *new]
    # Of a further turn's prompt all but the new words, and a few that were told and not computed.
    known = sent - 3 * (TURNS - 1) * (NEW + TOKENS)
    # A session that is not closed yet when the next turn comes sends that elsewhere.
    assert reused(bundled) - before >= told >= 0.85 * known


def reused(system):
    return sum(server.metric("paceline_reused_tokens_total") for server in system.targets)
