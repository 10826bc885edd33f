"""What servers answer is checked before anything of it is believed: is it about what was asked?

How long its lists are was checked where it was read, in `rpcs.py`: what is looked at one by one
here is no longer than what was asked for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline_contract.calls import VerificationRule
from paceline_orchestrator.fleet.bad_answers import check_distribution, demand

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline_contract.calls import DecodeOptions, LikeliestTokens, PrefixCall, VerifyOptions
    from paceline_contract.proposal import Proposal
    from paceline_orchestrator.decoding.exchange import Decoded, Drafted, Judged, SessionSpec
    from paceline_orchestrator.decoding.session_tokens import Window
    from paceline_orchestrator.fleet.server import ModelServer

# A log probability is at most 0; what rounds may end up a little above.
_ROUNDING = 1e-3
_WAS_NOT_ASKED = "is not what was asked for"


class AnswerChecks:
    """Checks what one server says in one session.

    Args:
        server: Who says it.
        spec: What the session is for.

    Raises:
        BadAnswerError: Each method raises it where the server answered what it was not asked.
    """

    def __init__(self, server: ModelServer, spec: SessionSpec) -> None:
        self._server = server
        self._is_rejection = spec.rule is VerificationRule.REJECTION

    def verdict(
        self, judged: Judged, call: PrefixCall, proposal: Proposal, *, options: VerifyOptions
    ) -> None:
        """Check a verdict: on this call's prefix, along a path of its proposal."""
        prefix_length = call.base_length + len(call.token_ids)
        path = judged.accepted_path
        demand(judged.sequence == call.sequence, "sequence", _WAS_NOT_ASKED)
        demand(judged.prefix_length == prefix_length, "prefix_length", _WAS_NOT_ASKED)
        demand(proposal.leads_along(path), "accepted_path", _WAS_NOT_ASKED)
        demand(self._is_token(judged.next_token), "next_token_id", _WAS_NOT_ASKED)
        if options.score:
            demand(len(path) == len(proposal), "accepted_path", _WAS_NOT_ASKED)
        told_count = len(path) + (not options.score)
        self._check_logprobs(judged.logprobs, told_count if options.logprobs else 0)
        self._check_likeliest(judged.top_logprobs, told_count, most=options.top_logprobs)
        if len(judged.proposal):
            may_guess = options.propose and not self._is_rejection
            is_guess = may_guess and self._is_guess(judged.proposal)
            demand(is_guess, "proposal", _WAS_NOT_ASKED)

    def draft(self, drafted: Drafted, *, window: Window) -> tuple[int, ...]:
        """Check a piece of a draft; return the indices of its tokens that are the chain's."""
        proposal = drafted.proposal
        chain = window.chain_of(proposal)
        demand(chain is not None, "proposal", _WAS_NOT_ASKED)
        demand(_are_indices(proposal.forced, len(proposal)), "proposal.forced", _WAS_NOT_ASKED)
        demand(self._are_tokens(proposal.token_ids), "proposal.token_ids", _WAS_NOT_ASKED)
        needed = len(proposal) if self._is_rejection else 0
        has_all = len(proposal.distributions) == needed
        demand(has_all, "proposal.distributions", _WAS_NOT_ASKED)
        drawn = zip(proposal.token_ids, proposal.distributions, strict=False)
        for token_id, distribution in drawn:
            check_distribution(
                distribution,
                token_id=token_id,
                vocabulary_size=self._vocabulary_size,
            )
        return chain or ()

    def decoded(self, decoded: Decoded, *, options: DecodeOptions) -> None:
        """Check a message of a decode: it has log probabilities if they were asked for."""
        token_ids = decoded.token_ids
        self._check_logprobs(decoded.logprobs, len(token_ids) if options.logprobs else 0)
        self._check_likeliest(decoded.top_logprobs, len(token_ids), most=options.top_logprobs)
        goes_beyond = not _are_apart(options.end_token_ids, token_ids[:-1])
        demand(not goes_beyond, "token_ids", "go on after an end")

    def end(self, window: Window) -> None:
        """Check that a decode which is over has brought a token: else it would be repeated."""
        demand(window.found_count > 0, "an end without a token", _WAS_NOT_ASKED)

    def next(
        self,
        found: Drafted | Decoded,
        token_ids: Sequence[int],
        *,
        call: PrefixCall,
        window: Window,
    ) -> None:
        """Check a message of a stream: it goes on where the one before ended."""
        demand(found.sequence == call.sequence, "sequence", _WAS_NOT_ASKED)
        demand(found.start_length == window.length, "start_length", _WAS_NOT_ASKED)
        is_within = 0 < len(token_ids) <= window.max_tokens - window.found_count
        demand(is_within and self._are_tokens(token_ids), "token_ids", _WAS_NOT_ASKED)

    def _check_logprobs(self, logprobs: Sequence[float], count: int) -> None:
        demand(len(logprobs) == count, "logprobs", _WAS_NOT_ASKED)
        demand(_are_logprobs(logprobs), "logprobs", "are not finite and at most 0")

    def _check_likeliest(
        self, likeliest: Sequence[LikeliestTokens], place_count: int, *, most: int
    ) -> None:
        """Check the likeliest tokens: one list for each place if asked for, otherwise none."""
        demand(len(likeliest) == (place_count if most else 0), "top_logprobs", _WAS_NOT_ASKED)
        for tokens in likeliest:
            token_ids = [token_id for token_id, _ in tokens]
            logprobs = [logprob for _, logprob in tokens]
            demand(0 < len(tokens) <= most, "top_logprobs", _WAS_NOT_ASKED)
            are_distinct = len(set(token_ids)) == len(token_ids)
            demand(
                are_distinct and self._are_tokens(token_ids),
                "top_logprobs.token_ids",
                "are not distinct tokens of the vocabulary",
            )
            demand(
                _are_logprobs(logprobs) and logprobs == sorted(logprobs, reverse=True),
                "top_logprobs.logprobs",
                "are not finite, at most 0 and the largest first",
            )

    def _is_guess(self, proposal: Proposal) -> bool:
        """Whether what a target proposes is a tree of tokens."""
        parents = proposal.parents
        places = list(zip(parents or range(len(proposal)), proposal.token_ids, strict=False))
        return (
            len(parents) in (0, len(proposal))
            and all(parent <= index for index, parent in enumerate(parents))
            and len(set(places)) == len(proposal)
            and self._are_tokens(proposal.token_ids)
            and not proposal.distributions
            and _are_indices(proposal.forced, len(proposal))
        )

    def _are_tokens(self, token_ids: Sequence[int]) -> bool:
        return all(map(self._is_token, token_ids))

    def _is_token(self, token_id: int) -> bool:
        return token_id < self._vocabulary_size

    @property
    def _vocabulary_size(self) -> int:
        facts = self._server.facts
        return facts.vocabulary_size if facts is not None else 0


def _are_logprobs(values: Sequence[float]) -> bool:
    return all(map(math.isfinite, values)) and max(values, default=0.0) <= _ROUNDING


def _are_indices(indices: Sequence[int], count: int) -> bool:
    """Whether these are ascending indices of so many tokens."""
    return all(a < b for a, b in zip((-1, *indices), (*indices, count), strict=True))


def _are_apart(ids: Collection[int], token_ids: Sequence[int]) -> bool:
    return not any(token_id in ids for token_id in token_ids)
