"""Watches every event and command of a decoding method, and checks the invariants of its row."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from paceline_contract.calls import VerificationRule
from paceline_protocol.invariants import Invariant
from paceline_protocol.messages import (
    AbandonVerify,
    BlockVerified,
    CapacityChanged,
    Command,
    DecodeEnded,
    DecodeFailed,
    DraftEnded,
    DraftFailed,
    EmitTokens,
    Event,
    Finish,
    FinishReason,
    PromoteVerify,
    StartDecode,
    StartDraft,
    StartVerify,
    StopDecode,
    StopDraft,
    TokensDecoded,
    TokensDrafted,
    VerifyFailed,
)
from paceline_protocol.task import DecodingTask, DispatchPolicy
from unit.protocol.idleness import Idleness

if TYPE_CHECKING:
    from paceline_contract.proposal import Proposal
    from paceline_protocol.draft_statistics import DraftStatistics
    from paceline_protocol.methods import DecodingMethod, Method

Text = tuple[int, ...]


class Target(Protocol):
    """The target's say, as a function: the oracle."""

    def plain(self, text: Text) -> int:
        """Return its own token after a text."""

    def judged(self, text: Text, draft_token: int) -> int:
        """Return the token after a text when this draft token is judged there."""


@dataclass
class Drafting:
    """A draft and its texts: what it follows, then that which ends with each token it found."""

    command: StartDraft
    texts: list[Text] = field(default_factory=list)
    text: Text = ()
    """The chain's."""

    def __post_init__(self) -> None:
        self.text = self.command.prefix
        self.texts.append(self.text)

    def take(self, piece: Proposal) -> None:
        for index, token_id in enumerate(piece.token_ids):
            parent = self.texts[piece.parents[index]] if piece.parents else self.text
            if parent == self.text:
                self.text = (*parent, token_id)
            self.texts.append((*parent, token_id))

    @property
    def is_over(self) -> bool:
        return len(self.text) - len(self.command.prefix) >= self.command.max_tokens


@dataclass
class Decoding:
    command: StartDecode
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> Text:
        return self.command.prefix + tuple(self.tokens)

    @property
    def is_over(self) -> bool:
        ended = not self.command.end_ids.isdisjoint(self.tokens)
        return ended or len(self.tokens) >= self.command.max_tokens


