"""What servers answer is checked before anything of it is believed: is it about what was asked?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import InternalError
from paceline_protocol.task import VerificationRule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline_orchestrator.calls.exchange import (
        Decoded,
        Drafted,
        Judged,
        PrefixCall,
        SessionSpec,
    )
    from paceline_orchestrator.calls.likeliest import LikeliestTokens
    from paceline_orchestrator.calls.window import Window
    from paceline_orchestrator.fleet.server import ModelServer
    from paceline_protocol.proposal import Proposal

__all__ = ["AnswerChecks"]


class AnswerChecks:
    """Checks what one server says in one session.

    Args:
        server: Who says it.
        spec: What the session is for.

    Raises:
        InternalError: Of each method: the server answered what it was not asked.
    """

    def __init__(self, server: ModelServer, spec: SessionSpec) -> None:
        self._server = server
        self._is_rejection = spec.rule is VerificationRule.REJECTION

    def verdict(
        self, judged: Judged, call: PrefixCall, proposal: Proposal, *, logprobs: bool
    ) -> None:
        """Check a verdict: on this call's prefix, along a path of its proposal."""
        prefix_length = call.base_length + len(call.token_ids)
        path = judged.accepted_path
        self._demand(
            (judged.sequence, judged.prefix_length) == (call.sequence, prefix_length)
            and proposal.leads_along(path)
            and len(judged.logprobs) == (len(path) + 1 if logprobs else 0)
            and self._is_token(judged.next_token)
            and self._is_guess(judged.proposal)
        )

    def draft(self, drafted: Drafted, *, window: Window) -> tuple[int, ...]:
        """Check a piece of a draft, tokens and distributions; return what it has of the chain."""
        proposal = drafted.proposal
        chain = window.chain_of(proposal)
        needed = len(proposal) if self._is_rejection else 0
        self._demand(
            chain is not None
            and all(map(self._is_token, proposal.token_ids))
            and len(proposal.distributions) == needed
        )
        return chain or ()

    def decoded(self, decoded: Decoded, *, logprobs: bool) -> None:
        """Check a message of a decode: it has log probabilities if they were asked for."""
        self._demand(len(decoded.logprobs) == (len(decoded.token_ids) if logprobs else 0))

    def likeliest(
        self, likeliest: Sequence[LikeliestTokens], place_count: int, *, most: int
    ) -> None:
        """Check what was likely: told of each place if it was asked, else of none."""
        self._demand(
            len(likeliest) == (place_count if most else 0)
            and all(
                0 < len(tokens) <= most and all(self._is_token(it) for it, _ in tokens)
                for tokens in likeliest
            )
        )

    def end(self, window: Window) -> None:
        """Check a decode that is over: else it would be asked again, and end so again."""
        self._demand(window.found_count > 0)

    def next(
        self,
        found: Drafted | Decoded,
        token_ids: Sequence[int],
        *,
        call: PrefixCall,
        window: Window,
    ) -> None:
        """Check a message of a stream: it goes on where the one before ended."""
        self._demand(
            (found.sequence, found.start_length) == (call.sequence, window.length)
            and 0 < len(token_ids) <= window.max_tokens - window.found_count
            and all(map(self._is_token, token_ids))
        )

    def _is_guess(self, proposal: Proposal) -> bool:
        """Whether what a target proposes is a tree of tokens."""
        parents = proposal.parents
        places = list(zip(parents or range(len(proposal)), proposal.token_ids, strict=False))
        return (
            len(parents) in (0, len(proposal))
            and all(parent <= index for index, parent in enumerate(parents))
            and len(set(places)) == len(proposal)
            and all(map(self._is_token, proposal.token_ids))
        )

    def _is_token(self, token_id: int) -> bool:
        facts = self._server.facts
        return facts is not None and token_id < facts.vocabulary_size

    def _demand(self, is_so: bool) -> None:
        if not is_so:
            raise InternalError(f"{self._server.name} answered what it was not asked")
