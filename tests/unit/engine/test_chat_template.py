"""How a model wants conversations is read from the files that lie beside it."""

from __future__ import annotations

import json

import pytest

from paceline_engine.backends.base import ModelLoadError
from paceline_engine.backends.chat_template import find_chat_template

ADDED = [
    {"id": 0, "content": "<s>", "special": True},
    {"id": 1, "content": "</s>", "special": True},
    {"id": 2, "content": "<tool>", "special": False},
]
TOKENIZER = json.dumps({"added_tokens": ADDED}).encode()


def configured(directory, **config):
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return find_chat_template(directory, TOKENIZER)


def test_a_model_without_one_has_none(tmp_path):
    assert find_chat_template(tmp_path, TOKENIZER) is None
    assert configured(tmp_path, bos_token="<s>") is None
    assert configured(tmp_path, chat_template=[{"name": "tool_use", "template": "x"}]) is None


def test_it_comes_with_the_tokens_that_it_names_and_those_that_could_forge_it(tmp_path):
    eos = {"__type": "AddedToken", "content": "</s>"}
    found = configured(tmp_path, chat_template="{{ 1 }}", bos_token="<s>", eos_token=eos)
    assert found.source == "{{ 1 }}"
    assert found.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert found.special_tokens == ("</s>", "<s>")


def test_of_several_the_default_one_is_taken_and_a_file_of_its_own_before_all(tmp_path):
    both = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    assert configured(tmp_path, chat_template=both).source == "y"
    (tmp_path / "chat_template.jinja").write_text("z")
    assert configured(tmp_path, chat_template=both).source == "z"


def test_whatever_could_change_a_prompt_changes_the_fingerprint(tmp_path):
    found = [
        configured(tmp_path, chat_template="x"),
        configured(tmp_path, chat_template="y"),
        configured(tmp_path, chat_template="x", bos_token="<s>"),
        find_chat_template(tmp_path, b"{}"),
    ]
    assert len({each.fingerprint for each in found}) == len(found)
    assert configured(tmp_path, chat_template="x") == found[0]


def test_one_that_cannot_be_one_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="262144 bytes"):
        configured(tmp_path, chat_template="x" * (256 * 1024 + 1))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: not readable"):
        find_chat_template(tmp_path, TOKENIZER)
