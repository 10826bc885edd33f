"""What a decoding method is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline_contract.calls import VerificationRule
from paceline_protocol.ranks import MOST_WIDTH, hit_rates, runner_up_shares

SPECULATION_LIMIT = 512
"""How far drafts run ahead of what is committed: it bounds the blocks (a Verify carries at most
1024 tokens) and the tree. Beyond it an accepted token is hardly ever found."""

ASSUMED_RATES = hit_rates(0.7, shares=runner_up_shares(), width=MOST_WIDTH)
"""How often a drafter's token of each rank is right, of which nothing is known."""

DRAFTED_LIMIT = 8192
"""The most tokens that one draft may find, with all that stands beside its chain; see
DraftRequest."""


class DispatchPolicy(Enum):
    """When draft tokens go to a target.

    WORK_CONSERVING: a free target takes all waiting tokens once there are lookahead of them, or at
    once where the first open position needs it or the draft has ended. BLOCKS: exactly lookahead
    tokens at a time, fewer only where the draft has ended.
    """

    WORK_CONSERVING = "work_conserving"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class DecodingTask:
    """What to generate, and how.

    Attributes:
        prompt: One or more tokens; those of a resumed generation included.
        max_tokens: Tokens still to generate at most.
        eos_ids: Tokens that end the generation; empty if they are to be ignored.
        lookahead: Draft tokens in one verification, 1 or more.
        rule: How draft tokens are judged.
        dispatch: When draft tokens are sent to targets.
        draft_window: The most tokens one StartDraft asks for, or one StartDecode, in [1,
            SPECULATION_LIMIT].
        broadcast_prefill: Whether DSI sends the prompt to all targets at the start.
        keep_prefill: Whether DSI lets a target finish its first verification, which carries the
            prompt, though it has become worthless.
        width: How many tokens a drafter finds at a place, 1 or more: with 2 or more targets judge
            trees. 1 under REJECTION.
        branches: How many tokens beside the chain's a drafter's forward may follow; 0 where the
            width is 1.
        tree_tokens: The most tokens of a tree in one verification; a longer chain is one alone.
        tree_depth: The most tokens of a path of it.
        own_guesses: Whether SI and DSI ask targets for guesses of their own, and have the next
            verification at the same place judge them, too.
        drafts_ahead: Whether SI's drafter goes on while the target verifies.
        hit_rates: How often a drafter's token of each rank, from the first on, is right, as far as
            is known at the start; one for each rank that there is.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    eos_ids: frozenset[int] = frozenset()
    lookahead: int = 1
    rule: VerificationRule = VerificationRule.EXACT
    dispatch: DispatchPolicy = DispatchPolicy.WORK_CONSERVING
    draft_window: int = 64
    broadcast_prefill: bool = False
    keep_prefill: bool = False
    width: int = 1
    branches: int = 0
    tree_tokens: int = 64
    tree_depth: int = 64
    drafts_ahead: bool = False
    hit_rates: tuple[float, ...] = ASSUMED_RATES
    own_guesses: bool = False

    @property
    def window(self) -> int:
        """The most tokens of a chain that one StartDraft asks for: the draft may have branches."""
        return max(1, min(self.draft_window, DRAFTED_LIMIT // (self.width * (1 + self.branches))))

    def __post_init__(self) -> None:
        assert self.prompt, "a prompt has a token"
        assert self.max_tokens >= 0
        assert self.lookahead >= 1
        assert 1 <= self.draft_window <= SPECULATION_LIMIT
        assert self.width == 1 or self.rule is VerificationRule.EXACT, "only EXACT judges trees"
        assert not self.own_guesses or self.rule is VerificationRule.EXACT
        assert self.branches == 0 or self.width > 1
        assert len(self.hit_rates) >= self.width
