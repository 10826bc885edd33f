"""The digest that names a chat template."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def chat_template_fingerprint(
    source: str,
    *,
    named_tokens: Mapping[str, str],
    special_tokens: Iterable[str],
    added_token_ids: Mapping[str, int],
) -> str:
    """Return SHA-256, in hexadecimal, of all that a template says; see ChatTemplate in the protos.

    A model server says it with its template. An orchestrator says its own, so that no server can
    have its template kept under the name of another one.
    """
    content = [
        source,
        sorted(named_tokens.items()),
        list(special_tokens),
        sorted(added_token_ids.items()),
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
