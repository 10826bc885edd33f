"""Limits of the protos' fields that more than one package has to know."""

from __future__ import annotations

__all__ = [
    "MOST_BRANCHES",
    "MOST_CHUNK_TOKENS",
    "MOST_DRAFTERS",
    "MOST_LOOKAHEAD",
    "MOST_TARGETS",
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
