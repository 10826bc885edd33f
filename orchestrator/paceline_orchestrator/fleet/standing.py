"""How each server stands, in a word and a sentence: for the log, the metrics and GetSystemInfo.

A server that takes work is used, or rests. Which of the two follows from the requests of this
orchestrator: a server that none of many took rests, for whatever reason; the sentence has what is
known of the reason. Counted in requests, and not in seconds, the word is the same at a busy time
and at a quiet one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from statistics import median_low
from typing import TYPE_CHECKING

from paceline_orchestrator.fleet.discovery import Availability, Role
from paceline_orchestrator.fleet.fitting import drafter_obstacle, target_obstacle, unapplied
from paceline_orchestrator.fleet.hardware import count_side_by_side
from paceline_orchestrator.fleet.server import LOADING, NOT_REACHED, NOT_SERVING, SILENT
from paceline_orchestrator.fleet.words import Standing, Word
from paceline_serving.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_orchestrator.fleet.wire import ModelFacts

# A server rests that none of so many requests took, for each server of its role. If each took one
# of n by chance, one of them would be left out so by chance with a probability of e^-10.
_ORDERS_EACH = 10
# Such a server is told of as slow.
_SLOW_FACTOR = 2
_ENGINE_CHARACTERS = 64  # of a name that a server tells
_NAMED_SERVERS = 3
_NOTE_CHARACTERS = 200

_AVAILABILITY = {
    Availability.TERMINATING: Standing(Word.DRAINING, "discovery says that it is about to end"),
    Availability.NOT_READY: Standing(
        Word.LOADING, "discovery says that it is not ready: it starts, or fails its probes"
    ),
}
# By the reason of the error that its health, or what it said of its model, ended with.
_WORDS = {
    LOADING: (Word.LOADING, "its model is not loaded yet"),
    "DRAINING": (Word.DRAINING, "it is shutting down"),
    "DEADLINE": (Word.SILENT, "it ends its health's stream too early, or does not say what it is"),
    "UNSUPPORTED": (
        Word.TOO_OLD,
        "it does not know what it is asked: it is too old, or no model server",
    ),
    "UNAUTHENTICATED": (Word.REFUSES, "it takes no calls from this orchestrator"),
    "PERMISSION_DENIED": (Word.REFUSES, "it takes no calls from this orchestrator"),
}


@dataclass(slots=True)
class Orders:
    """The requests of this orchestrator so far.

    Attributes:
        count: How many have begun.
        note: Why AUTO decodes as it does, as it last said.
    """

    count: int = 0
    note: str = ""

    def begin(self, note: str) -> None:
        """Count a request; a note is what AUTO says of it, empty where it had no choice."""
        self.count += 1
        self.note = note or self.note


def standings(
    servers: Sequence[ModelServer], *, model: ModelFacts | None, orders: Orders
) -> Mapping[ModelServer, Standing]:
    """Say how each server stands.

    Args:
        servers: All of them.
        model: What new requests are served with; None while no target has said what it is, so that
            drafters alone can have nothing against them.
        orders: The requests so far.

    Cost: a few microseconds for each server.
    """
    obstacles = {it: _obstacle(it, model) for it in servers}
    usable = [it for it in servers if obstacles[it] is None]
    group = _Group(usable, model, orders)
    return {it: obstacle or group.standing(it) for it, obstacle in obstacles.items()}


def _obstacle(server: ModelServer, model: ModelFacts | None) -> Standing | None:
    """Say why a server gets no work; None if it may get some."""
    return (
        _AVAILABILITY.get(server.endpoint.availability)
        or _ill(server)
        or _listed_wrong(server)
        or _paused(server)
        or _unfitting(server, model)
    )


def _ill(server: ModelServer) -> Standing | None:
    """Say what its own health says against it, or the attempt to hear of it."""
    status, trouble = server.health_status, server.trouble
    if status is None:
        return None
    if status == NOT_SERVING:
        if trouble == LOADING:
            return Standing(*_WORDS[LOADING])
        if server.pause_status == SILENT:
            words = "it left calls unanswered, and its health says NOT_SERVING: a forward hangs"
            return Standing(Word.SILENT, words)
        return Standing(
            Word.DRAINING, "its health says NOT_SERVING: it shuts down, or a forward hangs"
        )
    kind, _, words = status.partition(": ")
    if kind == "BAD_ANSWER":
        return Standing(Word.BAD_ANSWER, f"it said what it must not: {words}")
    if kind == "FAILED":
        return Standing(Word.UNWATCHED, f"it cannot be watched ({words}): see the log")
    if kind in _WORDS:
        word, detail = _WORDS[kind]
        return Standing(word, f"{detail} ({trouble})" if trouble else detail)
    if kind != NOT_REACHED:
        return Standing(Word.FAILING, f"it cannot say how it is: {kind} ({trouble})")
    return Standing(Word.UNREACHABLE, f"it cannot be reached: {trouble or 'nothing was heard yet'}")


def _listed_wrong(server: ModelServer) -> Standing | None:
    if server.misfit:
        return Standing(Word.OTHER_ROLE, f"it {server.misfit}")
    if server.twin is not None:
        words = f"it is {server.twin.name}, at another address: one process counts once"
        return Standing(Word.LISTED_TWICE, words)
    return None


def _paused(server: ModelServer) -> Standing | None:
    if server.pause_status is None:
        return None
    kind, _, words = server.pause_status.partition(": ")
    match kind:
        case "SILENT":
            return Standing(
                Word.SILENT, "it left calls unanswered: it has to compute a token for a probe first"
            )
        case "BAD_ANSWER":
            return Standing(Word.BAD_ANSWER, f"it answered what it must not: {words}")
        case _:
            return Standing(Word.FAILING, f"calls to it failed ({kind}): it pauses for a while")


def _unfitting(server: ModelServer, model: ModelFacts | None) -> Standing | None:
    if server.facts is None or model is None:
        return None
    find = target_obstacle if server.role is Role.TARGET else drafter_obstacle
    return find(server.facts, model)


class _Group:
    """The servers that may get work, and what tells one of them from others of its role.

    What is asked of all of them together is worked out once, here: hundreds of servers are looked
    at whenever one of them changes.
    """

    def __init__(
        self, usable: Sequence[ModelServer], model: ModelFacts | None, orders: Orders
    ) -> None:
        self._model = model
        self._orders = orders
        self._peers = {role: _Peers([it for it in usable if it.role is role]) for role in Role}
        self._working_roles = {it.role for it in usable if not self._rests(it)}
        by_hardware: defaultdict[str, list[ModelServer]] = defaultdict(list)
        for server in usable:
            if server.hardware is not None:
                by_hardware[server.hardware.identity].append(server)
        self._crowded = {
            identity: [it.name for it in sharing]
            for identity, sharing in by_hardware.items()
            if count_side_by_side([it.hardware for it in sharing], drafter=None) < len(sharing)
        }

    def standing(self, server: ModelServer) -> Standing:
        """Say whether a server that may get work is used, or rests and why."""
        if self._model is None:
            return Standing(Word.RESTING, "no target has said yet what there is to draft for")
        remarks = self._remarks(server)
        if not self._rests(server):
            return Standing(Word.USED, "; ".join(remarks))
        return Standing(Word.RESTING, "; ".join((self._why_it_rests(server), *remarks)))

    def _rests(self, server: ModelServer) -> bool:
        left_out = self._orders.count - server.last_order
        return not server.session_count and left_out >= (
            _ORDERS_EACH * self._peers[server.role].count
        )

    def _why_it_rests(self, server: ModelServer) -> str:
        left_out = self._orders.count - server.last_order
        if server.role in self._working_roles:
            return f"the last {left_out} requests did with other {server.role}s: it is a spare"
        words = f"the last {left_out} requests did without a {server.role}"
        if server.role is Role.DRAFTER and self._orders.note:
            words += f"; AUTO last took {self._orders.note[:_NOTE_CHARACTERS]}"
        return words

    def _remarks(self, server: ModelServer) -> Iterator[str]:
        """Yield what keeps it from a part of the work, or makes it worth less than others."""
        facts, model = server.facts, self._model
        if facts is None or model is None:
            return
        peers = self._peers[server.role]
        yield from _age(facts.version)
        if peers.step_ns and server.latency.step_ns > _SLOW_FACTOR * peers.step_ns:
            ours, theirs = (f"{it / 1e6:.1f} ms" for it in (server.latency.step_ns, peers.step_ns))
            yield f"it takes {ours} for a token, most {server.role}s {theirs}"
        crowd = self._crowded.get(server.hardware.identity, ()) if server.hardware else ()
        if crowd:
            names = _some(it for it in crowd if it != server.name)
            yield f"it shares its hardware with {names}: for DSI they count as fewer"
        if facts.tree_token_limit < peers.tree_token_limit:
            ours, theirs = (str(it) for it in (facts.tree_token_limit, peers.tree_token_limit))
            trees = f"trees of at most {ours} tokens, others of {theirs}"
            yield f"it takes {trees if facts.tree_token_limit else 'chains alone'}"
        others = peers.self_draft_kinds - {facts.self_draft_kind}
        if others:
            kinds = " or ".join(sorted(it or "nothing" for it in others))
            ours = facts.self_draft_kind or "nothing"
            yield f"it drafts for itself with {ours}, others with {kinds}"
        yield from _limits(facts, model)


class _Peers:
    """All usable servers of a role together.

    Attributes:
        count: How many there are.
        step_ns: What a token takes at the middle one of them, the faster of two; 0: not known.
        tree_token_limit: The most tokens of a tree that one of them takes.
        self_draft_kinds: What they draft for themselves with; empty is one that does not.
    """

    def __init__(self, servers: Sequence[ModelServer]) -> None:
        known = [it.facts for it in servers if it.facts]
        steps = [it.latency.step_ns for it in servers if it.latency.step_ns]
        self.count = len(servers)
        self.step_ns = median_low(steps) if steps else 0
        self.tree_token_limit = max((it.tree_token_limit for it in known), default=0)
        self.self_draft_kinds = {it.self_draft_kind for it in known}


def _age(version: str) -> Iterator[str]:
    """Tell of a server of another minor version than ours; see docs/versioning.md."""
    if _minor(version) != _minor(VERSION):
        theirs = f"of version {version}" if version else "too old to say its version"
        yield f"it is {theirs}, this orchestrator is of {VERSION}: they may not fit together"


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _limits(facts: ModelFacts, model: ModelFacts) -> Iterator[str]:
    if facts.context_length < model.context_length:
        ours, theirs = facts.context_length, model.context_length
        yield f"its context is {ours} tokens, the longest {theirs}: longer texts go on without it"
    if model.rejection_sampling and not facts.rejection_sampling:
        yield "it works for no request under REJECTION"
    missing = unapplied(frozenset().union(*model.sampling_parameters), facts, facts)
    if names := sorted(missing - {"grammar"}):
        yield f"it works for no request with {', '.join(names)}"
    if model.scores_prompts and not facts.scores_prompts:
        yield "it works for no request with prompt_logprobs"
    if facts.grammar_engine != model.grammar_engine:
        own, most = (it.grammar_engine[:_ENGINE_CHARACTERS] or "none" for it in (facts, model))
        yield f"it works for no request with a grammar: it has {own}, most have {most}"


def _some(names: Iterable[str]) -> str:
    found = iter(names)
    first = list(islice(found, _NAMED_SERVERS))
    return ", ".join([*first, "..."] if next(found, None) else first)
