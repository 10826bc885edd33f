"""How likely a prompt's tokens are: asked of one target after another, before anything is decoded.

A target computes a block of the prompt after the tokens before it, as a verification whose tokens
are accepted as they are. So a prompt of any length is scored in blocks of few rows, each a call
like any other: fair among clients, cancelled with the request, asked of another target if its own
fails. No token is told twice, and the target that scored the last block holds the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_contract.calls import VerifyOptions
from paceline_contract.limits import MOST_PROMPT_CHUNK_TOKENS, most_scored_tokens
from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from paceline_contract.calls import LikeliestTokens
    from paceline_orchestrator.decoding.exchange import Judged
    from paceline_orchestrator.decoding.session import RemoteSession
    from paceline_orchestrator.fleet.server import ModelServer


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens of a prompt; see PromptChunk.

    Attributes:
        position: The position of the first token.
        logprobs: One for each token, none for the prompt's first.
        top_logprobs: One for each of these, or none.
    """

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[LikeliestTokens, ...] = ()


class PromptScoring:
    """Asks for a prompt's log probabilities, block by block.

    Args:
        prompt: One token or more.
        top_logprobs: How many of the likeliest tokens are told at each position.
        vocabulary_size: The model's.
        deliver: Takes what is known, in the prompt's order; it may wait for a slow reader.
        suspect: Told of a server that had not answered when the request ended, later than it
            should have.

    Attributes:
        scored_count: The tokens that were delivered.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        top_logprobs: int,
        vocabulary_size: int,
        deliver: Callable[[ScoredTokens], Awaitable[None]],
        suspect: Callable[[ModelServer], None],
    ) -> None:
        self._prompt = tuple(prompt)
        self._options = VerifyOptions(logprobs=True, top_logprobs=top_logprobs, score=True)
        self._block_length = min(MOST_PROMPT_CHUNK_TOKENS, most_scored_tokens(vocabulary_size))
        self._deliver = deliver
        self._suspect = suspect
        self.scored_count = 0

    @property
    def is_done(self) -> bool:
        """Whether every token was delivered."""
        return self.scored_count == len(self._prompt)

    async def begin(self) -> None:
        """Deliver the first token, which follows nothing."""
        await self._deliver(ScoredTokens(0, self._prompt[:1]))
        self.scored_count = 1

    async def score(self, session: RemoteSession) -> Judged:
        """Have the next block scored in a target's session, and deliver it.

        Returns:
            What the target answered.

        Raises:
            PacelineError: It could not. Nothing was delivered.
        """
        start = self.scored_count
        prefix = self._prompt[:start]
        block = self._prompt[start : start + self._block_length]
        call = session.verify(prefix, Proposal(block), self._options, final_length=start)
        try:
            judged = await call
        except BaseException:
            call.release()
            if call.end_unanswered():
                self._suspect(session.server)
            call.cancel()
            raise
        await self._deliver(ScoredTokens(start, block, judged.logprobs, judged.top_logprobs))
        self.scored_count += len(block)
        return judged
