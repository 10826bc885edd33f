"""Words of others, such as an error's text or a model's name, on one line of a log or terminal."""

from __future__ import annotations


def on_one_line(text: str) -> str:
    r"""Escape what is not printable, as Python writes it: a line's end is `\n`, an escape `\x1b`.

    Otherwise a peer could begin another line of the log, move a terminal's cursor, or turn the
    direction of the text. What is left is printable characters and plain spaces.
    """
    if text.isprintable():
        return text
    return "".join(it if it.isprintable() else _escaped(it) for it in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
