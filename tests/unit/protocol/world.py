"""Model servers that answer in any order, late, twice or not at all, and come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_protocol.messages import (
    CapacityChanged,
    DecodeEnded,
    DecodeFailed,
    DraftEnded,
    DraftFailed,
    Event,
    StartDraft,
    StartVerify,
    TokensDecoded,
    VerifyFailed,
)
from paceline_protocol.methods import METHODS, Strategy, create_method
from paceline_protocol.task import DecodingTask, VerificationRule
from support.chains import drafted, verified
from unit.protocol.checker import CheckedMethod

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unit.protocol.checker import Decoding, Text

_PLAIN, _ACCEPTS, _RESIDUAL, _DRAFTS = range(4)


@dataclass(frozen=True)
class Models:
    """A target and drafters as functions of the text, over a small vocabulary.

    Under REJECTION what the target says after a text also depends on which token is judged there,
    as with rejection sampling, so a verdict from the wrong owner shows.
    """

    seed: int
    agreement: float
    vocabulary_size: int = 4

    def plain(self, text: Text) -> int:
        return self._draw(_PLAIN, text) % self.vocabulary_size

    def judged(self, text: Text, draft_token: int) -> int:
        if self._draw(_ACCEPTS, (*text, draft_token)) % 100 < 100 * self.agreement:
            return draft_token
        others = [t for t in range(self.vocabulary_size) if t != draft_token]
        return others[self._draw(_RESIDUAL, (*text, draft_token)) % len(others)]

    def draft(self, drafter: int, text: Text) -> int:
        draw = self._draw(_DRAFTS + drafter, text)
        if draw % 100 < 100 * self.agreement:
            return self.plain(text)
        return draw // 100 % self.vocabulary_size

    def judge(self, prefix: Text, block: Text, rule: VerificationRule) -> tuple[int, int]:
        text = prefix
        for count, token_id in enumerate(block):
            exact = rule is VerificationRule.EXACT
            said = self.plain(text) if exact else self.judged(text, token_id)
            if said != token_id:
                return count, said
            text += (token_id,)
        return len(block), self.plain(text)

    def _draw(self, purpose: int, text: Text) -> int:
        return hash((self.seed, purpose, text)) >> 3


@dataclass(frozen=True)
class Weather:
    """How likely what is. Weights of the next event; probabilities for the rest."""

    drafter_weight: float = 1.0
    target_weight: float = 1.0
    failure: float = 0.0
    ghosts: float = 0.0
    capacity_change: float = 0.0


class World:
    """Runs a checked method against models in any weather, to its end."""

    def __init__(
        self,
        method: CheckedMethod,
        models: Models,
        *,
        servers: CapacityChanged,
        weather: Weather,
        seed: int,
    ) -> None:
        self.method = method
        self.models = models
        self.servers = servers
        self.weather = weather
        self.random = random.Random(seed)
        self.ghosts: list[Event] = []
        self.overlap = 0

    def run(self, *, max_events: int = 5000, stop_after: int | None = None) -> None:
        self.method.start()
        for count in range(max_events):
            if self.method.finish:
                break
            if count == stop_after:
                self.method.stop()
                break
            self.overlap = max(self.overlap, len(self.method.verifications))
            event = self._next_event()
            self.ghosts.append(event)
            self.method.handle(event)
        assert self.method.finish, "it ends"
        for ghost in self.ghosts[-5:]:
            self.method.handle(ghost)
        assert self.method.method.stop() == [], "an ended method has nothing to stop"

    def _next_event(self) -> Event:
        drafts = list(self.method.drafts.values())
        verifications = list(self.method.verifications.values())
        decodes = list(self.method.decodes.values())
        working = drafts or verifications or decodes
        if self._happens(self.weather.capacity_change) or not working:
            return self._change_capacity()
        if self.ghosts and self._happens(self.weather.ghosts):
            ghost = self.random.choice(self.ghosts)
            if self.method._is_stale(ghost):
                return ghost
        draft_weight = self.weather.drafter_weight * len(drafts)
        verify_weight = self.weather.target_weight * len(verifications)
        if decodes:
            return self._decode(self.random.choice(decodes))
        if self.random.random() * (draft_weight + verify_weight) < draft_weight:
            drafting = self.random.choice(drafts)
            return self._draft(drafting.command, drafting.text)
        return self._verify(self.random.choice(verifications))

    def _draft(self, command: StartDraft, text: Text) -> Event:
        if self._happens(self.weather.failure):
            return self.random.choice([DraftFailed, DraftEnded])(command.draft_id)
        left = command.max_tokens - (len(text) - len(command.prefix))
        tokens: list[int] = []
        for _ in range(min(left, self.random.choice([1, 1, 1, 2, 5]))):
            tokens.append(self.models.draft(command.drafter, text))
            text += (tokens[-1],)
        rejection = self.method.task.rule is VerificationRule.REJECTION
        distributions = [(command.drafter, token) for token in tokens] if rejection else []
        return drafted(command.draft_id, tokens, distributions)

    def _verify(self, command: StartVerify) -> Event:
        # What is withdrawn later may still be answered late.
        verdict = verified(
            command.verify_id,
            *self.models.judge(command.prefix, command.proposal.token_ids, self.method.task.rule),
        )
        if self._happens(self.weather.failure):
            self.ghosts.append(verdict)
            return VerifyFailed(command.verify_id)
        return verdict

    def _decode(self, decoding: Decoding) -> Event:
        decode_id = decoding.command.decode_id
        if self._happens(self.weather.failure):
            return self.random.choice([DecodeFailed, DecodeEnded])(decode_id)
        tokens: list[int] = []
        left = decoding.command.max_tokens - len(decoding.tokens)
        for _ in range(min(left, self.random.choice([1, 1, 1, 2, 5]))):
            tokens.append(self.models.plain((*decoding.text, *tokens)))
            if tokens[-1] in decoding.command.end_ids:
                break
        return TokensDecoded(decode_id, tuple(tokens))

    def _change_capacity(self) -> Event:
        targets = self._some(self.servers.targets)
        return CapacityChanged(
            targets,
            self._some(self.servers.drafters),
            leaving=self._some([it for it in self.servers.targets if it not in targets]),
            lookahead=self.random.choice([None, 1, 4]),
        )

    def _some(self, servers: Sequence[int]) -> tuple[int, ...]:
        return tuple(server for server in servers if self._happens(0.7))

    def _happens(self, probability: float) -> bool:
        return self.random.random() < probability


_CALM = Weather()


def run_world(
    strategy: Strategy,
    task: DecodingTask,
    *,
    models: Models,
    weather: Weather = _CALM,
    seed: int = 0,
    target_count: int = 2,
    drafter_count: int = 1,
    stop_after: int | None = None,
) -> World:
    servers = CapacityChanged(tuple(range(target_count)), tuple(range(drafter_count)))
    method = CheckedMethod(
        create_method(strategy, task, capacity=servers),
        row=METHODS[strategy],
        task=task,
        capacity=servers,
        target=models,
    )
    world = World(method, models, servers=servers, weather=weather, seed=seed)
    world.run(stop_after=stop_after)
    return world
