"""Items: what a model is asked to compute, and the outcome of each step. Plain data.

The event loop makes an item, the worker queues the item, and the backend runs it step by step until
it is done (`Item.take`). A step is an item's part in one forward.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_contract.proposal import NOTHING, Proposal
from paceline_engine.terms.draft_tree import DraftTree

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence
    from typing import Self

    from paceline_contract.calls import LikeliestTokens
    from paceline_engine.terms.calls import SessionSpec
    from paceline_engine.terms.model_cache import ModelCache

_SEED = DraftTree()


@dataclass(frozen=True, slots=True)
class Judge:
    """Judge a proposal, and choose the token after what is accepted.

    Attributes:
        proposal: Without parents if it is a chain.
        propose: Whether to guess the tokens that follow. Only for a model that drafts for itself,
            and under EXACT.
        top_logprobs: How many of the likeliest tokens to report at each decided position.
        score: Whether to accept the proposal as it is. Then there is no next token.
    """

    proposal: Proposal
    _: KW_ONLY
    logprobs: bool = False
    propose: bool = False
    top_logprobs: int = 0
    score: bool = False

    def only(self, kept: Sequence[int]) -> Self:
        """Return the same task for only these of the proposal's tokens."""
        return replace(self, proposal=self.proposal.only(kept))


