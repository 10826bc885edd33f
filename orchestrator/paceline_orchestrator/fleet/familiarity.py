"""Which servers have computed how much of a text: they may have it still.

A model server keeps ended texts for the same client's next ones that begin alike. So of servers
that are equally loaded, one that had the beginning of a request's text is taken first. What is
noted here is a hint: servers forget, and orchestrators do not tell each other.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from paceline_contract.prefix import TokenPrefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_Beginning = tuple[str, bytes]
"""Whose it is, and the digest of its tokens."""

_LEAST_TOKENS = 32
"""Servers keep no shorter texts. Beginnings of this length and of its doubles are noted."""
_MOST_SERVERS = 16
"""So many are known for a beginning, the newest first: servers come and go under new names."""


class Familiarity:
    """Which servers had which beginnings of clients' texts; the oldest notes are forgotten first.

    Args:
        most_beginnings: So many are known at a time; a request notes one for each doubling of its
            text's length.
    """

    def __init__(self, most_beginnings: int = 4096) -> None:
        self._most_beginnings = most_beginnings
        self._servers: OrderedDict[_Beginning, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._servers)

    def text(self, token_ids: Sequence[int], *, share: str) -> FamiliarText:
        """Return what is known of a text of a client's."""
        text = TokenPrefix(token_ids)
        lengths = [_LEAST_TOKENS << doublings for doublings in range(len(text).bit_length())]
        return FamiliarText(self, [(n, (share, text.digest(n))) for n in lengths if n <= len(text)])

    def servers(self, beginning: _Beginning) -> Iterable[str]:
        """Return the names of those that had a beginning."""
        return self._servers.get(beginning, ())

    def note(self, beginning: _Beginning, server: str) -> None:
        """Note that a server has a beginning."""
        others = [other for other in self.servers(beginning) if other != server]
        self._servers[beginning] = (server, *others[: _MOST_SERVERS - 1])
        self._servers.move_to_end(beginning)
        if len(self._servers) > self._most_beginnings:
            self._servers.popitem(last=False)


class FamiliarText:
    """A text's beginnings, and the servers that had them when its request came.

    Args:
        beginnings: Lengths in tokens and digests, the shortest first.
    """

    def __init__(self, known: Familiarity, beginnings: Sequence[tuple[int, _Beginning]]) -> None:
        self._known = known
        self._beginnings = beginnings
        self._lengths = {
            server: length for length, each in beginnings for server in known.servers(each)
        }

    def length_at(self, server: str) -> int:
        """Return how many tokens a server has had of it, as far as that is known."""
        return self._lengths.get(server, 0)

    def note(self, server: str) -> None:
        """Note that a server is about to compute it."""
        for _, beginning in self._beginnings:
            self._known.note(beginning, server)
