"""Limits of the protos' fields that more than one package has to know."""

from __future__ import annotations

MOST_LOOKAHEAD = 64
"""GenerateRequest.lookahead."""

MOST_TARGETS = 64
"""GenerateRequest.target_count."""

MOST_DRAFTERS = 8
"""GenerateRequest.drafter_count."""

MOST_WIDTH = 16
"""GenerateRequest.width, DraftRequest.width."""

MOST_BRANCHES = 64
"""GenerateRequest.branches, DraftRequest.branch_count."""

MOST_TOP_LOGPROBS = 20
"""top_logprobs of GenerateRequest, VerifyRequest and DecodeRequest."""

MOST_BIASED_TOKENS = 1024
"""SamplingParameters.logit_bias."""

MOST_BIAS = 100.0
"""SamplingParameters.logit_bias: the largest number, and below 0 the smallest."""

MOST_GRAMMAR_BYTES = 64 << 10
"""Grammar, in UTF-8."""

MOST_GRAMMAR_DEPTH = 64
"""Grammar.json_schema: how deep it may be nested."""

MOST_CHUNK_TOKENS = 64
"""DraftRequest.chunk_tokens."""

MOST_PROPOSAL_TOKENS = 1024
"""Proposal.token_ids: of what a target judges, and of what it or a drafter finds."""

MOST_PROMPT_CHUNK_TOKENS = 256
"""PromptChunk.token_ids."""

MOST_PROMPT_LOGPROBS = 1 << 18
"""GenerateRequest.prompt_logprobs: log probabilities that are told of a prompt, all together."""

MOST_EXCHANGED_CALLS = 256
"""ExchangeCallsRequest.calls."""

MOST_EXCHANGED_BYTES = 64 << 10
"""CallMessage.request: a larger one is an RPC of its own, so that no call waits behind it."""

MOST_DISTRIBUTION_ENTRIES = 4096
"""SparseDistribution.token_ids."""

SUM_TOLERANCE = 1e-4
"""How far from 1 SparseDistribution.probabilities may add up to."""

MOST_END_TOKENS = 64
"""DecodeRequest.end_token_ids, and so GetModelInfoResponse.eos_token_ids."""

LEASE_SECONDS = (1, 300)
"""SessionSpec.lease and SessionGrant.lease: the shortest and the longest."""

MOST_MODEL_NAME_CHARACTERS = 256
"""GetModelInfoResponse.model_name."""

MOST_CONFIGURATION_CHARACTERS = 16 << 10
"""GetModelInfoResponse.configuration: most models' have two thousand."""

MOST_LORA_ADAPTERS = 64
"""GetModelInfoResponse.lora_adapters: of one server."""

MOST_CHAT_TEMPLATE_BYTES = 256 << 10
"""ChatTemplate.source, as UTF-8: the longest in use, with tools and reasoning, have 30 KB."""

MOST_ADDED_TOKENS = 1 << 16
"""ChatTemplate.added_token_ids; models that speak or see have thousands of added tokens."""

MOST_ADDED_TOKEN_CHARACTERS = 1024
"""A text in ChatTemplate.added_token_ids."""

MOST_TOKENIZER_BYTES = 256 << 20
"""GetTokenizerResponse.total_bytes: of a vocabulary of 262,144 tokens the file has 33 MB."""

LEAST_MESSAGE_BYTES = 1 << 20
"""A GenerateRequest that every orchestrator reads."""

DEFAULT_MESSAGE_BYTES = 16 << 20
"""A GenerateRequest that an orchestrator reads where its operator says nothing: what a context of
400,000 tokens needs."""

MOST_MESSAGE_BYTES = 256 << 20
"""A GenerateRequest that an orchestrator can be made to read."""

MOST_BIGRAM_BYTES = 64 << 20
"""A bigram table: one line for each token of a vocabulary, of which the largest takes 4 MB."""

# 64 MiB as float32.
_SCORED_LOGITS = 1 << 24
_LEAST_SCORED_TOKENS = 16
# A token is about four bytes of prose in most vocabularies. It is twenty bytes of indented code, or
# of a language that the vocabulary was made for.
_TEXT_BYTES_PER_TOKEN = 32
_LEAST_TEXT_BYTES = 256 << 10
# The longest varint of a uint32.
_ID_BYTES = 5
# All of a request but its prompt and the tokens that it resumes.
_OTHER_BYTES = 64 << 10


def most_scored_tokens(vocabulary_size: int) -> int:
    """Return the most tokens of a proposal that is only scored (VerifyRequest.score)."""
    fitting = _SCORED_LOGITS // max(1, vocabulary_size)
    return max(_LEAST_SCORED_TOKENS, min(MOST_PROPOSAL_TOKENS, fitting))


def most_text_bytes(context_length: int) -> int:
    """Return the UTF-8 bytes of a prompt's text that a context of so many tokens could have."""
    return max(_LEAST_TEXT_BYTES, _TEXT_BYTES_PER_TOKEN * context_length)


def most_request_bytes(context_length: int) -> int:
    """Return the bytes of the largest GenerateRequest for a context of so many tokens."""
    return most_text_bytes(context_length) + _ID_BYTES * context_length + _OTHER_BYTES


def depth_of(value: object) -> int:
    """Count the levels of objects and lists in JSON, as MOST_GRAMMAR_DEPTH means them."""
    depth, level = 0, [value]
    while level := [it for it in level if isinstance(it, dict | list)]:
        depth += 1
        level = [it for each in level for it in (each.values() if isinstance(each, dict) else each)]
    return depth