@dataclass(frozen=True, slots=True)
class Decode:
    """Choose the tokens that follow, one in each step, up to one of the end tokens."""

    max_tokens: int
    _: KW_ONLY
    end_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Find tokens that follow.

    Attributes:
        max_tokens: The chain's length, at most.
        chunk_tokens: The chain's tokens in an answer; the last answer may have fewer.
        width: How many tokens to find at a position: the chain's token and its runners-up.
        branch_count: How many tokens beside the chain's a forward may extend.
    """

    max_tokens: int = 1
    _: KW_ONLY
    chunk_tokens: int = 1
    width: int = 1
    branch_count: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A target's verdict on a proposal: see VerifyResponse in target_service.proto.

    Attributes:
        proposal: The target's guesses after the next token, if the task asks for them.
        top_logprobs: If asked for, one entry for each accepted token, and last for the next token.
    """

    accepted_path: tuple[int, ...]
    next_token: int
    logprobs: tuple[float, ...] = ()
    proposal: Proposal = NOTHING
    top_logprobs: tuple[LikeliestTokens, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step of an item. Without judgement and draft: progress in a long prefix.

    Attributes:
        row_count: Token positions that were computed for the item; 0 if it needed no forward.
        judgement: The answer to a Judge, with its last step; the next token of a Decode.
        drafted: Tokens that follow: none, one or several. In a tree their parents refer to all
            tokens that the draft has found.
        draft_tree: The draft's tree after this step, if the draft is a tree.
        is_inner: Whether it was a step inside a stack, which need not find a token.
        dropped_count: How many of these positions were not computed to the end: pruned guesses.
        stage: The index of the stack's model that computed the step.
    """

    row_count: int
    judgement: Judgement | None = None
    drafted: Proposal = NOTHING
    draft_tree: DraftTree | None = None
    is_inner: bool = False
    dropped_count: int = 0
    stage: int = 0

    @property
    def chain(self) -> Sequence[int]:
        """The tokens of the chain that the step found."""
        if self.draft_tree is None:
            return self.drafted.token_ids
        return (self.draft_tree.found.token_ids[self.draft_tree.due[0]],)

    @property
    def is_whole(self) -> bool:
        """Whether the step got past the item's prefix."""
        return self.judgement is not None or len(self.drafted) > 0 or self.is_inner


@dataclass(eq=False, slots=True)
class Item:
    """A task after a prefix of a sequence.

    Attributes:
        cache: The sequence's state in the model.
        spec: How tokens are chosen, and which tenant the work belongs to.
        prefix: The tokens before the task, one or more. Decoded tokens are appended, and so is a
            draft's chain, unless its branches are extended, too: then its rows are a tree beyond
            the prefix.
        task: What to do.
        depth: How urgent among the items that a caller waits for: the smallest first.
        is_anticipated: Whether no caller has asked for it yet: less urgent than every other item.
        patience_ns: How long one of its forwards may take before it counts as hung; None: for ever.
        found_count: How many tokens were decoded, or drafted in the chain, so far.
        answered_count: How many of a draft's tokens are in complete answers.
        goes_on: For a Judge: whether the model goes on by itself after a correction.
        draft_tree: A draft's tree so far.
    """

    cache: ModelCache
    spec: SessionSpec
    _: KW_ONLY
    prefix: array[int]
    task: Judge | Decode | Draft
    depth: int = 0
    is_anticipated: bool = False
    patience_ns: int | None = None
    found_count: int = 0
    answered_count: int = 0
    goes_on: bool = False
    draft_tree: DraftTree = _SEED

    @property
    def share(self) -> str:
        """The tenant whose work it is."""
        return self.spec.share

    @property
    def block(self) -> tuple[int, ...]:
        """The tokens after the prefix that the item's next forward also computes."""
        if isinstance(self.task, Judge):
            return tuple(self.task.proposal.token_ids)
        if isinstance(self.task, Draft) and self.task.branch_count:
            return self.draft_tree.found.along(self.draft_tree.due)
        return ()

    @property
    def parents(self) -> Sequence[int]:
        """The parents of the block's tokens, if the block is a proposed tree."""
        return self.task.proposal.parents if isinstance(self.task, Judge) else ()

    @property
    def proposes(self) -> bool:
        """Whether the model is asked for guesses of its own."""
        return isinstance(self.task, Judge) and self.task.propose

    @property
    def chooses_next(self) -> bool:
        """Whether its steps only choose the next token, by that row's logits alone, under EXACT."""
        if self.spec.sampling.shapes:
            return False
        if isinstance(self.task, Decode):
            return not (self.task.logprobs or self.task.top_logprobs)
        is_exact = self.spec.rule is VerificationRule.EXACT
        return isinstance(self.task, Draft) and self.task.width == 1 and is_exact

    @property
    def scored_positions(self) -> list[int]:
        """The positions of the tokens after each row that a draft's forward scores."""
        if not isinstance(self.task, Draft) or not self.block:
            return [len(self.prefix)]
        tree = self.draft_tree
        return [len(self.prefix) + tree.depths[index] + 1 for index in tree.due]

    @property
    def tree(self) -> Proposal:
        """The rows beyond the prefix, computed or due, of a draft that extends branches."""
        is_tree = isinstance(self.task, Draft) and self.task.branch_count
        return self.draft_tree.rows if is_tree else NOTHING

    @property
    def stage(self) -> int:
        """The index of the backend's model for the item's next forward. Worker thread only."""
        draft_count = self.task.max_tokens if isinstance(self.task, Draft) else 0
        return self.cache.stage(self.prefix, draft_count=draft_count)

    def row_count(self) -> int:
        """Count the rows that the item needs to get past its prefix. Worker thread only."""
        if tree := self.tree:
            if self.cache.has_of(self.prefix, tree):
                return len(self.block)
            return self.cache.missing_length(self.prefix) + len(tree)
        return self.cache.missing_length(self.prefix) + len(self.block)

    def ahead(self, judgement: Judgement) -> Item | None:
        """Return the item that the caller asks for next after a correction.

        It needs no more room than this item. None if no token was rejected: then the caller sends
        the tokens that were drafted after the proposal.
        """
        assert isinstance(self.task, Judge)
        if not self.goes_on:
            return None
        if not self.task.proposal.goes_on_after(judgement.accepted_path):
            return None
        prefix = self.prefix[:]
        prefix.extend(self.task.proposal.along(judgement.accepted_path))
        prefix.append(judgement.next_token)
        task = replace(self.task, proposal=NOTHING)
        return Item(
            self.cache,
            self.spec,
            prefix=prefix,
            task=task,
            is_anticipated=True,
            patience_ns=self.patience_ns,
        )

    def asks_the_same(self, other: Item) -> bool:
        """Whether both items have the same answer.

        Only for Judge: parts of another task's answer may have been sent already.
        """
        return (
            isinstance(self.task, Judge) and self.task == other.task and self.prefix == other.prefix
        )

    def take(self, outcome: Outcome) -> bool:
        """Take in a step's outcome, and tell whether the step was the last."""
        if isinstance(self.task, Judge):
            return outcome.judgement is not None
        if isinstance(self.task, Decode):
            return outcome.judgement is not None and self._append(outcome.judgement, self.task)
        if outcome.draft_tree is not None:
            self.draft_tree = outcome.draft_tree
        if not self.task.branch_count:
            self.prefix.extend(outcome.chain)
        self.found_count += len(outcome.chain)
        return self.found_count >= self.task.max_tokens

    def completes_answer(self) -> bool:
        """Take note of complete answers, and tell whether the last step completed one.

        The steps of Judge and Decode are answers by themselves.
        """
        if not isinstance(self.task, Draft):
            return True
        chunk = self.task.chunk_tokens
        before, self.answered_count = self.answered_count, self.found_count // chunk * chunk
        return self.answered_count > before

    def _append(self, judgement: Judgement, task: Decode) -> bool:
        self.prefix.append(judgement.next_token)
        self.found_count += 1
        return self.found_count >= task.max_tokens or judgement.next_token in task.end_token_ids
