from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.v1 import sampling_pb2, session_service_pb2, target_service_pb2
from paceline_contract.calls import CallTiming, Hardware, StageTiming, VerificationRule
from paceline_contract.proposal import Proposal, SparseDistribution
from paceline_contract.sampling import SamplingParameters
from paceline_engine.deciding.acceptance_rules import accept_sampled
from paceline_engine.terms.calls import Drafted, ModelDescription, Verdict
from paceline_engine.terms.latencies import ForwardLatency, ModelLatencies, StageMeasures
from paceline_model_server import translation

MODEL = ModelDescription(
    name="name",
    revision="revision",
    fingerprint="fingerprint",
    tokenizer_fingerprint="tokenizer",
    vocabulary_size=10,
    eos_token_ids=(1, 2),
    context_length=100,
    backend="backend",
    dtype="float32",
    device="cpu",
    layer_count=3,
    cancels_between_layers=True,
    shares_forwards=False,
    takes_trees=True,
    is_invariant=True,
    verification_rules=(VerificationRule.EXACT, VerificationRule.REJECTION),
    self_draft_depth=4,
    self_draft_kind="medusa",
    hardware=Hardware("gpu", 0.5),
    fim_token_ids=(5, 3, 4),
    configuration='{"hidden_size": 8}',
)


def test_a_session_left_unsaid_is_greedy_exact_and_fifteen_seconds_long():
    message = session_service_pb2.SessionSpec(
        expected_model_fingerprint="fingerprint", reserve_length=9
    )
    spec = translation.session_spec(message, model=MODEL, owner="peer")
    assert spec.sampling == SamplingParameters()
    assert (spec.sampling.temperature, spec.sampling.top_p) == (0.0, 1.0)
    assert (spec.rule, spec.seed, spec.lease_seconds) == (VerificationRule.EXACT, 0, 15.0)
    assert (spec.limit_length, spec.longest_length, spec.share, spec.owner) == (None, 9, "", "peer")


def test_a_limit_and_a_share_are_kept():
    message = session_service_pb2.SessionSpec(
        expected_model_fingerprint="fingerprint", reserve_length=9, limit_length=0, share="them"
    )
    spec = translation.session_spec(message, model=MODEL, owner="")
    assert (spec.limit_length, spec.longest_length, spec.share) == (0, 0, "them")


def test_zero_that_was_said_is_not_a_default():
    sampling = sampling_pb2.SamplingParameters(temperature=0.7, top_p=0.0, top_k=0, min_p=0.0)
    message = session_service_pb2.SessionSpec(
        expected_model_fingerprint="fingerprint", sampling=sampling
    )
    spec = translation.session_spec(message, model=MODEL, owner="peer")
    assert spec.sampling == SamplingParameters(temperature=0.7, top_p=0.0)


def test_a_verification_keeps_all_that_it_says():
    message = target_service_pb2.VerifyRequest(
        call=session_service_pb2.SessionCall(
            session_id="s",
            sequence=7,
            base_length=2,
            base_digest=b"d" * 16,
            token_ids=[3, 4],
            expected_model_fingerprint="fingerprint",
        ),
        proposal={
            "token_ids": [5],
            "parents": [0],
            "distributions": [{"token_ids": [5, 6], "probabilities": [0.25, 0.75]}],
        },
        speculation_depth=3,
        propose=True,
        logprobs=True,
    )
    call, proposal, options = translation.verify_request(message, model=MODEL, caller="peer")
    assert (call.session_id, call.sequence, call.base_length) == ("s", 7, 2)
    assert (call.base_digest, call.token_ids) == (b"d" * 16, [3, 4])
    assert (proposal.token_ids, proposal.parents) == ([5], [0])
    assert (options.depth, options.logprobs, call.caller) == (3, True, "peer")
    assert (options.propose, options.anticipate) == (True, False)
    assert list(proposal.distributions) == [SparseDistribution([5, 6], [0.25, 0.75])]


def test_equal_distributions_of_two_messages_are_equal():
    def distributions(probability: float) -> list[SparseDistribution]:
        message = target_service_pb2.VerifyRequest(
            call={"expected_model_fingerprint": "fingerprint"},
            proposal={"distributions": [{"token_ids": [5], "probabilities": [probability]}]},
        )
        _, proposal, _ = translation.verify_request(message, model=MODEL, caller="")
        return [*proposal.distributions]

    assert distributions(0.25) == distributions(0.25)
    assert distributions(0.25) != distributions(0.5)


