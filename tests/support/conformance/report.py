"""The matrix of cases and languages: for the terminal, and as Markdown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEGEND = """\
The cases are those of [tests/contract/vectors/clients](../tests/contract/vectors/clients). `-` is \
one that a language cannot say, or whose client is not built on the machine."""
_MARKS = {"passed": "pass", "failed": "**FAIL**", "skipped": "-"}


class Matrix:
    """How each case went with each language."""

    def __init__(self, languages: Sequence[str]) -> None:
        self._languages = languages
        self._outcomes: dict[tuple[str, str], dict[str, str]] = {}

    def __bool__(self) -> bool:
        return bool(self._outcomes)

    def add(self, *, group: str, name: str, language: str, outcome: str) -> None:
        outcomes = self._outcomes.setdefault((group, name), {})
        if outcomes.get(language) != "failed":
            outcomes[language] = outcome

    def is_whole(self, case_count: int) -> bool:
        """Whether every case was played, none failed, and no language was skipped altogether."""
        rows, languages = list(self._outcomes.values()), set(self._languages)
        return (
            len(rows) == case_count
            and all(row.keys() == languages and "failed" not in row.values() for row in rows)
            and all(any(row[each] == "passed" for row in rows) for each in languages)
        )

    def markdown(self) -> str:
        """Return every case as a row, in an order that no run decides."""
        lines = ["# Clients: cases and languages", "", *self._totals(), "", _LEGEND]
        for group in self._groups():
            lines += ["", f"## {group}", "", *_head("case", self._languages)]
            for (its_group, name), outcomes in sorted(self._outcomes.items()):
                if its_group == group:
                    marks = (_MARKS.get(outcomes.get(each, ""), "") for each in self._languages)
                    lines.append(f"| {name} | {' | '.join(marks)} |")
        return "\n".join(lines) + "\n"

    def summary(self) -> list[str]:
        """Return a table of groups, aligned for a terminal."""
        rows = [line.strip("|").split("|") for line in self._totals() if not line.startswith("| -")]
        widths = [max(len(row[column].strip()) for row in rows) for column in range(len(rows[0]))]
        return [
            "  ".join(cell.strip().ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]

    def _totals(self) -> list[str]:
        """Return a row for each group: passed of all, or - where all was skipped."""
        lines = _head("cases", self._languages)
        for group in self._groups():
            cells = (self._cell(group, language) for language in self._languages)
            lines.append(f"| {group} | {' | '.join(cells)} |")
        return lines

    def _groups(self) -> list[str]:
        return sorted({group for group, _ in self._outcomes})

    def _cell(self, group: str, language: str) -> str:
        counts = Counter(
            outcomes[language]
            for (its_group, _), outcomes in self._outcomes.items()
            if its_group == group and language in outcomes
        )
        run = counts["passed"] + counts["failed"]
        return f"{counts['passed']}/{run}" if run else "-"


def _head(first: str, languages: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(languages)} |", "| --- " * (len(languages) + 1) + "|"]
