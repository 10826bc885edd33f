"""What model servers say of themselves, and how RPCs are awaited: failures become our errors."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import grpc

from paceline.errors import (
    ConnectionLostError,
    DeadlineError,
    InvalidFieldError,
    OverloadedError,
)
from paceline.status import decode
from paceline.v1 import model_service_pb2, sampling_pb2
from paceline.v1.model_service_pb2 import GetModelInfoRequest, GetTokenizerRequest
from paceline_contract import calls
from paceline_contract.calls import Hardware, VerificationRule
from paceline_contract.chat_templates import chat_template_fingerprint
from paceline_contract.limits import MOST_TOKENIZER_BYTES
from paceline_contract.sampling import SAMPLING_PARAMETERS, UNNAMED_PARAMETERS
from paceline_orchestrator.fleet.bad_answers import (
    BadAnswerError,
    check_chat_template,
    check_model_info,
    check_timing,
    demand,
)
from paceline_orchestrator.fleet.discovery import Role

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator

    from paceline.errors import PacelineError
    from paceline.v1.model_service_pb2_grpc import ModelServiceAsyncStub
    from paceline.v1.session_service_pb2 import CallTiming

_INFO_SECONDS = 5.0
_MOST_RETRY_SECONDS = 24 * 3600.0  # a server that names a longer time names none
_TOKENIZER_SECONDS = 60.0
# A server that hangs is told from a slow link by its first message, which is small: a link on which
# that takes longer could not carry two megabytes in the whole time.
_FIRST_MESSAGE_SECONDS = 10.0

_ROLES = {
    model_service_pb2.MODEL_ROLE_DRAFTER: Role.DRAFTER,
    model_service_pb2.MODEL_ROLE_TARGET: Role.TARGET,
}

# What gRPC says of an answer that it does not take: of a message, or of the metadata behind it. Of
# what we send it says "SERVER: Sent message larger than max".
_TOO_LARGE = ("Received message larger than max", "received metadata size exceeds")

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)


class TokenizerRefusedError(BadAnswerError):
    """A server has a tokenizer that cannot be used, and would have it when it is asked again."""


class UnaryStreamCall(Protocol[_T_co]):
    """An RPC whose answer is a stream, or a call that stands for one: see grpc.aio."""

    def __aiter__(self) -> AsyncIterator[_T_co]: ...

    def cancel(self) -> bool:
        """End it."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a server said of its model; see GetModelInfoResponse.

    Attributes:
        role: Which kind of server it is; None if it did not say.
        shares_forwards: Whether one forward computes calls of several sessions.
        tree_token_limit: The most tokens of a tree that it judges, or 0: see the proto.
        tree_depth_limit: The most tokens of a path of it.
        self_draft_depth: How many tokens ahead it drafts for itself; 0 if it does not.
        self_draft_kind: What with.
        is_invariant: Whether its choices are the same bit by bit.
        stage_names: The names of a stack's models, largest first; Max-Gram's comes last.
        hardware: What computes it; None if it did not say.
        incarnation: Which process said so; empty if it did not say.
        dtype: The arithmetic's; empty if it did not say.
        version: Paceline's there; empty if it did not say.
        fim_token_ids: Before a prefix, before a suffix, and after both; empty if it has none.
        exchanges_calls: Whether it takes calls as messages of a stream.
        sampling_parameters: The sets of sampling parameters that its servers apply; of what one
            server said there is one. See `fitting.unapplied`.
        scores_prompts: Whether it has log probabilities of tokens that are given.
        sampling_defaults: What the model's files say of sampling, by the names of the proto.
        grammar_engine: What enforces grammars there, with its version; empty: nothing does.
        lora_fingerprints: Fingerprints of the model with each LoRA adapter, by the adapter's name.
        configuration: What its config.json says of the computation, as JSON; empty: not known.
        lora: The adapter that it is described with (`with_lora`); empty: none.
        cancels_forwards: Whether every withdrawn forward stops before its end.
    """

    model_name: str
    fingerprint: str
    tokenizer_fingerprint: str
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    context_length: int
    rejection_sampling: bool
    forward_latencies: tuple[tuple[int, int], ...]
    prefill_fixed_ns: int
    prefill_ns_per_token: int
    role: Role | None = None
    shares_forwards: bool = False
    tree_token_limit: int = 0
    tree_depth_limit: int = 0
    self_draft_depth: int = 0
    self_draft_kind: str = ""
    is_invariant: bool = False
    stage_names: tuple[str, ...] = ()
    hardware: Hardware | None = None
    incarnation: str = ""
    dtype: str = ""
    version: str = ""
    fim_token_ids: tuple[int, ...] = ()
    exchanges_calls: bool = False
    sampling_parameters: frozenset[frozenset[str]] = frozenset({UNNAMED_PARAMETERS})
    scores_prompts: bool = False
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    grammar_engine: str = ""
    cancels_forwards: bool = True
    lora_fingerprints: tuple[tuple[str, str], ...] = ()
    configuration: str = ""
    lora: str = ""

    def with_lora(self, name: str) -> ModelFacts | None:
        """Return the model with a LoRA adapter, which is another model; None: it has none such.

        Args:
            name: The adapter's; empty: the model alone.
        """
        if name == self.lora:
            return self
        fingerprint = dict(self.lora_fingerprints).get(name)
        return None if fingerprint is None else replace(self, fingerprint=fingerprint, lora=name)

    @property
    def identity(self) -> tuple[str, str, int, frozenset[int], bool]:
        """What servers with one model say alike: any difference there is one of tokens.

        That one computes the same bits whatever is beside, and another does not, can be one, too.
        """
        return (
            self.fingerprint,
            self.tokenizer_fingerprint,
            self.vocabulary_size,
            self.eos_token_ids,
            self.is_invariant,
        )

    def knows(self, rule: VerificationRule) -> bool:
        """Whether the model can work under a rule."""
        return rule is VerificationRule.EXACT or self.rejection_sampling


async def answer(call: Awaitable[_T | None]) -> _T:
    """Wait for an RPC.

    Raises:
        BadAnswerError: The answer cannot be decoded, or is too large.
        PacelineError: What the server or the transport said.
    """
    with _translation():
        return _decoded(await call)


async def answers(call: UnaryStreamCall[_T | None]) -> AsyncGenerator[_T]:
    """Iterate over the messages of an RPC, and cancel it however the reading ends.

    gRPC alone loses the cancel of a task that reads its first message just when the request has
    been sent (up to 13 % of cancels at that moment): the server would work on until the deadline.

    Raises:
        BadAnswerError: A message cannot be decoded, or is too large.
        PacelineError: What the server or the transport said.
    """
    try:
        with _translation():
            async for message in call:
                yield _decoded(message)
    finally:
        call.cancel()  # does nothing to a call that has ended


@contextmanager
def _translation() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise _read_error(error) from error
    except grpc.aio.UsageError:
        raise ConnectionLostError("the channel is closed") from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls. Nobody asked this task to end, so it must not.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionLostError("the channel was closed") from None


def _decoded(message: _T | None) -> _T:
    """Return a message; a channel hands over None where one cannot be decoded."""
    if message is None:
        raise BadAnswerError("the answer cannot be decoded")
    return message


def _read_error(rpc_error: grpc.RpcError) -> PacelineError:
    """Tell a model server without room from one that refuses what it was asked.

    RESOURCE_EXHAUSTED without more is what gRPC says to a client whose message is too large. What
    the orchestrator sends is not, so it comes from something in between that is full.
    """
    error = decode(rpc_error)
    if any(words in (rpc_error.details() or "") for words in _TOO_LARGE):
        return BadAnswerError("the answer is larger than any may be")
    if rpc_error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and isinstance(
        error, InvalidFieldError
    ):
        return OverloadedError(error.message)
    if (error.retry_after_seconds or 0.0) > _MOST_RETRY_SECONDS:
        error.retry_after_seconds = None
    return error


def read_timing(timing: CallTiming) -> calls.CallTiming:
    """Read where a call's time went.

    Raises:
        BadAnswerError: It is out of its limits.
    """
    check_timing(timing)
    return calls.CallTiming(
        queue_ns=timing.queue_ns,
        forward_ns=timing.forward_ns,
        forward_count=timing.forward_count,
        row_count=timing.row_count,
        began_early=timing.began_early,
        shared_row_count=max(timing.row_count, timing.shared_row_count),
        shared_call_count=max(timing.forward_count, timing.shared_call_count),
        reused_token_count=timing.reused_token_count,
        stages=tuple(
            calls.StageTiming(stage.forward_count, stage.forward_ns) for stage in timing.stages
        ),
    )


async def fetch_facts(models: ModelServiceAsyncStub) -> ModelFacts:
    """Ask a server what its model is, and what it has measured of it.

    Raises:
        BadAnswerError: It says what it must not.
        PacelineError: What the server or the transport said.
    """
    info = await answer(models.GetModelInfo(GetModelInfoRequest(), timeout=_INFO_SECONDS))
    check_model_info(info)
    return ModelFacts(
        model_name=info.model_name,
        fingerprint=info.fingerprint,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocabulary_size=info.vocabulary_size,
        eos_token_ids=frozenset(info.eos_token_ids),
        context_length=info.context_length,
        rejection_sampling=sampling_pb2.VERIFICATION_RULE_REJECTION in info.verification_rules,
        forward_latencies=tuple((it.rows, it.median_ns) for it in info.forward_latencies),
        prefill_fixed_ns=info.prefill_fixed_ns,
        prefill_ns_per_token=info.prefill_ns_per_token,
        role=_ROLES.get(info.role),
        shares_forwards=info.shares_forwards,
        tree_token_limit=info.tree_token_limit,
        tree_depth_limit=info.tree_depth_limit,
        self_draft_depth=info.self_draft_depth,
        self_draft_kind=info.self_draft_kind,
        is_invariant=info.is_invariant,
        stage_names=tuple(stage.model_name for stage in info.stages),
        hardware=_hardware(info.hardware),
        incarnation=info.incarnation,
        dtype=info.dtype,
        version=info.version,
        fim_token_ids=tuple(info.fim_token_ids),
        exchanges_calls=info.exchanges_calls,
        sampling_parameters=frozenset({_sampling_parameters(info)}),
        scores_prompts=info.scores_prompts,
        sampling_defaults=tuple(
            (field.name, value) for field, value in info.sampling_defaults.ListFields()
        ),
        grammar_engine=info.grammar_engine,
        lora_fingerprints=tuple((it.name, it.fingerprint) for it in info.lora_adapters),
        cancels_forwards=info.cancels_between_layers,
        configuration=info.configuration,
    )


def _sampling_parameters(info: model_service_pb2.GetModelInfoResponse) -> frozenset[str]:
    """Read which sampling parameters a server applies: of those that a request can have here."""
    return SAMPLING_PARAMETERS.intersection(info.sampling_parameters or UNNAMED_PARAMETERS)


def _hardware(hardware: model_service_pb2.Hardware) -> Hardware | None:
    if not hardware.identity:
        return None
    return Hardware(hardware.identity, hardware.share)


async def fetch_tokenizer(
    models: ModelServiceAsyncStub, *, name: str, receiving: asyncio.Semaphore | None = None
) -> bytes:
    """Fetch the bytes of the tokenizer of the server with this name.

    Args:
        models: Where to ask for it.
        name: The server's.
        receiving: Taken when its first message has come: servers that say nothing take no memory.
            None: no other tokenizer is fetched.

    Raises:
        UnsupportedError: Its model has none.
        TokenizerRefusedError: It is larger than any tokenizer.
        BadAnswerError: A piece of it is empty.
        DeadlineError: Nothing came for some seconds, or it took too long as a whole.
        PacelineError: What else the server or the transport said.
    """
    stream = models.GetTokenizer(GetTokenizerRequest(), timeout=_TOKENIZER_SECONDS)
    content = bytearray()
    # Closed here and now: a server that sends without end must not wait for a collector.
    async with AsyncExitStack() as stack:
        messages = await stack.enter_async_context(aclosing(answers(stream)))
        patience = await stack.enter_async_context(_patience(name))
        async for message in messages:
            patience.reschedule(None)
            if not content:
                await stack.enter_async_context(receiving or nullcontext())
            # Else a server could send nothing for ever.
            demand(bool(message.data), f"a piece of {name}'s tokenizer", "is empty")
            content += message.data
            # The first message says how much is to come. Nobody has to keep to it.
            if max(len(content), message.total_bytes) > MOST_TOKENIZER_BYTES:
                raise TokenizerRefusedError(
                    f"{name} sends a tokenizer of more than {MOST_TOKENIZER_BYTES} bytes"
                )
    return bytes(content)


@asynccontextmanager
async def _patience(name: str) -> AsyncIterator[asyncio.Timeout]:
    """Give up the server with this name, unless it sends its first message in time."""
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_SECONDS) as patience:
            yield patience
    except TimeoutError:
        raise DeadlineError(
            f"{name} sent nothing of its tokenizer for {_FIRST_MESSAGE_SECONDS:g} s"
        ) from None


async def fetch_chat_template(models: ModelServiceAsyncStub) -> model_service_pb2.ChatTemplate:
    """Ask a server how its model wants conversations.

    Raises:
        UnsupportedError: Its model has no chat template, or the server does not know the question.
        BadAnswerError: It says what it must not.
        PacelineError: What else the server or the transport said.
    """
    request = model_service_pb2.GetChatTemplateRequest()
    response = await answer(models.GetChatTemplate(request, timeout=_INFO_SECONDS))
    template = response.chat_template
    check_chat_template(template)
    # Clients keep templates by their fingerprint: what the server says could be another one's.
    template.fingerprint = chat_template_fingerprint(
        template.source,
        named_tokens=template.named_tokens,
        special_tokens=template.special_tokens,
        added_token_ids=template.added_token_ids,
    )
    return template