def test_distributions_on_the_wire_judge_as_in_memory():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    drawn = [SparseDistribution((1, 2), (0.75, 0.25)), SparseDistribution((3, 7), (0.5, 0.5))]
    message = target_service_pb2.VerifyRequest(
        call={"expected_model_fingerprint": "fingerprint"},
        proposal={
            "distributions": [
                {"token_ids": each.token_ids, "probabilities": each.probabilities} for each in drawn
            ]
        },
    )
    received = translation.verify_request(message, model=MODEL, caller="")[1].distributions
    for seed in range(20):
        outcomes = [
            accept_sampled(
                (1, 3),
                logits,
                distributions=distributions,
                first_position=4,
                parameters=SamplingParameters(1.0),
                seed=seed,
            )
            for distributions in (drawn, received)
        ]
        assert outcomes[0] == outcomes[1]


def test_a_verdict_keeps_all_that_it_says():
    verdict = Verdict(7, (0, 2), 5, held_length=9, logprobs=(-1.0, -2.0, -3.0))
    message = translation.verify_response(3, verdict)
    assert (message.sequence, message.prefix_length, message.held_length) == (3, 7, 9)
    assert (list(message.accepted_path), message.next_token_id) == ([0, 2], 5)
    assert list(message.logprobs) == [-1.0, -2.0, -3.0]
    assert not message.HasField("proposal")
    proposal = Proposal((8, 9), (0, 0))
    guessed = translation.verify_response(3, replace(verdict, proposal=proposal)).proposal
    assert (list(guessed.token_ids), list(guessed.parents)) == ([8, 9], [0, 0])


def test_a_description_keeps_all_that_it_says():
    stages = (
        StageMeasures("base", (ForwardLatency(2, 7),), ((9, 4),)),
        StageMeasures("max-gram", (), ()),
    )
    forwards = (ForwardLatency(1, 10), ForwardLatency(8, 20))
    latencies = ModelLatencies(forwards, 30, 40, stages=stages)
    info = translation.model_info(MODEL, latencies=latencies)
    for field in ("fingerprint", "tokenizer_fingerprint", "vocabulary_size", "layer_count"):
        assert getattr(info, field) == getattr(MODEL, field)
    assert [(each.rows, each.median_ns) for each in info.forward_latencies] == [(1, 10), (8, 20)]
    assert (info.prefill_fixed_ns, info.prefill_ns_per_token) == (30, 40)
    assert list(info.verification_rules) == [1, 2]
    assert (info.self_draft_depth, info.self_draft_kind) == (4, "medusa")
    assert (info.hardware.identity, info.hardware.share) == ("gpu", 0.5)
    unknown = translation.model_info(replace(MODEL, hardware=None), latencies=latencies)
    assert not unknown.HasField("hardware")
    assert list(info.eos_token_ids) == [1, 2]
    assert list(info.fim_token_ids) == [5, 3, 4]
    assert info.configuration == '{"hidden_size": 8}'
    base, max_gram = info.stages
    assert (base.model_name, max_gram.model_name) == ("base", "max-gram")
    assert [(each.rows, each.median_ns) for each in base.forward_latencies] == [(2, 7)]
    assert [(each.judged_count, each.accepted_count) for each in base.verdicts] == [(9, 4)]
    assert not max_gram.forward_latencies


def test_drafted_tokens_keep_their_exact_distributions():
    third = 1 / 3
    drafted = Drafted(
        start_length=4,
        proposal=Proposal((5,), (0,), (SparseDistribution((5, 6), (third, 1 - third)),)),
        timing=CallTiming(
            *(1, 2, 3, 4),
            shared_row_count=6,
            shared_call_count=5,
            stages=(StageTiming(1, 3), StageTiming(2, 5)),
        ),
    )
    message = translation.draft_response(9, drafted)
    assert (message.sequence, message.start_length) == (9, 4)
    assert (list(message.proposal.token_ids), list(message.proposal.parents)) == ([5], [0])
    (distribution,) = message.proposal.distributions
    assert list(distribution.token_ids) == [5, 6]
    assert list(distribution.probabilities) == pytest.approx([third, 1 - third], abs=1e-7)
    assert (message.timing.queue_ns, message.timing.row_count) == (1, 4)
    assert (message.timing.shared_row_count, message.timing.shared_call_count) == (6, 5)
    stages = [(each.forward_count, each.forward_ns) for each in message.timing.stages]
    assert stages == [(1, 3), (2, 5)]
