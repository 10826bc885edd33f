"""While a target, room or a tokenizer is missing: how long to wait, and when to ask again.

The same before a request's first token and after it, since a client cannot tell the two apart.
"""

from __future__ import annotations

WAIT_SECONDS = 5.0
"""How long a request does without, before it gives up."""
RETRY_SECONDS = 1.0
"""When its client may ask again, where no server says so."""
