"""What became of the draft tokens, and the counting of it.

Only the token tree knows what becomes of a token, so it reports each event to a `DraftCounter`. A
drafted token ends as accepted, rejected or discarded, once (CLEAN_END in invariants.py). The first
token of a contradicted subtree is rejected. The tokens below it are discarded: no target judged
them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class DraftStatistics:
    """What became of the draft tokens.

    Invariants:
        When the method has finished, drafted = accepted + rejected + discarded.

    Attributes:
        drafted: Draft tokens that came while the method wanted them.
        accepted: Draft tokens that became output.
        rejected: Draft tokens that a target decided against.
        discarded: Draft tokens that no target judged, or that another drafter had found before.
        own: Tokens of the target's own, which no drafter had drafted.
        corrections_ahead: Accepted tokens that a drafter had as a runner-up: such a correction
            costs no draft, and no forward if a verification had the runner-up.
        branch_drafted: Tokens found beside the chains. A token that became a chain's counts as
            drafted, too.
        branch_judged: Rows of verifications that tokens beside the chains took.
        branch_accepted: How many of these rows' tokens became output.
        ranks: Where several tokens were drafted, how often the token of each rank was right. Rank 0
            counts places where none was right.
    """

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    discarded: int = 0
    own: int = 0
    corrections_ahead: int = 0
    branch_drafted: int = 0
    branch_judged: int = 0
    branch_accepted: int = 0
    ranks: Counter[int] = field(default_factory=Counter)

    def __add__(self, later: DraftStatistics) -> DraftStatistics:
        """Return what became of both methods' draft tokens, of one after the other."""
        names = [each.name for each in fields(DraftStatistics)]
        return DraftStatistics(*(getattr(self, it) + getattr(later, it) for it in names))

    @property
    def first_accepted(self) -> int:
        """How many of the accepted tokens were their drafter's first choice."""
        return self.accepted - self.corrections_ahead

    @property
    def acceptance_rate(self) -> float:
        """Share of the judged first choices that were accepted; 0 where none was judged."""
        judged = self.first_accepted + self.rejected
        return self.first_accepted / judged if judged else 0.0


class DraftCounter:
    """Counts what the token tree and the verifications report.

    Args:
        statistics: Where it counts.
    """

    def __init__(self, statistics: DraftStatistics) -> None:
        self._statistics = statistics

    def drafted(self, *, is_twin: bool) -> None:
        """Count a token of a drafter's chain; a twin is in another drafter's chain already."""
        self._statistics.drafted += 1
        self._statistics.discarded += is_twin

    def branch_drafted(self) -> None:
        """Count a token beside the chains."""
        self._statistics.branch_drafted += 1

    def branches_judged(self, count: int) -> None:
        """Count tokens beside the chains that a verification judges."""
        self._statistics.branch_judged += count

    def ranked(self, rank: int) -> None:
        """Count the rank of the right token among several; 0 if no drafter had found it."""
        self._statistics.ranks[rank] += 1

    def adopted(self) -> None:
        """Count a token beside the chains that has become a chain's."""
        self._statistics.drafted += 1

    def adopted_too_late(self) -> None:
        """Count a token that would have become a chain's, had a target not rejected it before."""
        self._statistics.drafted += 1
        self._statistics.rejected += 1

    def rejected(self) -> None:
        """Count a chain's token that a target decided against."""
        self._statistics.rejected += 1

    def discarded(self) -> None:
        """Count a chain's token that no target has judged, and none will."""
        self._statistics.discarded += 1

    def committed(self, *, rank: int, was_branch: bool) -> None:
        """Count a token that became output.

        Args:
            rank: The place that a drafter gave it; 0 if no drafter found it.
            was_branch: Whether a verification had it beside the chains.
        """
        self._statistics.corrections_ahead += rank > 1
        self._statistics.branch_accepted += was_branch
