"""A request that was checked, and what was made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.session_service_pb2 import SessionSpec
from paceline_orchestrator.front.admission import is_greedy
from paceline_orchestrator.planning.growth import Growth
from paceline_orchestrator.planning.planner import Wish
from paceline_protocol.strategy import Strategy
from paceline_protocol.task import DecodingTask, DispatchPolicy, VerificationRule

if TYPE_CHECKING:
    from paceline_orchestrator.calls.deadline import Deadline
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.front.text import StreamedText
    from paceline_orchestrator.planning.planner import Plan

__all__ = ["MOST_TARGETS", "NUMBER_OF_STRATEGY", "STRATEGY_BY_NUMBER", "Order", "wish_of"]

STRATEGY_BY_NUMBER = {
    pb.STRATEGY_AUTOREGRESSIVE: Strategy.AUTOREGRESSIVE,
    pb.STRATEGY_SPECULATIVE: Strategy.SPECULATIVE,
    pb.STRATEGY_DISTRIBUTED: Strategy.DISTRIBUTED,
}
"""Those on the wire that are a method; the others leave the choice to the planner."""
NUMBER_OF_STRATEGY = {strategy: number for number, strategy in STRATEGY_BY_NUMBER.items()}


# What a session reserves beyond the text there is: a server takes further steps of its own as the
# text grows, so that a request for the longest of texts does not shut out the others at once.
_RESERVED_AHEAD = 256

MOST_TARGETS = 64
"""As in GenerateRequest.target_count."""


@dataclass(frozen=True)
class Order:
    """What to generate, how, and until when.

    Attributes:
        request: As it came.
        request_id: Its name.
        share: Whose it is: what servers share fairly among clients; see SessionSpec.share.
        model: The model that it is pinned to.
        text: The text so far, with what was resumed.
        prompt: The prompt's tokens.
        max_tokens: Tokens to generate at most, resumed ones included.
        seed: The seed in use.
        plan: How to decode.
        arrived_ns: When it came; perf_counter_ns.
        deadline: When it must be over.
    """

    request: pb.GenerateRequest
    request_id: str
    share: str
    model: ModelFacts
    text: StreamedText
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    plan: Plan
    arrived_ns: int
    deadline: Deadline

    @cached_property
    def resumed(self) -> tuple[int, ...]:
        """The tokens of this generation that the client has."""
        return tuple(self.request.resume_token_ids)

    @property
    def was_resumed_to_eos(self) -> bool:
        """Whether the client has the end-of-text token, and so all there is."""
        return self.resumed[-1:] != () and self.resumed[-1] in self.eos_ids

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What the first new token follows."""
        return self.prompt + self.resumed

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset() if self.request.ignore_eos else self.model.eos_token_ids

    @property
    def rule(self) -> sampling_pb2.VerificationRule.ValueType:
        """The verification rule in use; for greedy decoding both are the same."""
        if is_greedy(self.request):
            return sampling_pb2.VERIFICATION_RULE_EXACT
        return self.request.verification_rule or sampling_pb2.VERIFICATION_RULE_EXACT

    @property
    def target_count(self) -> int:
        """Targets to use at most; none if everything was resumed."""
        return self.plan.target_count if self._missing else 0

    @property
    def growth(self) -> Growth | None:
        """How it takes more targets if they come while it runs; None if it does not."""
        if (
            self.plan.strategy is not Strategy.DISTRIBUTED
            or self.request.HasField("target_count")
            or self.request.dispatch_policy == pb.DISPATCH_POLICY_BLOCKS
        ):
            return None
        return Growth(self.plan.lookahead, is_fixed=self.request.HasField("lookahead"))

    @property
    def drafter_count(self) -> int:
        """Drafters to use at most."""
        speculates = self.plan.strategy is not Strategy.AUTOREGRESSIVE
        return max(1, self.request.drafter_count) if speculates and self._missing else 0

    @property
    def asked_lookahead(self) -> int | None:
        """Draft tokens in a verification, if the client said how many."""
        return self.request.lookahead if self.request.HasField("lookahead") else None

    @property
    def verifier_limit(self) -> int:
        """Targets that it could use if there were as many: one where nothing runs ahead."""
        asked = STRATEGY_BY_NUMBER.get(self.request.strategy)
        if Strategy.AUTOREGRESSIVE is self.plan.strategy or asked is Strategy.SPECULATIVE:
            return 1
        return self.request.target_count or MOST_TARGETS

    def session_spec(self, fingerprint: str, *, length: int) -> SessionSpec:
        """Say what a session for it is opened for.

        Args:
            fingerprint: The server's model's.
            length: How long the text is by now, prompt included.
        """
        limit = len(self.prompt) + self.max_tokens
        return SessionSpec(
            expected_model_fingerprint=fingerprint,
            sampling=self.request.sampling,
            seed=self.seed,
            verification_rule=self.rule,
            reserve_length=min(length + _RESERVED_AHEAD, limit),
            limit_length=limit,
            request_id=self.request_id,
            share=self.share,
        )

    def task(self, *, broadcast_prefill: bool) -> DecodingTask:
        """Say what its decoding method shall do."""
        is_exact = self.rule == sampling_pb2.VERIFICATION_RULE_EXACT
        in_blocks = self.request.dispatch_policy == pb.DISPATCH_POLICY_BLOCKS
        return DecodingTask(
            prompt=self.prefix,
            max_tokens=self._missing,
            eos_ids=self.eos_ids,
            lookahead=max(1, self.plan.lookahead),
            rule=VerificationRule.EXACT if is_exact else VerificationRule.REJECTION,
            dispatch=DispatchPolicy.BLOCKS if in_blocks else DispatchPolicy.WORK_CONSERVING,
            broadcast_prefill=broadcast_prefill,
        )

    @property
    def _missing(self) -> int:
        return self.max_tokens - len(self.resumed)


def wish_of(request: pb.GenerateRequest) -> Wish:
    """Return what a request says of how it is to be decoded."""
    return Wish(
        strategy=STRATEGY_BY_NUMBER.get(request.strategy),
        lookahead=request.lookahead if request.HasField("lookahead") else None,
        target_count=request.target_count if request.HasField("target_count") else None,
    )
