"""The draft vocabulary: the few tokens that a drafter's head scores.

The head is a large part of a small model, and most of its tokens are hardly ever drafted. A token
that is never drafted costs a rejection where the target says it, and nothing else. So a drafter may
score only the most frequent tokens (Zhao et al. 2025, arXiv 2502.14856). Prompts may have every
token, and drafts are written in the ids of the whole vocabulary.

A folder says it in a file of its own, `{"token_ids": [0, 2, 17]}`; everything else in the folder is
that of the whole model. EAGLE-3's `d2t` says the same by differences: the i-th id is i + d2t[i].
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from paceline_engine.model_files.small_files import DRAFT_VOCABULARY
from paceline_engine.terms.backend import ModelLoadError

if TYPE_CHECKING:
    from paceline_engine.model_files.small_files import SmallFiles


def find_draft_vocabulary(small: SmallFiles, *, vocabulary_size: int) -> tuple[int, ...] | None:
    """Return the ids of the tokens that the head scores, ascending; None: it scores all tokens.

    Args:
        vocabulary_size: How many tokens the whole model can choose from.

    Raises:
        ModelLoadError: The file does not say such ids.
    """
    if DRAFT_VOCABULARY not in small.contents:
        return None
    path = small.directory / DRAFT_VOCABULARY
    token_ids = small.json(DRAFT_VOCABULARY).get("token_ids")
    if not isinstance(token_ids, list) or not token_ids:
        raise ModelLoadError(f"{path}: token_ids is no list of at least one id")
    if not all(type(each) is int and 0 <= each < vocabulary_size for each in token_ids):
        raise ModelLoadError(
            f"{path}: token_ids has an entry that is no id below {vocabulary_size}"
        )
    if any(before >= after for before, after in pairwise(token_ids)):
        raise ModelLoadError(f"{path}: token_ids do not ascend, each above the one before it")
    return tuple(token_ids)
