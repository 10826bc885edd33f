"""Watches that no server idles while a method that overlaps has work for it, under EXACT.

It knows texts alone, and judges by them what the method derives from its tree: chains are compared
token by token, and nothing is remembered but what drafters found and what verdicts told. A method
that breaks one of these promises loses no token; it only loses speed, so no other check sees it.
"""

from __future__ import annotations

import itertools
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from paceline_protocol.messages import StartDraft
    from unit.protocol.checker import Text


class Idleness:
    """What each drafter has found, and what the target has said.

    Args:
        prompt: The text at the start.
        end_ids: Tokens that end a text.
        limit: How long a text may become.
    """

    def __init__(self, prompt: Text, *, end_ids: Collection[int], limit: int) -> None:
        self._prompt = prompt
        self._end_ids = end_ids
        self._limit = limit
        self._told: dict[Text, int] = {}  # the target's token, by the text that it follows
        self._chains: dict[int, Text] = {}  # by drafter
        self._resting: dict[int, int] = {}  # by drafter that had nothing: what was committed then

    # --- what happened ------------------------------------------------------------------------

    def told(self, text: Text, tokens: Iterable[int]) -> None:
        """Note what a verdict says to follow a text."""
        for token_id in tokens:
            self._told[text] = token_id
            text += (token_id,)

    def drafted(self, drafter: int, text: Text, *, before: Text) -> None:
        """Note how far a drafter's chain has come; what it finds behind a verdict is late."""
        while len(before) < min(len(text), self._limit - 1) and before not in self._told:
            before = text[: len(before) + 1]
        self._chains[drafter] = before

    def rests(self, drafter: int, committed: Text) -> None:
        """Note that a drafter had nothing to say."""
        self._resting[drafter] = len(committed)

    # --- what must not be ---------------------------------------------------------------------

    def check_draft(self, command: StartDraft) -> None:
        """Check that a drafter goes on where its chain is not contradicted, and not before."""
        text = self._surviving(command.drafter)
        assert command.prefix[: len(text)] == text, "what was drafted is not drafted again"
        assert command.prefix not in self._told, "what is known is not drafted"

    def check_drafters(
        self, drafters: Iterable[int], *, drafting: Collection[int], committed: Text
    ) -> None:
        """Check that each one is at work whose chain can go on."""
        for drafter in drafters:
            rests = self._resting.get(drafter) == len(committed)
            text = self._surviving(drafter)
            can_go_on = len(text) < self._limit - 1 and not self._has_ended(text)
            assert drafter in drafting or rests or not can_go_on, f"drafter {drafter} idles"

    def check_targets(
        self,
        chains: Iterable[int],
        *,
        judged: Collection[Text],
        decided: Collection[Text],
        growing: Collection[Text],
        at: int,
    ) -> None:
        """Check that no chain has a block for the target that is free.

        Args:
            chains: Whose.
            judged: What verifications in flight judge or assume, each with all that is before it.
            decided: Texts after which they tell the token, whatever it is.
            growing: Texts that drafts go on after.
            at: How many tokens are a block, where more may come.
        """
        main = self._main_path()
        survivors = {self._surviving(drafter) for drafter in chains}
        for text in {main if main[: len(it)] == it else it for it in survivors}:
            shared = sum(itertools.takewhile(bool, map(operator.eq, text, main)))
            # What is shared, and the token that leaves the main path, are that path's business.
            own = 0 if text == main else shared + 1
            waiting = [
                it
                for it in self._ends(text)
                if it not in judged and len(it) > own and not self._is_settled(it, decided)
            ]
            is_closed = text not in growing
            assert not waiting or (len(waiting) < at and not is_closed), f"{waiting[0]} waits"

    # --- what is known ------------------------------------------------------------------------

    def _is_settled(self, text: Text, decided: Collection[Text]) -> bool:
        """Whether verifying a text's last token once more could tell nothing new.

        A verification in flight decides the token's own place. The token after it is known already:
        another drafter had found the same token earlier, and a target judged what followed there.
        """
        return text[:-1] in decided and text in self._told

    def _surviving(self, drafter: int) -> Text:
        """Return a drafter's chain up to where the target contradicts it, and what that says."""
        chain, text = self._chains.get(drafter, self._prompt), self._prompt
        while not self._has_ended(text):
            if text in self._told:
                text += (self._told[text],)
            elif text == chain[: len(text)] and len(text) < len(chain):
                text = chain[: len(text) + 1]
            else:
                break
        return text

    def _main_path(self) -> Text:
        """Return the text that the first drafter has at each place that has one."""
        text = self._prompt
        survivors = [self._surviving(drafter) for drafter in sorted(self._chains)]
        while on := [it for it in survivors if len(it) > len(text) and it[: len(text)] == text]:
            text = on[0][: len(text) + 1]
        return text

    def _ends(self, text: Text) -> Iterator[Text]:
        """Yield what ends with a token of it that no verdict has decided."""
        for length in range(len(self._prompt) + 1, len(text) + 1):
            if text[: length - 1] not in self._told:
                yield text[:length]

    def _has_ended(self, text: Text) -> bool:
        return text != self._prompt and text[-1] in self._end_ids
