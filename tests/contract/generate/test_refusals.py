"""What is refused, and with which error."""

from __future__ import annotations

import math

import grpc
import pytest

from paceline import errors
from paceline.status import decode
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline_contract.calls import VerificationRule
from support.fake_text import EOS, VOCABULARY_SIZE, byte_tokenizer, continuation
from support.orchestrating import PROMPT, STRATEGIES, a_drafter, orchestrating, targets
from support.waiting import until

SAMPLING = sampling_pb2.SamplingParameters
BAD_REQUESTS = [
    ("prompt", {"token_ids": None}),
    ("text", {"text": ""}),
    ("parts", {"parts": pb.PromptParts()}),
    ("parts", {"parts": pb.PromptParts(parts=[pb.PromptPart(text="a"), pb.PromptPart()])}),
    ("token_ids", {"token_ids": pb.TokenIds()}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[VOCABULARY_SIZE])}),
    ("token_ids.ids", {"token_ids": pb.TokenIds(ids=[2**32 - 1])}),
    ("max_tokens", {"max_tokens": 0}),
    ("stop_strings", {"stop_strings": [""]}),
    ("stop_strings", {"stop_strings": ["x" * 1025]}),
    ("stop_strings", {"stop_strings": ["a"] * 65}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=math.nan)}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=math.inf)}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=-0.1)}),
    ("sampling.temperature", {"sampling": SAMPLING(temperature=100.1)}),
    ("sampling.top_k", {"sampling": SAMPLING(top_k=VOCABULARY_SIZE + 1)}),
    ("sampling.top_p", {"sampling": SAMPLING(top_p=0)}),
    ("sampling.top_p", {"sampling": SAMPLING(top_p=1.1)}),
    ("sampling.top_p", {"sampling": SAMPLING(top_p=math.nan)}),
    ("sampling.min_p", {"sampling": SAMPLING(min_p=-0.1)}),
    ("sampling.min_p", {"sampling": SAMPLING(min_p=1.1)}),
    ("sampling.min_p", {"sampling": SAMPLING(min_p=math.nan)}),
    ("seed", {"seed": 2**53}),
    ("strategy", {"strategy": 99}),
    ("lookahead", {"lookahead": 0}),
    ("lookahead", {"lookahead": 65}),
    ("target_count", {"target_count": 0}),
    ("target_count", {"target_count": 65}),
    ("drafter_count", {"drafter_count": 0}),
    ("drafter_count", {"drafter_count": 9}),
    ("width", {"width": 0}),
    ("width", {"width": 17}),
    ("branches", {"width": 2, "branches": 65}),
    ("branches", {"branches": 1}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("verification_rule", {"verification_rule": 99}),
    ("dispatch_policy", {"dispatch_policy": 99}),
    ("request_id", {"request_id": "a b"}),
    ("request_id", {"request_id": "x" * 65}),
    ("resume_token_ids", {"resume_token_ids": [1], "sampling": SAMPLING(temperature=1)}),
    ("resume_token_ids", {"resume_token_ids": [1, 2], "max_tokens": 1}),
    ("resume_token_ids", {"resume_token_ids": [VOCABULARY_SIZE]}),
    ("resume_token_ids", {"resume_token_ids": [1, EOS, 1]}),
    ("resume_token_ids", {"resume_token_ids": PROMPT, "stop_strings": ["upon"]}),
]


async def test_every_bad_field_is_named_and_reaches_no_model():
    async with orchestrating(targets=targets(1)) as system:
        for field, request in BAD_REQUESTS:
            with pytest.raises(errors.InvalidFieldError) as caught:
                await system.generate(**request)
            assert [it.field for it in caught.value.violations] == [field], request
        assert not system.targets[0].opened


async def test_what_does_not_fit_the_context_is_refused():
    async with orchestrating(targets=targets(1)) as system:
        for request in (
            {"max_tokens": 4096},
            {"token_ids": pb.TokenIds(ids=[1] * 4096)},
            {"text": "x" * 4096},
        ):
            with pytest.raises(errors.ContextLengthExceededError):
                await system.generate(**request)
        fits = await system.generate(token_ids=pb.TokenIds(ids=[1] * 4095), max_tokens=1)
        assert len(fits.token_ids) == 1


