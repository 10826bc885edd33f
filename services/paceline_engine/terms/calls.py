"""What is asked of a model host and what it answers: plain data, between the wire and the model.

Token ids are ints in [0, vocabulary size). Positions count the prompt. Times are in nanoseconds
on the host's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_contract.calls import (
    NO_TIMING,
    CallTiming,
    Hardware,
    LikeliestTokens,
    VerificationRule,
)
from paceline_contract.proposal import NOTHING, Proposal
from paceline_contract.sampling import FILTERS, SamplingParameters

DEFAULT_LEASE_SECONDS = 15.0
"""How long a session outlives its last call, if its opener does not say."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How a model's authors want its tokens chosen; None: they do not say."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened for; limits as in session_service.proto.

    Attributes:
        limit_length: Tokens it may grow to; None is what is reserved at once.
        prompt_length: Where the answer begins, whose tokens penalties and `min_tokens` count.
        end_token_ids: The tokens that `min_tokens` keeps from being chosen.
        lora: The name of the LoRA adapter that its tokens are computed with; empty: none.
        owner: Who opened it; for all others it does not exist. Empty where peers have no names.
    """

    reserve_length: int
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    seed: int = 0
    rule: VerificationRule = VerificationRule.EXACT
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    request_id: str = ""
    limit_length: int | None = None
    share: str = ""
    owner: str = ""
    prompt_length: int = 0
    end_token_ids: tuple[int, ...] = ()
    lora: str = ""

    @property
    def longest_length(self) -> int:
        """Tokens it may grow to."""
        return self.reserve_length if self.limit_length is None else self.limit_length


@dataclass(frozen=True, slots=True)
class SessionGrant:
    """The receipt of an opened session."""

    session_id: str
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target's answer on a proposal; see VerifyResponse in target_service.proto."""

    prefix_length: int
    accepted_path: tuple[int, ...]
    next_token: int
    held_length: int
    logprobs: tuple[float, ...] = ()
    timing: CallTiming = NO_TIMING
    proposal: Proposal = NOTHING
    top_logprobs: tuple[LikeliestTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded:
    """The next tokens of the model's own; see DecodeResponse in target_service.proto."""

    start_length: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    timing: CallTiming = NO_TIMING
    top_logprobs: tuple[LikeliestTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Drafted:
    """The next draft tokens; see DraftResponse in drafter_service.proto."""

    start_length: int
    proposal: Proposal
    timing: CallTiming = NO_TIMING


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a loaded model is; see GetModelInfoResponse.

    Attributes:
        takes_trees: Whether one forward computes a tree; else proposals have to be chains.
        samples_by: The names of the sampling parameters that it applies; `grammar` counts only with
            an engine. See `sampling_parameters`, which has at least one: by the protos an empty
            list says that the server is too old to name them.
        grammar_engine: What enforces grammars, with its version; empty: nothing does.
        scores_prompts: Whether it has log probabilities of tokens that are given.
        sampling_defaults: What its files say of sampling.
        self_draft_depth: How many tokens after its own it can propose; 0: it does not.
        self_draft_kind: With what: see the proto.
        stage_names: Of a stack its models' names, largest first.
        hardware: What computes it; None where nothing does.
        fim_token_ids: Before a prefix, before a suffix, and after both; empty: it has none.
        lora_fingerprints: Of the model with each LoRA adapter, by the adapter's name.
        configuration: What its config.json says of the computation, as JSON; empty: not known.
        scores_every_token: Whether it can choose each token of the vocabulary. If not, it drafts,
            and is no target.
    """

    name: str
    revision: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    backend: str
    dtype: str
    device: str
    layer_count: int
    cancels_between_layers: bool
    shares_forwards: bool
    takes_trees: bool
    is_invariant: bool
    verification_rules: tuple[VerificationRule, ...]
    samples_by: frozenset[str] = FILTERS
    grammar_engine: str = ""
    scores_prompts: bool = False
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    self_draft_depth: int = 0
    self_draft_kind: str = ""
    stage_names: tuple[str, ...] = ()
    hardware: Hardware | None = None
    fim_token_ids: tuple[int, ...] = ()
    scores_every_token: bool = True
    lora_fingerprints: tuple[tuple[str, str], ...] = ()
    configuration: str = ""

    def __post_init__(self) -> None:
        assert self.sampling_parameters, f"{self.name}: applies no sampling parameter"

    @property
    def sampling_parameters(self) -> frozenset[str]:
        """The sampling parameters that a session can have; any other one is refused."""
        return self.samples_by if self.grammar_engine else self.samples_by - {"grammar"}

    def lora_of(self, fingerprint: str) -> str:
        """Return the LoRA adapter with which the model has a fingerprint; empty: without one.

        Raises:
            KeyError: It has this fingerprint with none of them, and not without one.
        """
        if fingerprint == self.fingerprint:
            return ""
        return {each: name for name, each in reversed(self.lora_fingerprints)}[fingerprint]
