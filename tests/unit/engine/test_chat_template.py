"""How a model wants conversations is read from the files that lie beside it."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoTokenizer

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError

EOS = "<|end|>"  # the tiny tokenizer's only special token
OTHERS = ["<|fill-0|>", "<|fill-1|>"]


@pytest.fixture
def folder(tiny_pair, tmp_path):
    return shutil.copytree(tiny_pair.drafter, tmp_path / "model")


def write(folder, **files):
    """Write files by their names, with __ for a dot and / as _in_."""
    for name, content in files.items():
        *folders, file = name.replace("__", ".").split("_in_")
        path = folder.joinpath(*folders, file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


def found_in(folder, **config):
    write(folder, tokenizer_config__json=config)
    return find_model_files(str(folder)).chat_template


def test_a_model_without_one_has_none(folder):
    assert find_model_files(str(folder)).chat_template is None
    assert found_in(folder, bos_token="<s>") is None
    assert found_in(folder, chat_template=[{"name": "tool_use", "template": "x"}]) is None


def test_it_comes_with_the_tokens_that_it_names_and_those_that_could_forge_it(folder):
    eos = {"__type": "AddedToken", "content": "</s>"}
    found = found_in(folder, chat_template="{{ 1 }}", bos_token="<s>", eos_token=eos)
    assert found.source == "{{ 1 }}"
    assert found.named_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert found.special_tokens == (EOS,)
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert found.added_token_ids == {it["content"]: it["id"] for it in added}
    assert found.added_token_ids.keys() > {EOS}


def test_added_tokens_beyond_what_an_answer_may_have_are_not_told(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (first, *_) = tokenizer["added_tokens"]
    long = {**first, "content": "<" + "x" * 1024 + ">", "id": 90_000}
    tokenizer["added_tokens"].append(long)
    write(folder, tokenizer__json=tokenizer)
    found = found_in(folder, chat_template="{{ 1 }}")
    assert long["content"] not in found.added_token_ids
    assert EOS in found.added_token_ids
    many = [{**first, "content": f"<{it}>", "id": 100_000 + it} for it in range(1 << 16)]
    tokenizer["added_tokens"] += many
    write(folder, tokenizer__json=tokenizer)
    assert found_in(folder, chat_template="{{ 1 }}").added_token_ids == {}


@pytest.mark.parametrize(
    "several",
    [
        [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}],
        {"tool_use": "x", "default": "y"},
    ],
)
def test_of_several_in_a_configuration_the_default_one_is_taken(folder, several):
    assert found_in(folder, chat_template=several).source == "y"


PLACES = {
    "tokenizer_config__json": {"chat_template": "of the configuration"},
    "chat_template__json": {"chat_template": "of the older file"},
    "chat_template__jinja": "of its own file",
}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_file_of_its_own_counts_before_the_older_file_and_that_before_a_configuration(
    folder, count
):
    write(folder, **dict([*PLACES.items()][:count]))
    expected = ["of the configuration", "of the older file", "of its own file"][count - 1]
    assert find_model_files(str(folder)).chat_template.source == expected


def test_templates_of_a_folder_of_their_own_are_found_by_their_names(folder):
    write(folder, chat_template__jinja="x", additional_chat_templates_in_tool_use__jinja="y")
    found = find_model_files(str(folder)).templates
    assert {name: it.source for name, it in found.items()} == {"default": "x", "tool_use": "y"}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"chat_template": "a"}},
        {"tokenizer_config__json": {"chat_template": [{"name": "default", "template": "b"}]}},
        {"tokenizer_config__json": {"chat_template": "a"}, "chat_template__jinja": "c"},
        {"chat_template__jinja": "c", "additional_chat_templates_in_rag__jinja": "d"},
    ],
)
def test_the_template_in_use_is_the_one_that_the_library_uses(folder, files):
    write(folder, **{"tokenizer_config__json": {}, **files})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write(folder, tokenizer_config__json={**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    expected = AutoTokenizer.from_pretrained(folder).get_chat_template()
    assert find_model_files(str(folder)).chat_template.source == expected


@pytest.mark.parametrize("lists_its_tokens", [True, False])
def test_named_tokens_are_those_that_the_library_finds(folder, lists_its_tokens):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "x",
        "bos_token": OTHERS[0],
        "eos_token": OTHERS[0],
        "pad_token": None,
    }
    if lists_its_tokens:
        config["added_tokens_decoder"] = {}
    older = {"eos_token": {"content": EOS, "lstrip": False}, "unk_token": OTHERS[1]}
    write(folder, tokenizer_config__json=config, special_tokens_map__json=older)
    expected = AutoTokenizer.from_pretrained(folder).special_tokens_map
    assert find_model_files(str(folder)).chat_template.named_tokens == expected
    assert (expected["eos_token"] == EOS) is not lists_its_tokens


def test_whatever_could_change_a_prompt_changes_the_fingerprint_and_its_place_does_not(folder):
    found = [
        found_in(folder, chat_template="x"),
        found_in(folder, chat_template="y"),
        found_in(folder, chat_template="x", bos_token="<s>"),
    ]
    assert len({each.fingerprint for each in found}) == len(found)
    assert found_in(folder, chat_template="x") == found[0]
    write(folder, tokenizer_config__json={}, chat_template__jinja="x")
    assert find_model_files(str(folder)).chat_template == found[0]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"][1]["special"] = True
    write(folder, tokenizer__json=tokenizer)
    assert find_model_files(str(folder)).chat_template.fingerprint != found[0].fingerprint


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config__json": {"chat_template": "x" * 262145}}, "more than 262144 bytes"),
        ({"chat_template__jinja": "x" * 262145}, "more than 262144 bytes"),
        ({"tokenizer_config__json": {"chat_template": "\ud800"}}, "is no text"),
        (
            {f"additional_chat_templates_in_{each}__jinja": "x" for each in range(65)},
            "65 templates, more than 64",
        ),
    ],
)
def test_one_that_cannot_be_one_is_refused(folder, files, message):
    write(folder, **files)
    with pytest.raises(ModelLoadError, match=message):
        find_model_files(str(folder))


def test_one_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"chat_template\.jinja: not readable"):
        find_model_files(str(folder))
