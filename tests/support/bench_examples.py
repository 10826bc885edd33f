"""Small results of each benchmark, by its results file, with the cases that are rare."""

from __future__ import annotations

import json
from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "unit" / "bench" / "examples"
EXAMPLES = {path.stem: json.loads(path.read_text()) for path in _FOLDER.glob("*.json")}
# All files that the pages are made of.
RESULTS = EXAMPLES | dict.fromkeys(("pair-gpu", "pair-wide", "random-gpu"), EXAMPLES["pair"])
