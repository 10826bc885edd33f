"""Model servers that answer in any order, late, twice or not at all, and come and go."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.max_gram import MaxGram
from paceline_contract.proposal import NOTHING, Proposal
from paceline_protocol.messages import (
    BlockVerified,
    CapacityChanged,
    DecodeEnded,
    DecodeFailed,
    DraftEnded,
    DraftFailed,
    Event,
    StartDraft,
    StartVerify,
    TokensDecoded,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.methods import METHODS, Strategy, create_method
from support.chains import drafted
from unit.protocol.checker import CheckedMethod, texts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_protocol.task import DecodingTask
    from unit.protocol.checker import Decoding, Drafting, Text

_PLAIN, _ACCEPTS, _RESIDUAL, _DRAFTS = range(4)
_ITSELF = 9  # a target that drafts, as the drafter that it is


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

    def guess(self, text: Text, *, depth: int, width: int) -> Proposal:
        """Return a tree after a text, as deep and at each place as wide as that."""
        texts, parents = [text], []
        for parent, before in enumerate(texts):
            if len(before) - len(text) < depth:
                found = self.ranked(_ITSELF, before, width)
                texts += [(*before, token_id) for token_id in found]
                parents += [parent] * len(found)
        return Proposal(tuple(each[-1] for each in texts[1:]), tuple(parents))

    def ranked(self, drafter: int, text: Text, width: int) -> list[int]:
        """Return what a drafter holds likeliest after a text, best first."""
        first = self.draft(drafter, text)
        others = [token for token in range(self.vocabulary_size) if token != first]
        turn = self._draw(_DRAFTS + drafter, (*text, -1)) % len(others)
        return [first, *others[turn:], *others[:turn]][:width]

    def judge_tree(self, command: StartVerify) -> tuple[tuple[int, ...], int]:
        path: list[int] = []
        texts = texts_of(command)
        while True:
            text = texts[path[-1] + 1 if path else 0]
            said = self.plain(text)
            if (*text, said) not in texts:
                return tuple(path), said
            path.append(texts.index((*text, said)) - 1)

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
    short_verdicts: float = 0.0
    """Of a tree: as of a target that judges no trees, but the chain that it can make of one."""
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
        self.widths: set[int] = set()  # of the trees that were judged, at their first place

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
        for drafting in drafts:
            if drafting.command.drafter == self.method.capacity.text:
                return self._draft_from_text(drafting.command, drafting.text)
        verifications = list(self.method.verifications.values())
        decodes = list(self.method.decodes.values())
        working = drafts or verifications or decodes
        if self._happens(self.weather.capacity_change) or not working:
            return self._change_capacity()
        if self.ghosts and self._happens(self.weather.ghosts):
            ghost = self.random.choice(self.ghosts)
            if self.method.is_stale(ghost):
                return ghost
        draft_weight = self.weather.drafter_weight * len(drafts)
        verify_weight = self.weather.target_weight * len(verifications)
        if decodes:
            return self._decode(self.random.choice(decodes))
        if self.random.random() * (draft_weight + verify_weight) < draft_weight:
            drafting = self.random.choice(drafts)
            if drafting.command.width > 1:
                return self._draft_tree(drafting)
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

    def _draft_from_text(self, command: StartDraft, text: Text) -> Event:
        """Answer as the text itself does: before anything else, and sometimes with less."""
        if len(text) > len(command.prefix) or self._happens(self.weather.failure):
            return DraftEnded(command.draft_id)
        max_gram = MaxGram()
        max_gram.extend(text)
        tokens = max_gram.propose(self.random.choice([command.max_tokens] * 3 + [1]))
        if not tokens:
            return DraftEnded(command.draft_id)
        rejection = self.method.task.rule is VerificationRule.REJECTION
        distributions = [(command.drafter, token) for token in tokens] if rejection else []
        return drafted(command.draft_id, tokens, distributions)

    def _draft_tree(self, drafting: Drafting) -> Event:
        command = drafting.command
        if self._happens(self.weather.failure):
            return self.random.choice([DraftFailed, DraftEnded])(command.draft_id)
        left = command.max_tokens - (len(drafting.text) - len(command.prefix))
        texts, tip = list(drafting.texts), drafting.text
        parents: list[int] = []
        for _ in range(min(left, self.random.choice([1, 1, 1, 2, 5]))):
            followed = {text[:-1] for text in texts[1:]}
            open_texts = [text for text in texts if text not in followed and text != tip]
            due = [tip, *self.random.sample(open_texts, min(command.branch_count, len(open_texts)))]
            for text in due:
                for token in self.models.ranked(command.drafter, text, command.width):
                    parents.append(texts.index(text))
                    texts.append((*text, token))
            tip = next(text for text in texts[1:] if text[:-1] == tip)
        new = texts[len(drafting.texts) :]
        piece = Proposal(tuple(text[-1] for text in new), tuple(parents))
        return TokensDrafted(command.draft_id, piece)

    def _verify(self, command: StartVerify) -> Event:
        # What is withdrawn later may still be answered late.
        self.widths.add(sum(len(it) == len(command.prefix) + 1 for it in texts_of(command)))
        path, said = self._judge(command)
        guess = NOTHING
        if command.propose:
            text = (*command.prefix, *command.proposal.along(path), said)
            depth, width = self.random.choice([(0, 1), (1, 4), (2, 2), (3, 2), (9, 1)])
            guess = self.models.guess(text, depth=depth, width=width)
        verdict = BlockVerified(command.verify_id, path, said, proposal=guess)
        if self._happens(self.weather.failure):
            self.ghosts.append(verdict)
            return VerifyFailed(command.verify_id)
        return verdict

    def _judge(self, command: StartVerify) -> tuple[tuple[int, ...], int]:
        if command.proposal.parents:
            path, said = self.models.judge_tree(command)
            if self._happens(self.weather.short_verdicts) and path:
                path, said = path[:-1], command.proposal.token_ids[path[-1]]
            return path, said
        accepted, said = self.models.judge(
            command.prefix, command.proposal.token_ids, self.method.task.rule
        )
        return tuple(range(accepted)), said

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
        drafters = self._some(self.servers.drafters)
        return CapacityChanged(
            targets,
            drafters,
            text=self.servers.text if self.servers.text in drafters else None,
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
    text: bool = False,
    stop_after: int | None = None,
) -> World:
    servers = CapacityChanged(
        tuple(range(target_count)),
        tuple(range(drafter_count + text)),
        text=drafter_count if text else None,
    )
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
