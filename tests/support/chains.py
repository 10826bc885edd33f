"""Events about chains, the shape that today's methods know, in the words of a step test."""

from paceline_contract.proposal import Proposal
from paceline_protocol.messages import BlockVerified, TokensDrafted


def drafted(draft_id, token_ids, distributions=()):
    return TokensDrafted(draft_id, Proposal(tuple(token_ids), distributions=tuple(distributions)))


def verified(verify_id, accepted_count, next_token, logprobs=()):
    return BlockVerified(verify_id, tuple(range(accepted_count)), next_token, logprobs=logprobs)
