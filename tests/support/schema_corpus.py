"""JSON schemas over all keywords that are enforced (`schemas.jsonl`), and whether texts fit them.

Each line has a schema and what it is about, mostly keywords. Strings and arrays are bounded, so
that answers of models that write anything end.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

_DIALECT = jsonschema.Draft202012Validator


@dataclass(frozen=True)
class KnownSchema:
    about: str
    schema: dict[str, Any]

    def fits(self, text: str) -> bool:
        """Whether a text is JSON that follows the schema.

        By the grammar's formats each year has a 29 February (docs/http.md).
        """
        validator = _DIALECT(self.schema, format_checker=_DIALECT.FORMAT_CHECKER)
        try:
            return bool(validator.is_valid(json.loads(text.replace("-02-29", "-02-28"))))
        except ValueError:
            return False


def _read() -> tuple[KnownSchema, ...]:
    lines = (Path(__file__).parent / "schemas.jsonl").read_text().splitlines()
    return tuple(KnownSchema(it["keywords"], it["schema"]) for it in map(json.loads, lines))


SCHEMAS = _read()
