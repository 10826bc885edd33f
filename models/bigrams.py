"""Count which token mostly follows each, for Max-Gram: `make bigrams`, or see `--help`.

The text is what the bundled models learnt from; the tokenizer is theirs, or any other.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from corpus import load_corpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_FOLDER = Path(__file__).resolve().parent


def following(texts: Iterable[Sequence[int]], *, vocabulary_size: int) -> list[int | None]:
    """Return what follows each token most often, ties to the smaller id; None where nothing does.

    Pairs do not reach from one text into the next.
    """
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for token_ids in texts:
        for token, after in itertools.pairwise(token_ids):
            counts[token][after] += 1
    return [
        min(counts[token], key=lambda after: (-counts[token][after], after))
        if token in counts
        else None
        for token in range(vocabulary_size)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, count, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, default=_FOLDER / "python-target" / "tokenizer.json"
    )
    parser.add_argument("--output", type=Path, required=True, help="where the table goes")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    files = load_corpus().training
    texts = (tokenizer.encode(file.text, add_special_tokens=False).ids for file in files)
    table = following(texts, vocabulary_size=tokenizer.get_vocab_size())
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"format": "paceline bigrams 1", "next": table}) + "\n")


if __name__ == "__main__":
    main()