async def test_a_text_that_no_such_context_could_have_is_refused_before_it_is_tokenised():
    length = 16_384
    async with orchestrating(targets=targets(1, context_length=length)) as system:
        part, rest = "ö" * (8 * length), "ö" * (8 * length + 1)
        parts = [pb.PromptPart(text=part), pb.PromptPart(text=rest)]
        for field, prompt in (
            ("text", part + rest),
            ("parts", pb.PromptParts(parts=parts)),
            ("fill_in", pb.FillIn(prefix=part, suffix=rest)),
        ):
            with pytest.raises(errors.ContextLengthExceededError) as caught:
                await system.generate(**{field: prompt})
            (violation,) = caught.value.violations
            assert violation.field == field
            assert f"at most {32 * length} bytes" in violation.description
        with pytest.raises(errors.ContextLengthExceededError, match="prompt"):
            await system.generate(text="ö" * (16 * length))


async def test_a_message_larger_than_any_request_for_the_context_is_refused_unparsed():
    async with orchestrating(targets=targets(1, context_length=65_536)) as system:
        with pytest.raises(errors.ContextLengthExceededError, match="are taken with this"):
            await system.generate(stop_strings=[""] * (2 << 20))


async def test_a_message_that_the_operator_does_not_allow_is_not_read():
    async with orchestrating(targets=targets(1), message_limit_bytes=2 << 20) as system:
        with pytest.raises(errors.InvalidFieldError, match="larger than max"):
            await system.generate(text="x" * (3 << 20))


async def test_a_rule_that_the_servers_do_not_know_is_unsupported():
    async with orchestrating(targets=targets(1)) as system:
        request = {"verification_rule": sampling_pb2.VERIFICATION_RULE_REJECTION}
        with pytest.raises(errors.UnsupportedError):
            await system.generate(**request, sampling=SAMPLING(temperature=1))


async def test_trees_are_unsupported_under_rejection():
    rules = (VerificationRule.EXACT, VerificationRule.REJECTION)
    async with orchestrating(targets=targets(1, rules=rules)) as system:
        rule = {"verification_rule": sampling_pb2.VERIFICATION_RULE_REJECTION}
        with pytest.raises(errors.UnsupportedError, match="width"):
            await system.generate(**rule, width=2, sampling=SAMPLING(temperature=1))
        assert not system.targets[0].opened


async def test_a_foreign_drafter_is_never_used(caplog):
    caplog.set_level("INFO")
    foreign = a_drafter(tokenizer=byte_tokenizer().to_str(pretty=True).encode())
    async with orchestrating(drafters=[foreign], targets=targets(1)) as system:
        for _ in range(2):
            for strategy in STRATEGIES[1:]:
                with pytest.raises(errors.TokenizerMismatchError):
                    await system.generate(strategy=strategy)
        received = await system.generate()
        assert received.token_ids == continuation(PROMPT, 24)
        assert not received.finished.statistics.drafter_forward_count
        assert not foreign.opened
        # How servers stand is logged a while later.
        await until(lambda: "its tokenizer" in caplog.text, what="why is logged")
        assert len([it for it in caplog.records if "its tokenizer" in it.message]) == 1


async def test_a_model_without_a_tokenizer_takes_token_ids_only():
    async with orchestrating(targets=targets(1, tokenizer=None)) as system:
        received = await system.generate()
        assert received.token_ids == continuation(PROMPT, 24)
        assert received.text == ""
        for request in ({"text": "hello"}, {"stop_strings": ["x"]}):
            with pytest.raises(errors.UnsupportedError):
                await system.generate(**request)


async def test_malformed_bytes_are_refused():
    async with orchestrating(targets=targets(1)) as system:
        generate = system.channel.unary_stream("/paceline.v1.OrchestratorService/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in generate(b"\xff" * 8, timeout=60):
                pass
        assert isinstance(decode(caught.value), errors.MalformedRequestError)