class CheckedMethod:
    """A decoding method under watch; it is itself one.

    After every step those invariants are checked that the method's row promises, and for every
    method: that it goes on, and that servers get one thing at a time, within the limits.
    """

    def __init__(
        self,
        method: DecodingMethod,
        *,
        row: Method,
        task: DecodingTask,
        capacity: CapacityChanged,
        target: Target,
    ) -> None:
        self.method = method
        self.row = row
        self.task = task
        self.capacity = capacity
        self.target = target
        self.committed: Text = task.prompt
        self.limit = len(task.prompt) + task.max_tokens
        self.drafts: dict[int, Drafting] = {}
        self.verifications: dict[int, StartVerify] = {}
        self.decodes: dict[int, Decoding] = {}
        self.depths: dict[int, int] = {}
        self.warm_ups: set[int] = set()
        self.holding: set[int] = set()  # targets that have the prompt, or are given it
        self.warm_drafters: set[int] = set()  # those that need not begin with the prompt
        self.owners: dict[Text, int | None] = {}  # the token judged after a text; None: plain
        self.finish: FinishReason | None = None
        self.last_draft_id = self.last_verify_id = self.last_decode_id = 0
        self.command_counts: Counter[type[Command]] = Counter()
        self.guessed: dict[Text, set[Text]] = {}  # what verdicts proposed, by what it follows
        self.idleness = Idleness(task.prompt, end_ids=task.eos_ids, limit=self.limit)

    # --- the method's interface ---------------------------------------------------------------

    @property
    def statistics(self) -> DraftStatistics:
        return self.method.statistics

    def start(self) -> list[Command]:
        commands = self.method.start()
        if self.task.broadcast_prefill:
            self.warm_ups |= {c.verify_id for c in commands if isinstance(c, StartVerify)}
        self._follow(commands, ending=False)
        return commands

    def handle(self, event: Event) -> list[Command]:
        finished, stale = self.finish, self.is_stale(event)
        self._note(event)
        commands = self.method.handle(event)
        if finished or stale:
            assert commands == [], "an event that concerns nothing has no effect"
        self._follow(commands, ending=False)
        return commands

    def stop(self) -> list[Command]:
        commands = self.method.stop()
        self._follow(commands, ending=True)
        assert self.finish
        return commands

    # --- what happens -------------------------------------------------------------------------

    def is_stale(self, event: Event) -> bool:
        match event:
            case TokensDrafted() | DraftEnded() | DraftFailed():
                return event.draft_id not in self.drafts
            case BlockVerified() | VerifyFailed():
                return event.verify_id not in self.verifications
            case TokensDecoded() | DecodeEnded() | DecodeFailed():
                return event.decode_id not in self.decodes
        return False

    def _note(self, event: Event) -> None:
        match event:
            case TokensDrafted() | DraftEnded() | DraftFailed():
                self._note_draft(event)
            case BlockVerified(verify_id=verify_id) if verify_id in self.verifications:
                verification = self.verifications.pop(verify_id)
                accepted = verification.proposal.along(event.accepted_path)
                self.idleness.told(verification.prefix, (*accepted, event.next_token))
                if verification.proposal.is_chain and (
                    len(event.accepted_path) == len(verification.proposal)
                ):
                    self.owners.setdefault(_assumed_text(verification), None)
                self._note_guesses(verification, event)
            case VerifyFailed(verify_id=verify_id):
                if failed := self.verifications.pop(verify_id, None):
                    self.holding.discard(failed.target)
            case TokensDecoded() | DecodeEnded() | DecodeFailed():
                self._note_decode(event)
            case CapacityChanged():
                self.capacity = event
                if event.lookahead is not None and self.row.overlaps:
                    self.task = replace(self.task, lookahead=event.lookahead)
                self.warm_drafters &= set(event.drafters)
                self.holding &= set(event.targets)

    def _note_draft(self, event: TokensDrafted | DraftEnded | DraftFailed) -> None:
        draft = self.drafts.get(event.draft_id)
        if draft is None:
            return
        drafter, before = draft.command.drafter, draft.text
        if isinstance(event, TokensDrafted):
            draft.take(event.proposal)
            self.warm_drafters.add(drafter)
            if drafter != self.capacity.text:
                self.idleness.drafted(drafter, draft.text, before=before)
            return
        del self.drafts[event.draft_id]
        if isinstance(event, DraftFailed) or len(draft.texts) == 1:
            self.idleness.rests(drafter, self.committed)

    def _note_guesses(self, command: StartVerify, event: BlockVerified) -> None:
        accepted = command.proposal.along(event.accepted_path)
        text = (*command.prefix, *accepted, event.next_token)
        self.guessed.setdefault(text, set()).update(_texts(text, event.proposal))

    def _note_decode(self, event: TokensDecoded | DecodeEnded | DecodeFailed) -> None:
        decode = self.decodes.get(event.decode_id)
        if decode is None:
            return
        if not isinstance(event, TokensDecoded):
            del self.decodes[event.decode_id]
            return
        for token_id in event.token_ids:
            self.owners.setdefault(decode.text, None)
            decode.tokens.append(token_id)

    def _follow(  # noqa: C901 - one line for each command
        self, commands: list[Command], *, ending: bool
    ) -> None:
        self._drop_decodes_that_are_over()
        abandoned: list[StartVerify | Decoding] = []
        for command in commands:
            assert self.finish is None, "nothing follows Finish"
            self.command_counts[type(command)] += 1
            match command:
                case EmitTokens():
                    self._check_emission(command)
                case StartDraft():
                    self._check_draft(command)
                case StopDraft(draft_id=draft_id):
                    del self.drafts[draft_id]
                case StartVerify():
                    self._check_verification(command)
                case PromoteVerify(verify_id=verify_id, depth=depth):
                    assert depth < self.depths[verify_id], "a promotion lowers the depth"
                    assert verify_id in self.verifications
                    self.depths[verify_id] = depth
                case AbandonVerify(verify_id=verify_id):
                    abandoned.append(self._abandoned(verify_id))
                case StartDecode():
                    self._check_decode(command)
                case StopDecode(decode_id=decode_id):
                    abandoned.append(self.decodes.pop(decode_id))
                case Finish(reason=reason):
                    self._check_finish(reason)
        self.drafts = {i: draft for i, draft in self.drafts.items() if not draft.is_over}
        if self.finish is None:
            assert not ending
            self._check_state(abandoned)

    def _drop_decodes_that_are_over(self) -> None:
        self.decodes = {i: decode for i, decode in self.decodes.items() if not decode.is_over}

    def _abandoned(self, verify_id: int) -> StartVerify:
        command = self.verifications.pop(verify_id)
        if verify_id in self.warm_ups:
            self.holding.discard(command.target)
        return command

    # --- the invariants -----------------------------------------------------------------------

    def _check_emission(self, emission: EmitTokens) -> None:
        assert emission.token_ids
        assert len(emission.accepted) == len(emission.token_ids)
        for token_id in emission.token_ids:
            expected = self.target.plain(self.committed)
            if self.task.rule is VerificationRule.REJECTION:
                judged = self.owners[self.committed]
                if judged is not None:
                    expected = self.target.judged(self.committed, judged)
            self._hold(Invariant.LOSSLESS, token_id == expected)
            self.committed += (token_id,)

    def _check_draft(self, command: StartDraft) -> None:
        assert command.draft_id > self.last_draft_id
        self.last_draft_id = command.draft_id
        assert command.drafter in self.capacity.drafters
        active = {d.command.drafter for d in self.drafts.values() if not d.is_over}
        assert command.drafter not in active, "one draft at a time"
        assert 1 <= command.max_tokens <= self.task.draft_window
        assert len(command.prefix) + command.max_tokens < self.limit, "drafts stay useful"
        self._check_before_eos(command.prefix)
        if self._watches_idleness and command.drafter != self.capacity.text:
            self.idleness.check_draft(command)
        self.drafts[command.draft_id] = Drafting(command)

    def _check_verification(self, command: StartVerify) -> None:
        assert command.verify_id > self.last_verify_id
        self.last_verify_id = command.verify_id
        assert command.target in self.capacity.targets
        busy = {v.target for v in self.verifications.values()}
        assert command.target not in busy, "one verification at a time"
        texts = texts_of(command)
        assert max(map(len, texts)) < self.limit
        for text in texts:
            self._check_before_eos(text[:-1])
        if command.proposal.is_chain:
            assert not command.proposal.parents, "a chain needs none"
        else:
            assert len(set(texts)) == len(texts), "siblings are distinct"
        if not command.proposal.is_chain and not self.row.self_drafts:
            assert self.task.width > 1 or self.task.own_guesses
            assert len(command.proposal) <= self.task.tree_tokens
            assert max(map(len, texts)) <= len(command.prefix) + self.task.tree_depth
        in_blocks = self.task.dispatch is DispatchPolicy.BLOCKS and not self.row.self_drafts
        if in_blocks and self.task.width == 1 and not self.task.own_guesses:
            assert len(command.proposal) <= self.task.lookahead
        rejection = self.task.rule is VerificationRule.REJECTION
        assert len(command.proposal.distributions) == (len(command.proposal) if rejection else 0)
        judged_elsewhere = {
            text
            for each in self.verifications.values()
            for text in _judged_texts(each) - self._riding_with(each)
        }
        # Guesses that ride along are nobody's block.
        judged = _judged_texts(command) - self._riding_with(command)
        self._hold(Invariant.NOTHING_TWICE, not judged_elsewhere & judged)
        if rejection:
            self._claim(command)
        if self.task.keep_prefill and command.target not in self.holding:
            self.warm_ups.add(command.verify_id)
        self.holding.add(command.target)
        self.verifications[command.verify_id] = command
        self.depths[command.verify_id] = command.depth

    def _check_decode(self, command: StartDecode) -> None:
        assert command.decode_id > self.last_decode_id
        self.last_decode_id = command.decode_id
        assert command.target in self.capacity.targets
        assert command.target not in {decode.command.target for decode in self.decodes.values()}
        assert command.prefix == self.committed, "what it says is final"
        assert 1 <= command.max_tokens <= self.task.draft_window
        assert len(command.prefix) + command.max_tokens <= self.limit
        assert command.end_ids == self.task.eos_ids
        self.decodes[command.decode_id] = Decoding(command)

    def _claim(self, command: StartVerify) -> None:
        for index, token_id in enumerate(command.proposal.token_ids):
            text = command.prefix + command.proposal.token_ids[:index]
            assert self.owners.setdefault(text, token_id) == token_id, "ownership is for ever"
        if not command.proposal.token_ids:
            assert self.owners.setdefault(command.prefix, None) is None, "ownership is for ever"

    def _check_before_eos(self, text: Text) -> None:
        generated = text[len(self.task.prompt) :]
        assert not self.task.eos_ids.intersection(generated), "nothing follows the end"

    def _hold(self, invariant: Invariant, is_kept: bool) -> None:
        assert is_kept or invariant not in self.row.invariants, invariant.name

    def _check_state(self, abandoned: list[StartVerify | Decoding]) -> None:
        decodes = self.decodes.values()
        in_flight = [*self.drafts.values(), *self.verifications.values(), *decodes]
        assert in_flight or not self.capacity.targets, "it goes on while there is a target"
        self._hold(
            Invariant.BUSY_FRONTIER,
            not self.capacity.targets
            # What the text says is known before anything else can happen.
            or any(it.command.drafter == self.capacity.text for it in self.drafts.values())
            or any(map(self._decides_frontier, self.verifications.values()))
            or any(decode.text == self.committed for decode in decodes),
        )
        self._hold(
            Invariant.NOTHING_WORTHLESS,
            all(map(self._is_of_use, self.drafts.values()))
            and all(map(self._can_tell, self.verifications.values()))
            and all(decode.text == self.committed for decode in decodes),
        )
        self._hold(
            Invariant.NO_PREEMPTION,
            not any(map(self._is_preempted, abandoned)),
        )

        if self._watches_idleness:
            self._check_idleness()

    @property
    def _watches_idleness(self) -> bool:
        """Whether it overlaps chains, whose texts tell what there is to do."""
        is_exact = self.task.rule is VerificationRule.EXACT
        promises = self.row.overlaps and Invariant.BUSY_FRONTIER in self.row.invariants
        return promises and is_exact and self.task.width == 1

    def _check_idleness(self) -> None:
        drafting = {it.command.drafter for it in self.drafts.values()}
        models = [it for it in self.capacity.drafters if it != self.capacity.text]
        self.idleness.check_drafters(models, drafting=drafting, committed=self.committed)
        judging = {it.target for it in self.verifications.values()}
        if self.capacity.text in drafting or judging.issuperset(self.capacity.targets):
            return
        self.idleness.check_targets(
            models,
            judged={
                text[:length]
                for command in self.verifications.values()
                for text in texts_of(command)
                for length in range(len(text) + 1)
            },
            decided={text for it in self.verifications.values() for text in texts_of(it)},
            growing={it.text for it in self.drafts.values()},
            at=self.task.lookahead,
        )

    def _is_preempted(self, abandoned: StartVerify | Decoding) -> bool:
        if isinstance(abandoned, Decoding):
            return abandoned.command.target in self.capacity.targets
        if self.committed in self._riding_with(abandoned):
            return False
        return self.capacity.has(abandoned.target) and self._decides_frontier(abandoned)

    def _is_of_use(self, draft: Drafting) -> bool:
        is_cold = draft.command.drafter not in self.warm_drafters
        is_ahead = is_cold or len(draft.text) >= len(self.committed)
        return is_ahead and _agree(draft.text, self.committed)

    def _can_tell(self, command: StartVerify) -> bool:
        is_warm_up = command.verify_id in self.warm_ups
        return is_warm_up or any(
            len(text) >= len(self.committed) and _agree(text, self.committed)
            for text in texts_of(command)
        )

    def _decides_frontier(self, command: StartVerify) -> bool:
        if self.committed not in texts_of(command):
            return False
        if self.task.rule is VerificationRule.EXACT:
            return True
        c, text = len(self.committed), _assumed_text(command)
        judged = text[c] if c < len(text) else None
        return self.owners.get(self.committed, judged) == judged

    def _riding_with(self, command: StartVerify) -> set[Text]:
        """Return the texts that end with what a target guessed there itself."""
        return self.guessed.get(command.prefix, set()) if self.task.own_guesses else set()

    def _check_finish(self, reason: FinishReason) -> None:
        self.finish = reason
        self._hold(Invariant.CLEAN_END, not (self.drafts or self.verifications or self.decodes))
        ended = self.committed[-1] in self.task.eos_ids and self.committed != self.task.prompt
        if reason is FinishReason.EOS:
            assert ended
        elif reason is FinishReason.LENGTH:
            assert len(self.committed) == self.limit
            assert not ended
        counts = self.method.statistics
        judged = counts.accepted + counts.rejected
        self._hold(Invariant.CLEAN_END, counts.drafted == judged + counts.discarded)


def _agree(text: Text, other: Text) -> bool:
    return all(a == b for a, b in zip(text, other, strict=False))


def _judged_texts(command: StartVerify) -> set[Text]:
    return set(texts_of(command)[1:])


def texts_of(command: StartVerify) -> list[Text]:
    """Return its prefix, and the text that ends with each token it judges."""
    return [command.prefix, *_texts(command.prefix, command.proposal)]


def _texts(text: Text, proposal: Proposal) -> list[Text]:
    texts = [text]
    for token_id, parent in zip(proposal.token_ids, proposal.all_parents, strict=True):
        texts.append((*texts[parent], token_id))
    return texts[1:]


def _assumed_text(command: StartVerify) -> Text:
    """Return the text that ends with the last draft token of a chain."""
    return command.prefix + command.proposal.token_ids
