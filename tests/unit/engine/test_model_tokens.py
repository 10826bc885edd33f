"""Which tokens end a text, and which ask for what is between two texts."""

from __future__ import annotations

import inspect
import json
import logging
import shutil

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.report import known_defaults, known_fim
from paceline_engine.terms.backend import ModelLoadError
from paceline_engine.terms.calls import SamplingDefaults
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_models import build_tokenizer

CHATML = (
    "{{ bos_token }}{# content <|never|> #}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# With a name of its own for what was said.
NAMED_CONTENT = (
    "{% for message in messages %}{%- set said = message['content'] | trim -%}<|im_start|>"
    "{{ message.role }}\n{{ said }}<|im_end|>\n{% endfor %}"
)
# With a system's message where there is none, as Qwen's.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{% set messages = [{'role': 'system', 'content':"
    " 'Be kind.'}] + messages %}{% endif %}{% for message in messages %}{{ '<|im_start|>' +"
    " message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A name of its own from which reasoning is cut off.
CUT_CONTENT = (
    "{% for message in messages %}{% set said = message['content'] %}{% if '</think>' in said %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}<|im_start|>{{ message.role }}\n"
    "{{ said }}<|im_end|>\n{% endfor %}"
)
# The system's message is made of the first one; of a name that is read, and of one in a loop.
FIRST_REPEATED = DEFAULT_SYSTEM.replace("'Be kind.'", "messages[0]['content']")
LIST_OF_ITS_OWN = (
    "{% set turns = [{'role': 'system', 'content': messages[0]['content']}] + messages %}"
    "{% for turn in turns %}{{ '<|im_start|>' + turn.role + turn.content + '<|im_end|>' }}"
    "{% endfor %}{% if turns | length %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As of gpt-oss: messages of the history end otherwise than an answer, and so does reasoning.
CHANNELS = (
    "{% for message in messages %}{% if loop.last %}{{ '<|start|>assistant<|message|>' +"
    " message.content + '<|return|>' }}{% else %}{{ '<|start|>' + message.role + '<|message|>' +"
    " message.content + '<|end|>' }}{% endif %}{% endfor %}"
)
CHANNELS_LAST = (
    "{% for message in messages %}{% if not loop.last %}{{ '<|start|>' + message.role +"
    " '<|message|>' + message.content + '<|end|>' }}{% else %}{{ '<|start|>assistant<|message|>' +"
    " message.content + '<|return|>' }}{% endif %}{% endfor %}"
)
# As of GLM 4: nothing ends a turn but the beginning of the next one.
OPEN_TURNS = (
    "{% for it in messages %}{% if it.role == 'user' %}<|user|>\n{{ it.content }}{% else %}"
    "<|assistant|>\n{{ it.content }}{% endif %}{% endfor %}<|assistant|>"
)
# As of Phi 3: the end of all turns is another token than that of each.
WHOLE_END = (
    "{% for it in messages %}{{ '<|' + it.role + '|>\n' + it.content + '<|end|>\n' }}"
    "{% endfor %}{{ eos_token }}"
)


@pytest.fixture
def folder(tiny_pair, tmp_path):
    """Give a model that ends its texts with token 0, without a word of it in any file."""
    folder = shutil.copytree(tiny_pair.drafter, tmp_path / "model")
    edit(folder, "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    return folder


def edit(folder, name, **fields):
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))


def with_tokens(folder, *texts, special=True):
    """Give the tokenizer more tokens in the places of its last ones, and return their ids."""
    tokenizer = build_tokenizer(300 - len(texts))
    tokenizer.add_tokens([AddedToken(text, special=special) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tuple(tokenizer.token_to_id(text) for text in texts)


def ends(folder):
    return find_model_files(str(folder)).tokens.end_ids


PLACES = {
    "generation_config.json": ({"eos_token_id": [7, 8]}, (7, 8)),
    "config.json": ({"eos_token_id": 9}, (9,)),
    "tokenizer_config.json": ({"eos_token": "<|fill-0|>"}, ("<|fill-0|>",)),
    "special_tokens_map.json": ({"eos_token": {"content": "<|fill-1|>"}}, ("<|fill-1|>",)),
}


def ids_of(folder, found):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {tokenizer.token_to_id(each) if isinstance(each, str) else each for each in found}


@pytest.mark.parametrize("name", PLACES)
def test_a_text_ends_where_one_file_alone_says_so(folder, name):
    fields, expected = PLACES[name]
    edit(folder, name, **fields)
    assert {*ends(folder)} == ids_of(folder, expected)


def test_what_ends_a_text_is_the_union_of_what_all_files_say(folder):
    for name, (fields, _) in PLACES.items():
        edit(folder, name, **fields)
    every = [each for _, expected in PLACES.values() for each in expected]
    assert {*ends(folder)} == ids_of(folder, every)
    assert len(ends(folder)) == len(every)


@pytest.mark.parametrize("part", ["text_config", "decoder"])
def test_the_part_of_a_configuration_that_is_about_the_decoder_counts(folder, part):
    edit(folder, "config.json", **{part: {"eos_token_id": [11]}})
    assert ends(folder) == (11,)


def test_a_token_of_the_vocabulary_that_is_not_special_ends_a_text_as_well(folder):
    edit(folder, "tokenizer_config.json", eos_token="!")
    assert {*ends(folder)} == ids_of(folder, ["!"])


@pytest.mark.parametrize("wrong", ["x", -1, True, [0, None], 1 << 32, 1.5])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_what_is_no_token_id_is_refused_with_its_file(folder, name, wrong):
    edit(folder, name, eos_token_id=wrong)
    with pytest.raises(ModelLoadError, match=rf"{name}: eos_token_id is .* not a token id"):
        find_model_files(str(folder))


@pytest.mark.parametrize(
    "template",
    [CHATML, NAMED_CONTENT, CUT_CONTENT, DEFAULT_SYSTEM, FIRST_REPEATED, LIST_OF_ITS_OWN],
    ids=["ChatML", "named", "cut", "default", "repeated", "list"],
)
@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
def test_the_end_of_a_turn_that_a_template_writes_ends_a_text(folder, place, template):
    base, _, turn_end = with_tokens(folder, "<|base|>", "<|im_start|>", "<|im_end|>")
    edit(folder, place, eos_token_id=base)
    edit(folder, "tokenizer_config.json", bos_token="<|base|>", eos_token="<|base|>")
    (folder / "chat_template.jinja").write_text(template)
    assert ends(folder) == (base, turn_end)


@pytest.mark.parametrize("template", [CHANNELS, CHANNELS_LAST], ids=["first", "last"])
def test_nothing_is_added_where_a_declared_end_stands_among_the_turns(folder, template):
    texts = ("<|start|>", "<|message|>", "<|end|>", "<|return|>")
    *_, returned = with_tokens(folder, *texts)
    edit(folder, "generation_config.json", eos_token_id=returned)
    edit(folder, "tokenizer_config.json", chat_template=template)
    assert ends(folder) == (returned,)


def test_the_declared_end_of_all_turns_leaves_each_turns_own_end(folder):
    base, turn_end = with_tokens(folder, "<|base|>", "<|end|>")
    edit(folder, "tokenizer_config.json", eos_token="<|base|>", chat_template=WHOLE_END)
    assert ends(folder) == (base, turn_end)


def test_a_token_that_begins_turns_ends_none(folder):
    base, *_ = with_tokens(folder, "<|base|>", "<|user|>", "<|assistant|>")
    edit(folder, "tokenizer_config.json", eos_token="<|base|>", chat_template=OPEN_TURNS)
    assert ends(folder) == (base,)


def test_a_token_of_the_template_that_is_not_special_ends_nothing(folder):
    with_tokens(folder, "<|im_start|>", "<|im_end|>", special=False)
    edit(folder, "tokenizer_config.json", chat_template=CHATML)
    assert ends(folder) == ()
    edit(folder, "tokenizer_config.json", additional_special_tokens=["<|im_end|>"])
    assert {*ends(folder)} == ids_of(folder, ["<|im_end|>"])


CLASSES = ["CodeLlamaTokenizer", "GemmaTokenizer", "GPT2Tokenizer", "LlamaTokenizer"]


@pytest.mark.parametrize("ending", ["", "Fast"])
@pytest.mark.parametrize("name", [*CLASSES, "Qwen2Tokenizer", "PreTrainedTokenizer"])
def test_tokens_that_no_file_names_are_called_what_the_librarys_class_calls_them(
    folder, name, ending
):
    kinds = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    arguments = inspect.signature(tokenizer_class_from_name(name).__init__).parameters
    expected = {
        key: str(arguments[key].default)
        for key in (f"{kind}_token" for kind in kinds)
        if key in arguments and arguments[key].default is not None
    }
    assert bool(expected) is (name != "PreTrainedTokenizer")
    edit(folder, "tokenizer_config.json", tokenizer_class=f"{name}{ending}")
    assert find_model_files(str(folder)).tokens.named == {}, "the tokenizer has none of them"
    assert ends(folder) == ()
    with_tokens(folder, *sorted({*expected.values()}))
    assert find_model_files(str(folder)).tokens.named == expected
    assert {*ends(folder)} == ids_of(folder, [it for key, it in expected.items() if "eos" in key])


def test_a_models_own_names_reach_its_template_as_in_the_library(folder):
    with_tokens(folder, "<image>", "<video>", "<eot>")
    source = "{{ image_token }}{{ (video_token) }}{{ messages[0].content }}{{ eot_token }}"
    edit(
        folder,
        "tokenizer_config.json",
        chat_template=source,
        image_token="<image>",
        eot_token={"content": "<eot>", "__type": "AddedToken", "special": True},
        add_bos_token=True,
        extra_special_tokens={"video_token": "<video>", "unheard_of_token": "<fill>", "(": "<eot>"},
    )
    library = PreTrainedTokenizerFast.from_pretrained(folder)
    found = find_model_files(str(folder)).chat_template.named_tokens
    assert found == {"image_token": "<image>", "video_token": "<video>", "eot_token": "<eot>"}
    written = library.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert written == "<image><video>a<eot>"


def test_what_a_file_says_of_a_name_counts_before_its_class(folder):
    with_tokens(folder, "<s>", "</s>", "<unk>")
    named = {"tokenizer_class": "LlamaTokenizer", "eos_token": None, "bos_token": "<|fill-0|>"}
    edit(folder, "tokenizer_config.json", **named)
    expected = {"bos_token": "<|fill-0|>", "unk_token": "<unk>"}
    assert find_model_files(str(folder)).tokens.named == expected
    assert ends(folder) == ()


FIM = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek's
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
]


@pytest.mark.parametrize("texts", FIM)
def test_tokens_for_filling_in_the_middle_are_found_by_the_names_of_families(folder, texts):
    *shuffled, first = with_tokens(folder, texts[1], texts[2], texts[0])
    assert TransformersBackend(str(folder)).description.fim_token_ids == (first, *shuffled)


def test_tokens_for_filling_in_the_middle_are_found_where_a_configuration_names_them(folder):
    ids = with_tokens(folder, "<A>", "<B>", "<C>")
    names = {"prefix_token": "<A>", "suffix_token": {"content": "<B>"}, "middle_token": "<C>"}
    edit(folder, "tokenizer_config.json", **names)
    assert TransformersBackend(str(folder)).description.fim_token_ids == ids


def test_tokens_for_filling_in_the_middle_that_cannot_be_chosen_are_none(folder):
    ids = with_tokens(folder, *FIM[0])
    files = find_model_files(str(folder))
    assert known_fim(files, vocabulary_size=max(ids)) == ()
    assert set(known_fim(files, vocabulary_size=max(ids) + 1)) == set(ids)


def test_two_of_three_such_tokens_are_none(folder):
    with_tokens(folder, "<fim_prefix>", "<fim_suffix>")
    assert TransformersBackend(str(folder)).description.fim_token_ids == ()


def said(caplog, folder):
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="paceline_engine"):
        TransformersBackend(str(folder))
    return [(it.levelname, it.getMessage()) for it in caplog.records]


def test_a_model_whose_texts_nothing_ends_is_warned_of(folder, caplog):
    warnings = [text for level, text in said(caplog, folder) if level == "WARNING"]
    assert any("no token ends its texts" in text for text in warnings)
    edit(folder, "generation_config.json", eos_token_id=[300, 4000])
    edit(folder, "tokenizer_config.json", eos_token="<|im_end|>")
    warnings = [text for level, text in said(caplog, folder) if level == "WARNING"]
    for expected in (
        "no token ends its texts",
        "with tokens beyond its vocabulary of 300",
        "eos_token is '<|im_end|>', which its tokenizer does not have",
    ):
        assert any(expected in text for text in warnings), expected


def test_one_line_tells_what_was_found_and_what_was_not(folder, caplog):
    edit(folder, "generation_config.json", eos_token_id=3, temperature=0.5, top_p=0.75)
    (line,) = [text for _, text in said(caplog, folder) if "ends of a text" in text]
    assert "ends of a text: 3;" in line
    assert "temperature 0.5, top_p 0.75" in line
    assert line.endswith("not found: named tokens, chat templates, fill in the middle")
    edit(folder, "tokenizer_config.json", eos_token="<|end|>", chat_template="{{ messages }}")
    with_tokens(folder, *FIM[0])
    (line,) = [text for _, text in said(caplog, folder) if "ends of a text" in text]
    assert "named tokens: eos_token '<|end|>'" in line
    assert "chat templates: 'default' (tokenizer_config.json)" in line
    assert "fill in the middle: 297, 298, 299" in line
    assert line.endswith("not found: nothing")


def test_a_folder_of_long_texts_makes_no_long_line(folder, caplog):
    edit(folder, "tokenizer_config.json", bos_token="x" * 100_000)
    assert all(len(text) < 2500 for _, text in said(caplog, folder))


def test_what_the_files_say_of_sampling_is_told_as_far_as_a_request_could_say_it(folder, caplog):
    told = {"temperature": 0.5, "top_k": 20, "top_p": 1.5, "min_p": True, "do_sample": True}
    edit(folder, "generation_config.json", **told, repetition_penalty=1)
    found = known_defaults(find_model_files(str(folder)), vocabulary_size=300)
    assert found == SamplingDefaults(temperature=0.5, top_k=20, repetition_penalty=1.0)
    assert "top_p 1.5, which is left out" in caplog.text
    assert "min_p True, which is left out" in caplog.text
