"""How counts are told, in messages and in tables."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Put a count before a noun, whose plural ends in s."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
