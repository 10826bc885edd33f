"""The digest of a prefix, in the words of SessionCall.base_digest in session_service.proto."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def prefix_digest(token_ids: Sequence[int]) -> bytes:
    """Digest a whole token list at once."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.sha256(packed).digest()[:16]
