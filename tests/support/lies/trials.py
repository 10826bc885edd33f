"""Trials of an orchestrator: a request at a liar, one lie after the other, on virtual time.

Each lie is told for as long as a request takes that meets it. What is looked at afterwards is what
a client sees, what another stream sees meanwhile, and what is left in the orchestrator.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from hashlib import sha256
from itertools import count, pairwise, product
from typing import TYPE_CHECKING, Any

from paceline import errors
from paceline.v1 import orchestrator_service_pb2 as pb
from paceline.v1 import sampling_pb2
from paceline.v1.model_service_pb2 import ChatTemplate
from paceline_contract.calls import VerificationRule
from paceline_orchestrator.front.tokenizer import Codecs
from support.fake_text import byte_tokenizer, continuation, likeliest_after, logprob_of
from support.lies.liar import Liar
from support.orchestrating import PROMPT
from support.virtual_network import HEALTH
from support.virtual_servers import VirtualServer, drafters, targets
from support.virtual_system import Stream, VirtualDiscovery, VirtualSystem, now, virtual_system
from support.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from support.lies.liar import Lie

TOKENS = 10
TOP_LOGPROBS = 2
# A request's own deadline, and the time within which each ends: it does without targets for 5 s,
# and without an answer for a second or two at each server.
DEADLINE_SECONDS, SOON_SECONDS = 60.0, 20.0
# A tokenizer is large.
TOKENIZER_SECONDS = 61.0
# A server that failed pauses for 10 s at most, and what one said of its queue is half as much after
# each second.
USED_AGAIN_SECONDS = 60.0
# Another stream has a token every 0.8 s, and half as often beside a request on trial. Its
# longest character has four tokens.
LONGEST_GAP_SECONDS = 6.5
_BYSTANDER_SECONDS = 450.0
# A drafter that says so is refused by name; see README.md.
_TOKENIZERS = ("tokenizer_fingerprint", "vocabulary_size")
_OF_REQUESTS = ("run ", "verify ", "draft ", "open ", "close ", "ask ", "renew ")
_LONGEST_RUN_SECONDS = 1e6
# Who was free a moment ago is chosen before who answered longer ago.
FORGOTTEN_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How a request is decoded in a trial.

    Attributes:
        strategy: A number of pb.Strategy.
        rule: A number of VerificationRule.
    """

    strategy: int
    rule: int = sampling_pb2.VERIFICATION_RULE_EXACT
    temperature: float = 0.0
    width: int = 1
    branches: int = 0
    says_logprobs: bool = True

    def request(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the request's fields."""
        chosen: dict[str, Any] = {
            "token_ids": pb.TokenIds(ids=prompt),
            "strategy": self.strategy,
            "verification_rule": self.rule,
            "sampling": sampling_pb2.SamplingParameters(temperature=self.temperature),
            "max_tokens": TOKENS,
            "logprobs": self.says_logprobs,
            "top_logprobs": TOP_LOGPROBS if self.says_logprobs else 0,
        }
        if self.strategy != pb.STRATEGY_UNSPECIFIED:
            chosen |= {"lookahead": 3, "target_count": 2, "drafter_count": 1}
            chosen |= {"width": self.width, "branches": self.branches}
        return chosen

    def __str__(self) -> str:
        name = pb.Strategy.Name(self.strategy).removeprefix("STRATEGY_").lower()
        rule = sampling_pb2.VerificationRule.Name(self.rule).rpartition("_")[2].lower()
        return f"{name}, {rule}, at {self.temperature:g}, {self.width} wide"


@dataclass
class VirtualLiar(VirtualServer):
    """A virtual server that a liar stands before."""

    liar: Liar = field(default_factory=Liar)

    def __post_init__(self) -> None:
        super().__post_init__()
        handlers = self.link.handlers
        handlers[HEALTH] = self.liar.lying(HEALTH, handlers[HEALTH])

    def register(self, server: Any) -> None:
        """Add its services, with the liar before them."""
        super().register(self.liar.before(server))


class _BrokenPromiseError(AssertionError):
    """A promise that is broken."""


class Trials:
    """One orchestrator, a liar, and honest servers beside it.

    Args:
        system: All of them.
        liars: The servers that lie, as one.
        has_honest: Whether there is an honest server for whatever the liars do.
    """

    def __init__(
        self, system: VirtualSystem, liars: Sequence[VirtualLiar], *, has_honest: bool
    ) -> None:
        self._system = system
        self._liars = liars
        self._liar = liars[0].liar
        self._has_honest = has_honest
        self._bystander = Stream()
        self._prompts = (
            (first, second, *PROMPT) for first, second in product(range(200), range(200))
        )
        self._logged: list[str] = []
        self._processes = count()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have a bystander's stream beside all of them, and the log read."""
        handler = _Tracebacks(self._logged)
        loggers = [logging.getLogger(it) for it in ("paceline_orchestrator", "asyncio")]
        for logger in loggers:
            logger.addHandler(handler)
        streaming = asyncio.create_task(self._stream_beside(), name="the bystander")
        try:
            await self._until(lambda: self._bystander.arrivals, "another stream has begun")
            yield
        finally:
            streaming.cancel()
            with suppress(asyncio.CancelledError):
                await streaming
            for logger in loggers:
                logger.removeHandler(handler)

    async def tell(self, lie: Lie, cell: Cell) -> list[str]:
        """Tell a lie, and return what it did that it must not."""
        await asyncio.sleep(FORGOTTEN_SECONDS)
        await self._until(lambda: not any(it.load()[0] for it in self._lying), "it seems free")
        arrivals = len(self._bystander.arrivals)
        began, self._logged[:] = now(), []
        await self._begin(lie)
        found = [it async for it in self._outcome(lie, cell)]
        found += await self._afterwards(lie, cell)
        found += self._beside(arrivals, since=began)
        return [*found, *self._logged]

    # --- the liar -----------------------------------------------------------------------------

    async def _begin(self, lie: Lie) -> None:
        """Begin to lie, so that the lie is asked for."""
        if lie.method == "GetModelInfo":
            await self._turn_away()
        if lie.method == "GetChatTemplate":  # who failed to tell it before is asked last
            await self._become_others()
        self._liar.begin(lie)
        if lie.method == "Watch":
            self._reconnect()
        if lie.method == "GetModelInfo":
            await self._turn_back()
        if lie.method in ("Watch", "GetModelInfo"):
            await self._until(lambda: self._liar.asked[lie.method], "it is asked")
            await asyncio.sleep(0.05)

    async def _end(self, lie: Lie) -> None:
        """Tell the truth again, and have it heard."""
        self._liar.begin(None)
        if lie.method == "Watch":
            self._reconnect()
        if lie.method == "GetModelInfo":
            await self._turn_away()
            await self._turn_back()

    async def _turn_away(self) -> None:
        for model in self._liars:
            await model.set_serving(False)
        await self._until(
            lambda: all(it.health_status for it in self._lying), "it is known not to serve"
        )

    async def _turn_back(self) -> None:
        for model in self._liars:
            await model.set_serving(True)

    async def _become_others(self) -> None:
        """Be new processes, which have not failed yet."""
        number = next(self._processes)
        for model in self._liars:
            model.incarnation = f"{model.name}, process {number}"
        self._reconnect()
        new = {it.incarnation for it in self._liars}
        await self._until(
            lambda: new == {it.facts.incarnation for it in self._lying if it.ready and it.facts},
            "the new processes are used",
        )

    def _reconnect(self) -> None:
        for model in self._liars:
            model.link.break_off()
            model.link.restore()

    @property
    def _lying(self) -> list[Any]:
        return [self._system.server(it.name) for it in self._liars]

    # --- what must hold -----------------------------------------------------------------------

    async def _outcome(self, lie: Lie, cell: Cell) -> AsyncIterator[str]:
        """Ask for a stream while the lie is told, and say what is wrong with it."""
        match lie.method:
            case "GetChatTemplate":
                asking = self._ask_for_template()
            case "GetTokenizer":
                asking = self._fetch_tokenizer()
            case _:
                asking = self._ask(cell)
        began = now()
        for what in await self._wrong_about(asking, lie, cell):
            yield what
        if now() - began > self._longest_seconds(lie):
            yield f"it took {now() - began:.1f} s"
        if self._liar.asked["Watch"] > 20 * (now() - began + 1):
            yield f"its health was asked {self._liar.asked['Watch']} times"

    async def _wrong_about(self, asking: Awaitable[list[str]], lie: Lie, cell: Cell) -> list[str]:
        """Say what is wrong with an answer, or with what it ended with."""
        is_unseen = getattr(lie, "is_unseen", False)
        is_believed = is_unseen or _is_told_by_logprobs_alone(lie, cell)
        try:
            wrong = await asking
        except errors.TokenizerMismatchError as error:
            is_told = getattr(lie, "path", "") in _TOKENIZERS
            return [] if is_told else [f"it ended with {error!r}"]
        except errors.DeadlineError as error:
            return [] if self._is_endured(lie) else [f"it ended with {error!r}"]
        except (errors.InternalError, errors.InvariantViolatedError) as error:
            blames_targets = error.message.startswith("targets fail at this request: ")
            is_excused = blames_targets and not self._has_honest
            return [] if is_excused else [f"it ended with {error!r}"]
        except errors.PacelineError as error:
            is_excused = is_believed or not self._has_honest
            return [] if is_excused else [f"it ended with {error!r}, though others are honest"]
        return [] if is_believed else wrong

    def _is_endured(self, lie: Lie) -> bool:
        """Whether nobody else could do the work that a liar says it has; see ADR 36."""
        return not self._has_honest and (
            lie.method == "RenewSession" or getattr(lie, "keeps_the_call", False)
        )

    def _longest_seconds(self, lie: Lie) -> float:
        if lie.method == "GetTokenizer":
            return TOKENIZER_SECONDS
        return DEADLINE_SECONDS + 1 if self._is_endured(lie) else SOON_SECONDS

    async def _ask(self, cell: Cell) -> list[str]:
        """Generate, and return what is wrong with it."""
        prompt = next(self._prompts)  # whoever has had a text is chosen for it
        stream = await self._system.generate(seconds=DEADLINE_SECONDS, **cell.request(prompt))
        return _wrong(stream, prompt, cell)

    async def _ask_for_template(self) -> list[str]:
        request = pb.GetSystemChatTemplateRequest()
        await self._system.servicer.GetSystemChatTemplate(request, None)
        return []

    async def _fetch_tokenizer(self) -> list[str]:
        """Fetch it as an orchestrator does that has none; it tries again whatever the error."""
        codecs, server = Codecs(), self._lying[0]
        with suppress(errors.PacelineError):
            await codecs.fetch(server)
            codec = codecs.get(server.facts.tokenizer_fingerprint)
            plainly = {"add_special_tokens": False, "parse_special_tokens": False}
            if codec is None or codec.encode(_TEXT, **plainly) != PROMPT:
                return ["another tokenizer than the model's was believed"]
        return []

    async def _afterwards(self, lie: Lie, cell: Cell) -> list[str]:
        """Return what is left, and whether the next request is served."""
        left: list[str] = []
        with suppress(_BrokenPromiseError):
            await self._until(lambda: not self._tasks(), "it is over")
        left += self._tasks()
        if not self._liar.told[lie.method]:
            left.append("it was never told")
        await self._end(lie)
        left += await self._used_again()
        with suppress(_BrokenPromiseError):  # it may still be asked whether it is well
            await self._until(lambda: not self._counted(), "nothing is counted")
        left += self._counted()
        began = now()
        try:
            left += [f"the next request: {it}" for it in await self._ask(cell)]
        except errors.PacelineError as error:
            left.append(f"the next request ended with {error!r}")
        if now() - began > 5.0:
            left.append(f"the next request took {now() - began:.1f} s")
        left += await self._used_again()
        return left

    async def _used_again(self) -> list[str]:
        try:
            await self._until(lambda: all(it.ready for it in self._lying), "the liar is used again")
        except _BrokenPromiseError as wrong:
            states = {it.name: it.status for it in self._lying}
            return [f"{wrong}: {states}"]
        return []

    def _tasks(self) -> list[str]:
        """Name the tasks and timers of requests, but the bystander's."""
        names = self._system.leftovers()
        for own in ("run bystander", "renew sessions"):
            if own in names:
                names.remove(own)
        return [it for it in names if it.startswith(_OF_REQUESTS)]

    def _counted(self) -> list[str]:
        """Say what is still counted at servers, but for the bystander."""
        counts = {
            name: sum(getattr(it, name) for it in self._system.pool.servers) - 1
            for name in ("session_count", "call_count", "primary_count")
        }
        return [f"{name} {count:+d}" for name, count in counts.items() if count > 0]

    @property
    def is_worn_out(self) -> bool:
        """Whether the bystander's stream takes nearly as long as any may."""
        return now() - self._bystander.began > _BYSTANDER_SECONDS

    def _beside(self, first: int, *, since: float) -> list[str]:
        """Say for how long the bystander heard nothing, if that was long."""
        times = [since, *(at for at, _ in self._bystander.arrivals[first:]), now()]
        gap = max(later - earlier for earlier, later in pairwise(times))
        return (
            [f"another stream heard nothing for {gap:.1f} s"] if gap > LONGEST_GAP_SECONDS else []
        )

    async def _stream_beside(self) -> None:
        await self._system.generate(
            into=self._bystander,
            seconds=100_000,
            request_id="bystander",
            strategy=pb.STRATEGY_AUTOREGRESSIVE,
            max_tokens=4000,
        )

    async def _until(self, condition: Any, what: str) -> None:
        ends = now() + USED_AGAIN_SECONDS
        while not condition():
            if now() > ends:
                raise _BrokenPromiseError(f"not within {USED_AGAIN_SECONDS:g} s: {what}")
            await asyncio.sleep(0.05)


def _wrong(stream: Stream, prompt: Sequence[int], cell: Cell) -> list[str]:
    """Say what a client got that plain decoding at an honest target does not give."""
    expected = continuation(prompt, TOKENS)
    found = []
    if stream.finished is None:
        found.append("its last message is missing")
    if stream.token_ids != expected:
        found.append(f"its tokens are {stream.token_ids}, not {expected}")
    if cell.says_logprobs:
        text = [*prompt, *expected]
        ends = range(len(prompt) + 1, len(text) + 1)
        logprobs = [it for chunk in stream.chunks for it in chunk.logprobs]
        if logprobs != [logprob_of(text[:end]) for end in ends]:
            found.append(f"its log probabilities are {logprobs}")
        told = [it for chunk in stream.chunks for it in chunk.top_logprobs]
        likeliest = [list(zip(it.token_ids, it.logprobs, strict=True)) for it in told]
        if likeliest != [likeliest_after(text[: end - 1], TOP_LOGPROBS) for end in ends]:
            found.append(f"its likeliest tokens are {likeliest}")
    return found


class _Tracebacks(logging.Handler):
    """Keeps what is logged with a traceback: a bug of our own."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._found.append(f"a bug was logged: {record.getMessage()}: {record.exc_info[1]!r}")


_RULES = tuple(VerificationRule)
_TEMPLATE = "{{ messages }}"
_TEXT = byte_tokenizer().decode(PROMPT)
_OTHER_STEP_SECONDS = 0.8


@cache
def _tokenizer_bytes() -> bytes:
    return byte_tokenizer().to_str().encode()


def _often(position: int) -> bool:
    return position % 5 != 0


def _targets(count: int) -> list[VirtualServer]:
    return targets(
        count, rules=_RULES, self_draft_depth=3, agrees=_often, tokenizer=_tokenizer_bytes()
    )


def _lying(server: VirtualServer, liar: Liar) -> VirtualLiar:
    return VirtualLiar(
        server.role,
        name=server.name,
        latency_seconds=server.latency_seconds,
        rules=server.rules,
        self_draft_depth=server.self_draft_depth,
        agrees=server.agrees,
        chat_template=server.chat_template,
        tokenizer=server.tokenizer,
        liar=liar,
    )


class Arrangement(Enum):
    """Who lies, and who is honest beside it."""

    DRAFTER_ALONE = "the only drafter lies"
    DRAFTER = "one of two drafters lies"
    TARGET = "one of three targets lies"
    TARGETS_ALL = "all targets lie"

    def servers(self) -> tuple[list[VirtualServer], list[VirtualLiar]]:
        """Return all servers of the model, and those of them that lie: the ones chosen first."""
        tokenizer = {"tokenizer": _tokenizer_bytes()}
        honest = [*drafters(2, agrees=_often, rules=_RULES, **tokenizer), *_targets(3)]
        for target in honest[2:]:
            target.chat_template = ChatTemplate(
                fingerprint=sha256(_TEMPLATE.encode()).hexdigest(), source=_TEMPLATE
            )
        liar = Liar()
        lying_drafter, lying_target = _lying(honest[0], liar), _lying(honest[2], liar)
        match self:
            case Arrangement.DRAFTER_ALONE:
                return [lying_drafter, *honest[2:4]], [lying_drafter]
            case Arrangement.DRAFTER:
                return [lying_drafter, honest[1], *honest[2:4]], [lying_drafter]
            case Arrangement.TARGET:
                return [honest[0], lying_target, *honest[3:]], [lying_target]
            case Arrangement.TARGETS_ALL:
                lying = [lying_target, _lying(honest[3], liar)]
                return [honest[0], *lying], lying


@asynccontextmanager
async def arranged(arrangement: Arrangement) -> AsyncIterator[Trials]:
    """Run an orchestrator, with a stream beside the trials at a target with another model."""
    models, liars = arrangement.servers()
    other = VirtualServer(
        "target",
        name="other",
        fingerprint="other",
        latency_seconds=_OTHER_STEP_SECONDS,
        tokenizer=_tokenizer_bytes(),
    )
    discovery = VirtualDiscovery(other)
    async with virtual_system(*models, other, discovery=discovery) as system:
        trials = Trials(system, liars, has_honest=arrangement is not Arrangement.TARGETS_ALL)
        async with trials.running():
            discovery.list(*models, other)
            await system.until(lambda: sum(it.ready for it in system.pool.servers) > len(models))
            yield trials


def findings(lies: Sequence[tuple[Lie, Cell]], arrangement: Arrangement) -> list[str]:
    """Tell lies one after the other, and return what they did that they must not.

    An orchestrator that one of them ends is begun anew with the next one.
    """
    found: list[str] = []
    left = deque(lies)

    async def play() -> None:
        async with arranged(arrangement) as trials:
            while left and not trials.is_worn_out:
                lie, cell = left.popleft()
                told = await trials.tell(lie, cell)
                found.extend(f"{lie} ({cell}): {it}" for it in told)

    while left:
        count = len(left)
        try:
            run_virtually(play(), limit_seconds=_LONGEST_RUN_SECONDS)
        except Exception as end:
            if len(left) == count:
                raise  # before the first lie: the trial is wrong
            lie = lies[len(lies) - len(left) - 1][0]
            found.append(f"{lie}: it ended everything: {end!r}")
    return found


def _is_told_by_logprobs_alone(lie: Lie, cell: Cell) -> bool:
    """Whether a lie is about how many tokens a target has decoded, where nothing else tells it."""
    is_about_tokens = lie.method == "Decode" and getattr(lie, "path", "") == "token_ids"
    return is_about_tokens and not cell.says_logprobs
