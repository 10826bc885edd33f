"""One model server, as the orchestrator knows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from paceline.v1.drafter_service_pb2_grpc import DrafterServiceStub
from paceline.v1.model_service_pb2_grpc import ModelServiceStub
from paceline.v1.session_service_pb2_grpc import SessionServiceStub
from paceline.v1.target_service_pb2_grpc import TargetServiceStub
from paceline_orchestrator.fleet import shortage
from paceline_orchestrator.fleet.discovery import Availability
from paceline_orchestrator.fleet.latency import ObservedLatency
from paceline_orchestrator.fleet.silence import SilenceWatch
from paceline_serving.exchanging_channel import ExchangingChannel

if TYPE_CHECKING:
    import grpc

    from paceline_contract.calls import Hardware
    from paceline_orchestrator.fleet.discovery import Endpoint, Role
    from paceline_orchestrator.fleet.wire import ModelFacts

NOT_REACHED = "NOT_REACHED"
"""The health status of a server that nothing was heard of, or whose connection has ended."""
LOADING = "LOADING"
"""The health status, or the trouble beside NOT_SERVING, of a server whose model is not loaded."""
NOT_SERVING = "NOT_SERVING"
"""The health status of a server that can be reached, and says that it takes nothing new."""
REMOVED = "REMOVED"
"""That of one which discovery does not name any more."""
SILENT = "SILENT"
"""The pause status of one that left calls unanswered: it gets work when it has computed a token."""


class Usability(NamedTuple):
    """What a server can be used for.

    Attributes:
        is_ready: Whether it takes work.
        is_leaving: Whether it is about to end, though it still serves.
    """

    is_ready: bool
    is_leaving: bool


class ServerLoad(NamedTuple):
    """How servers are ordered: the smallest load first, compared field by field.

    Attributes:
        call_count: Requests whose primary target it is, and calls of other orchestrators.
        session_count: Sessions of this orchestrator.
        unfamiliarity: Minus the number of the sequence's tokens that it has had before.
        may_be_busy: Whether other orchestrators may have requests there: it was not free a moment
            ago.
    """

    call_count: float
    session_count: int
    unfamiliarity: int
    may_be_busy: bool


class ModelServer:
    """How to reach it, what it is, what it costs, how loaded it is, and whether it takes work.

    Attributes:
        facts: What it said of its model; None before it was reached.
        latency: What its calls cost.
        silence: Gives up the calls that it leaves unanswered.
        handles: The handles of the sessions that this orchestrator has open there.
        session_count: Sessions that this orchestrator has open there.
        call_count: Verifications or drafts of this orchestrator that run or wait there.
        primary_count: Requests of this orchestrator whose primary target it is.
        health_status: Why the server is not well; None if it says that it is.
        trouble: What else is known of why not, such as the words of an error; None for nothing.
        bugs: What went wrong here, unforeseen, while its health was followed.
        twin: The server that is the same process at another address; None if there is none.
        pause_status: Why it gets no work for a while, though it may be well; None if it does.
        pause_count: Pauses so far; the newest one counts.
        failure_count: Failures since the last good answer; see Pauses.
        failed_at: When the last one was counted, on the monotonic clock.
        ready_since: When it became ready, on the monotonic clock.
        unready_since: When it was last seen to be not ready, or was found, on the monotonic clock.
        last_order: How many requests had begun when one last took it.
        announced: Its usability when the pool's listeners were last told of it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        channel: grpc.aio.Channel,
        *,
        silence: SilenceWatch | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.channel = channel
        self.models = ModelServiceStub(channel)
        self.sessions = SessionServiceStub(channel)
        self.drafter = DrafterServiceStub(channel)
        self.target = TargetServiceStub(channel)
        self.facts: ModelFacts | None = None
        self.latency = ObservedLatency()
        self.silence = silence or SilenceWatch()
        self.handles: set[str] = set()
        self.session_count = 0
        self.call_count = 0
        self.primary_count = 0
        self.health_status: str | None = NOT_REACHED
        self.trouble: str | None = None
        self.bugs: set[type[Exception]] = set()
        self.twin: ModelServer | None = None
        self.pause_status: str | None = None
        self.pause_count = 0
        self.failure_count = 0
        self.failed_at = 0.0
        self.announced = Usability(is_ready=False, is_leaving=False)
        self.ready_since = 0.0
        self.unready_since = time.monotonic()
        self.last_order = 0

    @property
    def name(self) -> str:
        """Its name in timelines and logs."""
        return self.endpoint.name

    @property
    def role(self) -> Role:
        """What it is for."""
        return self.endpoint.role

    @property
    def ready(self) -> bool:
        """Whether it takes work now."""
        return self.status is None

    @property
    def may_be_back_soon(self) -> bool:
        """Whether it is away, and has not been for so long that requests stop to count on it."""
        return not self.ready and time.monotonic() - self.unready_since < shortage.AWAY_SECONDS

    @property
    def status(self) -> str | None:
        """The reason why it is not ready; None if it is."""
        if self.endpoint.availability is not Availability.READY:
            return self.endpoint.availability.name
        return self.health_status or self.misfit or self._doubled or self.pause_status

    @property
    def is_well(self) -> bool:
        """Whether it and discovery say that it can be used."""
        return self.endpoint.availability is Availability.READY and not self.health_status

    @property
    def pauses(self) -> bool:
        """Whether it would take work, and gets none for some seconds, since a call failed."""
        is_fit = self.is_well and not self.misfit and not self._doubled
        return is_fit and self.pause_status not in (None, SILENT)

    @property
    def misfit(self) -> str | None:
        """How it is not what it is listed as; None if it is, or has not said what it is."""
        if self.facts is None or self.facts.role in {None, self.role}:
            return None
        return f"is a {self.facts.role}, not a {self.role}"

    @property
    def _doubled(self) -> str | None:
        return f"is {self.twin.name}, listed twice" if self.twin else None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the models that compute there: a stack's, largest first, or the one."""
        if self.facts is None:
            return ()
        return self.facts.stage_names or (self.facts.model_name,)

    @property
    def hardware(self) -> Hardware | None:
        """What it computes on, if it has said so."""
        return self.facts.hardware if self.facts else None

    @property
    def leaving(self) -> bool:
        """Whether it is about to end, though it still serves: what runs there shall move."""
        is_terminating = self.endpoint.availability is Availability.TERMINATING
        return is_terminating or self.health_status == NOT_SERVING

    def load(self, *, tolerated_calls: int = 0, familiar_length: int = 0) -> ServerLoad:
        """Return its load; servers with the smallest load are chosen first.

        Calls of other orchestrators count in halves. Otherwise the rest of calls that ended long
        ago would order equal servers, in the same way at all orchestrators.

        Args:
            tolerated_calls: So many calls of other orchestrators do not count.
            familiar_length: So many of the sequence's tokens it has had before.
        """
        other_calls = max(0.0, round(2 * self.latency.other_calls) / 2 - tolerated_calls)
        return ServerLoad(
            call_count=self.primary_count + other_calls,
            session_count=self.session_count,
            unfamiliarity=-familiar_length,
            may_be_busy=not self.latency.seems_free,
        )

    @property
    def usability(self) -> Usability:
        """What it can be used for now."""
        return Usability(is_ready=self.ready, is_leaving=self.leaving)

    @property
    def process_name(self) -> str:
        """The name of the process that is there now: the next one under its name is another."""
        return f"{self.name} {self.facts.incarnation if self.facts else ''}"

    def adopt(self, facts: ModelFacts) -> bool:
        """Take over what it says of itself, and send its calls on a stream if it takes them so.

        Returns:
            Whether another process than before says it.
        """
        before = self.facts.incarnation if self.facts else ""
        is_another = before != "" and facts.incarnation != before
        if is_another:
            self._forget_the_process()
        self.facts = facts
        if isinstance(self.channel, ExchangingChannel):
            self.channel.exchanges = facts.exchanges_calls
        self.latency.adopt(
            facts.forward_latencies,
            prefill_fixed_ns=facts.prefill_fixed_ns,
            prefill_ns_per_token=facts.prefill_ns_per_token,
            shares_forwards=facts.shares_forwards,
        )
        return is_another

    def _forget_the_process(self) -> None:
        """Forget what was learnt of a process that has gone: of its model, its load, its room.

        The count of failed calls stays, since they may be the device's fault. A server that was
        silent has to compute a token first, also as another process.
        """
        self.latency = ObservedLatency()
        self.silence.forget()
        if self.pause_status != SILENT:
            self.pause_status = None
