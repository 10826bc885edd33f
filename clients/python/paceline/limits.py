"""Limits of the protos' fields that more than one package has to know."""

from __future__ import annotations

__all__ = [
    "MOST_BIGRAM_BYTES",
    "MOST_BRANCHES",
    "MOST_CHUNK_TOKENS",
    "MOST_DRAFTERS",
    "MOST_LOOKAHEAD",
    "MOST_PEM_BYTES",
    "MOST_TARGETS",
    "MOST_TOKENIZER_BYTES",
    "MOST_TOP_LOGPROBS",
    "MOST_WIDTH",
]

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

MOST_CHUNK_TOKENS = 64
"""DraftRequest.chunk_tokens."""

MOST_TOKENIZER_BYTES = 256 << 20
"""GetTokenizerResponse.total_bytes: of a vocabulary of 262,144 tokens the file has 33 MB."""

MOST_PEM_BYTES = 1 << 20
"""A file with certificates or a key: all authorities that a system trusts take 220 KB."""

MOST_BIGRAM_BYTES = 64 << 20
"""A bigram table: one line for each token of a vocabulary, of which the largest takes 4 MB."""
