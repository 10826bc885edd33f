"""The identity of a model, independent of its files' form: the parts of its fingerprint.

Two folders hold one model if nothing that a server computes or sends tells them apart. Programs
write the same model in many ways: JSON with other white space and another order of keys, numbers
as 1e-05 or 0.00001, weights in one file or in five, notes of who wrote them and with which version.
None of these differences is hashed. Unknown parts are hashed: a configuration key of unknown
meaning makes another model, because the worse mistake is to take two models for one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline_engine.model_files.small_files import DECODER_PARTS

if TYPE_CHECKING:
    from collections.abc import Mapping

# What a configuration says and no forward depends on: where it came from, what was used while the
# model was trained (dropout, the spread of the first weights), and what a server decides anew (the
# dtype, the cache). Tokens that end a text are hashed apart, wherever they are named.
_MEANINGLESS = frozenset({
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "bos_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "finetuning_task",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "name_or_path",
    "problem_type",
    "resid_pdrop",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
})  # fmt: skip
# Parts of a tokenizer.json that are as good as not there with these values.
_NONE = {
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
}
_PLAIN_MODEL = {
    "dropout": None,
    "unk_token": None,
    "unk_id": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}
# In BPE these add nothing when they are empty; the library's classes of tokenizers write them so.
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
# A post-processor that adds no token: the library puts it into each tokenizer that it saves.
_ADDS_NOTHING = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
# A caller that encodes decides these; a file has the values of the last call before it was saved.
_OF_A_CALL = frozenset({"truncation", "padding"})
_MOST_EXACT = 1 << 53  # up to here each whole number is a float, and no two are the same one


def meant_configuration(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says of the computation."""
    kept = {name: value for name, value in config.items() if name not in _MEANINGLESS}
    for part in DECODER_PARTS:
        if isinstance(kept.get(part), dict):
            kept[part] = meant_configuration(kept[part])
    return kept


def canonical_tokenizer(found: object) -> bytes:
    """Write what a tokenizer.json holds in one way, for the tokenizers library to read.

    Left out is what a call decides and not the tokenizer (truncation and padding), and what has
    the value that it has when it is not there.

    Args:
        found: The file's content, parsed.

    Raises:
        UnicodeEncodeError: It holds what is no text.
        RecursionError: It is nested deeper than any tokenizer.
    """
    if isinstance(found, dict):
        found = _without(found, _NONE, _OF_A_CALL)
        if found.get("post_processor") == _ADDS_NOTHING:
            del found["post_processor"]
        if isinstance(found.get("model"), dict):
            found["model"] = _plain_model(found["model"])
    return canonical_json(found)


def parse_values(content: bytes) -> Any:
    """Parse JSON so that equal values become equal objects: 10000.0 is 10000.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    return json.loads(content, parse_float=_number)


def canonical_json(value: object) -> bytes:
    """Write what was parsed in the one way in which its equals are written as well.

    Raises:
        UnicodeEncodeError: A text in it is none.
        RecursionError: It is nested too deeply.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode()


def _plain_model(model: Mapping[str, Any]) -> dict[str, Any]:
    kept = _without(model, _PLAIN_MODEL)
    if kept.get("type") == "BPE":
        kept = {name: it for name, it in kept.items() if not (name in _AFFIXES and it == "")}
    merges = kept.get("merges")
    # Older files have each pair as one text, which cannot hold a token with a space.
    if isinstance(merges, list) and all(isinstance(each, str) for each in merges):
        pairs = [each.split(" ") for each in merges if not each.startswith("#version")]
        if all(len(pair) == 2 for pair in pairs):
            kept["merges"] = pairs
    return kept


def _without(
    found: Mapping[str, Any], plain: Mapping[str, Any], names: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return an object without these names, and without what has the value of what is not there."""
    return {
        name: value
        for name, value in found.items()
        if name not in names and not (name in plain and value is plain[name])
    }


def _number(text: str) -> int | float:
    """Read 10000.0 as 10000, as which some programs write it."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _MOST_EXACT else value
