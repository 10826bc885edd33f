"""While a target, room or a tokenizer is missing: how long to wait, and when to ask again.

The same before a request's first token and after it, since a client cannot tell the two apart.
"""

from __future__ import annotations

WAIT_SECONDS = 5.0
"""How long a request does without, before it gives up."""
ADAPTER_SECONDS = 60.0
"""For how long a LoRA adapter counts as away, and not as unknown, after discovery has dropped the
last target with it: a pod that is replaced has another address."""
AWAY_SECONDS = 60.0
"""For how long a target that is not ready counts as one that may soon do what the others cannot."""
RETRY_SECONDS = 1.0
"""When its client may ask again, where no server says so."""
