"""A request that was checked, and what was made of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from paceline_contract.calls import VerificationRule
from paceline_contract.sampling import SAMPLING_PARAMETERS
from paceline_orchestrator.decoding.exchange import SessionSpec
from paceline_orchestrator.decoding.slots import ServerNeeds
from paceline_orchestrator.fleet.discovery import Role
from paceline_orchestrator.fleet.fitting import unapplied
from paceline_orchestrator.planning.measurements import MOST_TREE_TOKENS
from paceline_orchestrator.planning.target_scaling import TargetScaling
from paceline_protocol.task import DecodingTask, DispatchPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline_orchestrator.decoding.deadline import Deadline
    from paceline_orchestrator.fleet.wire import ModelFacts
    from paceline_orchestrator.front.text import StreamedText
    from paceline_orchestrator.planning.planner import Plan, Wish

BytesOf: TypeAlias = "Callable[[int], bytes]"

# What a session reserves beyond the text there is: a server takes further steps of its own as the
# text grows, so that a request for the longest of texts does not shut out the others at once.
_RESERVED_AHEAD = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a request is to be served, in its own words; see GenerateRequest.

    Attributes:
        wish: What it says of how it is to be decoded.
        sampling: Handed on to model servers, without the fields that the server does not apply.
        prompt_logprobs: How many of the likeliest tokens are told at each position of the prompt,
            beside the log probability of its token; None: neither is told.
    """

    wish: Wish
    drafter_count: int = 1
    sampling: object | None = None
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    include_prompt: bool = False
    include_timeline: bool = False
    stream_timeline: bool = False


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to generate, how, and until when.

    Attributes:
        options: How it is to be served.
        request_id: Its name.
        share: Whose it is: what servers share fairly among clients; see SessionSpec.share.
        model: The model that it is pinned to.
        text: The text so far, with what was resumed.
        prompt: The prompt's tokens.
        predicted: Tokens that the client predicts.
        bytes_of: Returns the bytes of a token; None if they are not told.
        request_key: Returns a name that is the same for all resumptions of the request.
        resumed: The tokens of this generation that the client has.
        max_tokens: Tokens to generate at most, resumed ones included.
        seed: The seed in use.
        plan: How to decode.
        arrived_ns: When it came; perf_counter_ns.
        waited_ns: For how long it waited for its turn.
        deadline: When it must be over.
    """

    options: Options
    request_id: str
    share: str
    model: ModelFacts
    text: StreamedText
    prompt: tuple[int, ...]
    resumed: tuple[int, ...]
    max_tokens: int
    seed: int
    plan: Plan
    arrived_ns: int
    deadline: Deadline
    waited_ns: int = 0
    predicted: tuple[int, ...] = ()
    bytes_of: BytesOf | None = None
    request_key: Callable[[], str] = lambda: ""

    @property
    def was_resumed_to_eos(self) -> bool:
        """Whether the client has the end-of-text token, and so all there is."""
        return self.resumed[-1:] != () and self.resumed[-1] in self.eos_ids

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """What the first new token follows."""
        return self.prompt + self.resumed

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log probabilities are told."""
        return self.options.prompt_logprobs is not None

    @property
    def limit_length(self) -> int:
        """The most tokens that the text may have, prompt included."""
        return len(self.prompt) + self.max_tokens

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        return frozenset() if self.options.ignore_eos else self.model.eos_token_ids

    @property
    def server_needs(self) -> ServerNeeds:
        """The servers that it has work for; none if everything was resumed."""
        return ServerNeeds(
            target_count=self._target_count,
            drafter_count=self.drafter_count,
            growth=self._growth,
            drafts=self._drafts,
        )

    @property
    def follows_load(self) -> bool:
        """Whether another method may go on with it: where all of that is left to the planner.

        The text as the only drafter is for whole requests. A target that drafts for itself does so
        to the end, or until its guesses do not pay; see `may_leave_guesses`.
        """
        return self._is_open and not self.plan.method.self_drafts

    @property
    def may_leave_guesses(self) -> bool:
        """Whether it may decode plainly where its target's own guesses do not pay."""
        return self._is_open and self.plan.method.self_drafts

    @property
    def _is_open(self) -> bool:
        wish, plan = self.options.wish, self.plan
        is_open = wish.strategy is None and wish.drafter is None and plan.drafter is None
        return is_open and wish.rule is VerificationRule.EXACT and self._missing > 0

    @property
    def drafter_count(self) -> int:
        """Drafters to use at most."""
        has_servers = self.plan.drafter is None or self.plan.drafter.has_servers
        return self.options.drafter_count if self._drafts and has_servers else 0

    @property
    def drafts_from_text(self) -> bool:
        """Whether the text itself may draft."""
        return self._drafts and (self.plan.drafter is None or self.plan.drafter.has_text)

    def suits(self, server: ModelFacts, *, role: Role, length: int) -> bool:
        """Whether a server's context is long enough, and a target can do what is asked.

        Drafters draft as far as theirs goes. A target has to hold all that the text may become.

        Args:
            server: What the server said of its model.
            role: What it is asked to do.
            length: How long the text is by now, prompt included.
        """
        if role is Role.DRAFTER:
            return length < server.context_length
        scores = server.scores_prompts or not self.scores_prompt
        has_room = self.limit_length <= server.context_length
        return scores and has_room and not self._unapplied_by(server)

    def session_spec(self, server: ModelFacts, *, length: int) -> SessionSpec:
        """Say what a session for it is opened for: no more than the server's context has room for.

        Args:
            server: What the server said of its model.
            length: How long the text is by now, prompt included.
        """
        limit = min(self.limit_length, server.context_length)
        own = server.with_lora(self.model.lora)
        # A target without the adapter, or the sampling, would say other tokens.
        is_able = own is not None and not self._unapplied_by(server)
        assert is_able or server.role is not Role.TARGET
        return SessionSpec(
            fingerprint=(own or server).fingerprint,
            sampling=self.options.sampling,
            sampling_used=self.options.wish.sampling_used,
            # Also what changes nothing: a server refuses any field that it does not know.
            sampling_left_out=unapplied(SAMPLING_PARAMETERS, server, self.model),
            seed=self.seed,
            rule=self.options.wish.rule,
            reserve_length=min(length + _RESERVED_AHEAD, limit),
            limit_length=limit,
            request_id=self.request_id,
            share=self.share,
            prompt_length=min(len(self.prompt), limit),
            end_token_ids=tuple(sorted(self.model.eos_token_ids)),
        )

    def task(self, *, is_alone: bool) -> DecodingTask:
        """Say what its decoding method shall do.

        Args:
            is_alone: Whether no other request would wait for targets that compute the prompt.
        """
        return DecodingTask(
            prompt=self.prefix,
            max_tokens=self._missing,
            eos_ids=self.eos_ids,
            lookahead=max(1, self.plan.lookahead),
            rule=self.options.wish.rule,
            dispatch=self.options.wish.dispatch,
            width=self.plan.shape.width,
            branches=self.plan.shape.branches,
            tree_tokens=min(MOST_TREE_TOKENS, self.model.tree_token_limit),
            tree_depth=self.model.tree_depth_limit,
            drafts_ahead=self.plan.drafts_ahead,
            hit_rates=self.plan.hit_rates,
            own_guesses=self.plan.own_guesses,
            broadcast_prefill=is_alone and self.plan.broadcast_prefill,
            keep_prefill=is_alone and self.plan.keep_prefill,
        )

    def _unapplied_by(self, server: ModelFacts) -> frozenset[str]:
        """Return the sampling parameters in use that a server does not apply as the model does."""
        return unapplied(self.options.wish.sampling_used, server, self.model)

    @property
    def _growth(self) -> TargetScaling | None:
        """How it takes more targets if they come while it runs; None if it does not."""
        if (
            not self.plan.method.overlaps
            or self.options.wish.target_count is not None
            or self.options.wish.dispatch is DispatchPolicy.BLOCKS
        ):
            return None
        drafter = self.plan.drafter
        return TargetScaling(
            self.plan.lookahead,
            is_fixed=self.options.wish.lookahead is not None,
            has_text=drafter is not None and drafter.has_servers and drafter.has_text,
        )

    @property
    def _target_count(self) -> int:
        if self._missing:
            return self.plan.target_count
        return int(self.scores_prompt)

    @property
    def _drafts(self) -> bool:
        return self.plan.method.drafts and self._missing > 0

    @property
    def _missing(self) -> int:
        return self.max_tokens - len(self.resumed)
