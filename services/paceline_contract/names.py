"""What a request and a client may be called, wherever one is named."""

from __future__ import annotations

import re

NAME_RULE = "at most 64 characters of [A-Za-z0-9._-]"

_NAME = re.compile(r"[A-Za-z0-9._-]{0,64}")


def is_name(text: str) -> bool:
    """Whether a text keeps to the rule; the empty one does."""
    return _NAME.fullmatch(text) is not None
