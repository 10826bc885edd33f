"""How likely a prompt's tokens are: asked of one target after another, before anything is decoded.

A target computes a block of the prompt after the tokens before it, as a verification whose tokens
are accepted as they are. So a prompt of any length is scored in blocks of few rows, each a call
like any other: fair among clients, cancelled with the request, asked of another target if its own
fails. No token is told twice, and the target that scored the last block holds the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError, SessionError
from paceline_contract.calls import VerifyOptions
from paceline_contract.limits import MOST_PROMPT_CHUNK_TOKENS, most_scored_tokens
from paceline_contract.proposal import Proposal

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable, Sequence

    from paceline_contract.calls import LikeliestTokens
    from paceline_orchestrator.decoding.exchange import Judged
    from paceline_orchestrator.decoding.request_servers import RequestServers
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
        self._scored_count = 0  # tokens that were delivered

    async def run(
        self,
        servers: RequestServers,
        *,
        changed: asyncio.Event,
        is_over: Callable[[], bool],
        judged: Callable[[RemoteSession, Judged], None],
    ) -> None:
        """Have the whole prompt scored by one target; where that one fails, the rest by another.

        Args:
            servers: The request's servers.
            changed: Set when servers have come or gone, and when the request is over.
            is_over: Whether the request has failed meanwhile.
            judged: Told of each answer.
        """
        await self._deliver(ScoredTokens(0, self._prompt[:1]))  # it follows nothing
        self._scored_count = 1
        while self._scored_count < len(self._prompt) and not is_over():
            changed.clear()
            targets = servers.capacity.targets
            session = servers.assigned.target(targets[0]) if targets else None
            if session is None:
                await changed.wait()
                continue
            try:
                answer = await self._score(session)
            except SessionError:
                continue  # the call was dropped, which its session puts up with once
            except PacelineError as error:
                servers.lose(session, error, reach=self._scored_count)
                continue
            servers.note_verdict()
            servers.note_final(self._scored_count)
            judged(session, answer)

    async def _score(self, session: RemoteSession) -> Judged:
        """Have the next block scored in a target's session, and deliver it.

        Returns:
            What the target answered.

        Raises:
            PacelineError: It could not. Nothing was delivered.
        """
        start = self._scored_count
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
        self._scored_count += len(block)
        return judged
