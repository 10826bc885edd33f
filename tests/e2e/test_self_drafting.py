"""A target process that drafts for itself with the bundled Medusa heads."""

from __future__ import annotations

from itertools import count

import pytest
from tokenizers import Tokenizer

from paceline.v1 import proposal_pb2, sampling_pb2
from support.model_servers import TARGET, ModelClient
from support.processes import ServerProcess, last_words, running
from support.system import MODELS

TOKENS = 48
HEADS = MODELS / "python-target-medusa"
TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_decoding_by_its_proposals_gives_its_own_text_in_fewer_forwards(temperature):
    model = MODELS / "python-target"
    prompt = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids
    server = ServerProcess("target", f"--model={model}", f"--adapter={HEADS}")
    with running(server):
        client = await ModelClient(TARGET, server.address).learn()
        assert client.info.self_draft_kind == "medusa"
        sampling = sampling_pb2.SamplingParameters(temperature=temperature)
        settings = {"reserve_length": 256, "sampling": sampling, "seed": 7}
        plain = await client.open(**settings)
        answers = await client.decode(client.call(plain, 1, new=prompt), TOKENS)
        expected = [token for answer in answers for token in answer.token_ids]
        session = await client.open(**settings)
        text, held, given = list(prompt), [], proposal_pb2.Proposal()
        for forwards in count(1):
            call = client.call(session, forwards, held=held, new=text[len(held) :])
            answer = await client.verify(call, given.token_ids, parents=given.parents, propose=True)
            held = [*text, *(given.token_ids[index] for index in answer.accepted_path)]
            text, given = [*held, answer.next_token_id], answer.proposal
            if len(text) >= len(prompt) + TOKENS:
                break
        await client.channel.close()
    assert text[len(prompt) :][:TOKENS] == expected
    assert forwards < 0.9 * TOKENS


def test_an_adapter_for_another_model_is_one_clear_line_at_the_start():
    words = last_words("target", f"--model={MODELS / 'python-drafter'}", f"--adapter={HEADS}")
    assert "is for a model 'python-target'" in words
