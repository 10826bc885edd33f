"""Two folders have one fingerprint exactly if they hold the same model, however it is written.

Each mutation of a folder below changes what the model does and its fingerprint, or neither. What a
model does is computed: logits, the ids and texts of its tokenizer, the ends of its texts.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from paceline_contract.limits import MOST_CONFIGURATION_CHARACTERS
from paceline_engine.model_files.files import find_model_files
from paceline_engine.model_files.tokenizer_file import TokenizerFile
from paceline_engine.torch_backend.adapters.card import model_fingerprint
from paceline_engine.torch_backend.model_loading import load_model
from paceline_engine.torch_backend.transformers import TransformersBackend
from support.tiny_tokenizers import TINY_TOKENIZERS

TEXTS = ["def draft(prefix):\n    return target", " import  é<|end|>", "Draft\t😁qz"]
PROMPT = [[5, 80, 17, 200, 3, 3, 90, 41]]


@pytest.fixture
def folder(tiny_pair, tmp_path):
    """Give a model whose files say all that those of the field say."""
    folder = shutil.copytree(tiny_pair.drafter, tmp_path / "model")
    edit(folder, "config.json", bos_token_id=0, use_cache=True, rope_theta=None)
    edit(folder, "generation_config.json", eos_token_id=[0, 7])
    edit(folder, "tokenizer_config.json", eos_token="<|end|>", chat_template="{{ messages }}")
    return folder


def content_of(folder, name):
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def write(folder, name, content, **how):
    (folder / name).write_text(json.dumps(content, **how))


def edit(folder, name, **fields):
    write(folder, name, {**content_of(folder, name), **fields})


def drop(folder, name, *fields):
    content = content_of(folder, name)
    write(folder, name, {key: value for key, value in content.items() if key not in fields})


def edit_tokenizer(folder, change):
    content = content_of(folder, "tokenizer.json")
    change(content)
    write(folder, "tokenizer.json", content)


def behaviour(folder):
    """Compute what a model does."""
    files = find_model_files(str(folder))
    model = load_model(files, dtype="float32")
    with torch.no_grad():
        logits = model(torch.tensor(PROMPT)).logits
    tokenizer = Tokenizer.from_str(files.tokenizer.decode())
    ids = [each.ids for each in tokenizer.encode_batch(TEXTS)]
    texts = [tokenizer.decode(each, skip_special_tokens=False) for each in ids]
    ends = {each for each in files.tokens.end_ids if each < files.vocabulary_size}
    lengths = (model.config.max_position_embeddings, files.vocabulary_size)
    return logits.numpy().tobytes(), ids, texts, ends, lengths


def fingerprint(folder):
    return find_model_files(str(folder)).fingerprint("float32")


def reversed_keys(value):
    if isinstance(value, dict):
        return {key: reversed_keys(value[key]) for key in reversed(value)}
    return [*map(reversed_keys, value)] if isinstance(value, list) else value


def rewritten(name, **how):
    return lambda folder: write(folder, name, reversed_keys(content_of(folder, name)), **how)


def fields(name, **values):
    return lambda folder: edit(folder, name, **values)


def tokenizer_with(*path, **values):
    """Set fields of an object in a tokenizer.json, which the path leads to."""

    def change(content):
        for step in path:
            content = content[step]
        content.update(values)

    return lambda folder: edit_tokenizer(folder, change)


def saved_by_the_library(folder):
    path = str(folder / "tokenizer.json")
    Tokenizer.from_file(path).save(path, pretty=False)


def merges_as_texts(content):
    content["model"]["merges"] = [" ".join(each) for each in content["model"]["merges"]]


def without_what_is_plain(content):
    for name in ("normalizer", "post_processor"):
        assert content.pop(name) is None
    for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"):
        assert not content["model"].pop(name)


def sharded(count):
    def shard(folder):
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        placed = {
            name: f"model-{number % count}.safetensors" for number, name in enumerate(tensors)
        }
        for part in set(placed.values()):
            held = {name: tensors[name] for name in tensors if placed[name] == part}
            save_file(held, folder / part, metadata={"format": "pt", "by": "somebody"})
        write(folder, "model.safetensors.index.json", {"weight_map": placed})

    return shard


def with_weights(change):
    def save(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return save


def one_bit(tensors):
    weight = tensors["model.layers.1.mlp.up_proj.weight"]
    weight.view(torch.int32)[3, 4] ^= 1 << 20


def swapped(tensors):
    first, second = (f"model.layers.{each}.mlp.up_proj.weight" for each in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def moved_end(folder):
    (folder / "generation_config.json").unlink()
    edit(folder, "config.json", eos_token_id=[7, 0])


def moved_template(folder):
    drop(folder, "tokenizer_config.json", "chat_template")
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def with_whole_numbers(folder):
    config = content_of(folder, "config.json")
    theta = config["rope_parameters"]["rope_theta"]
    assert isinstance(theta, float)
    config["rope_parameters"]["rope_theta"] = int(theta)
    write(folder, "config.json", config)


def other_rotations(folder):
    config = content_of(folder, "config.json")
    config["rope_parameters"]["rope_theta"] = 500.0
    write(folder, "config.json", config)


def other_ids(content):
    vocabulary = content["model"]["vocab"]
    vocabulary["q"], vocabulary["z"] = vocabulary["z"], vocabulary["q"]


def fewer_merges(content):
    del content["model"]["merges"][0]


CUT = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
FILLED = {
    "strategy": {"Fixed": 50},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<|end|>",
}
ADDS_NOTHING = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
ADDS_AN_END = {
    **ADDS_NOTHING,
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
    ],
    "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [0], "tokens": ["<|end|>"]}},
}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
STRIPPING = {"type": "Sequence", "decoders": [BYTES, STRIP]}
CONFIG, GENERATION, OF_TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"

SAME = {
    "a tokenizer in other white space": rewritten("tokenizer.json", indent=7),
    "a tokenizer in ASCII": rewritten("tokenizer.json", ensure_ascii=True),
    "a tokenizer in UTF-8": rewritten("tokenizer.json", ensure_ascii=False),
    "a tokenizer as the library saves it": saved_by_the_library,
    "merges as texts": lambda it: edit_tokenizer(it, merges_as_texts),
    "a tokenizer without what is plain": lambda it: edit_tokenizer(it, without_what_is_plain),
    "a tokenizer whose words begin and end with nothing": tokenizer_with(
        "model", continuing_subword_prefix="", end_of_word_suffix=""
    ),
    "a tokenizer that adds nothing": tokenizer_with(post_processor=ADDS_NOTHING),
    "a tokenizer's truncation": tokenizer_with(truncation=CUT),
    "a tokenizer's padding": tokenizer_with(padding=FILLED),
    "a configuration in other white space": rewritten(CONFIG, indent=3),
    "the library's version": fields(CONFIG, transformers_version="4.40.0"),
    "where a model came from": fields(CONFIG, _name_or_path="/home/somebody/model"),
    "more architectures": fields(CONFIG, architectures=["LlamaModel", "LlamaForCausalLM"]),
    "no architectures": lambda it: drop(it, CONFIG, "architectures"),
    "the dtype in its older field": fields(CONFIG, dtype=None, torch_dtype="float16"),
    "another dtype": fields(CONFIG, dtype="bfloat16"),
    "no cache in training": fields(CONFIG, use_cache=False),
    "another spread of first weights": fields(CONFIG, initializer_range=0.5),
    "a dropout": fields(CONFIG, attention_dropout=0.25),
    "another first token": fields(CONFIG, bos_token_id=1),
    "whole numbers": with_whole_numbers,
    "ends in the other file": moved_end,
    "ends in another order and twice": fields(GENERATION, eos_token_id=[7, 0, 7]),
    "an end beyond the vocabulary": fields(GENERATION, eos_token_id=[0, 7, 310, 4000]),
    "sampling defaults": fields(GENERATION, temperature=0.5, do_sample=True, max_length=9),
    "another class of tokenizer": fields(OF_TOKENIZER, tokenizer_class="Other"),
    "a template in its own file": moved_template,
    "two shards": sharded(2),
    "five shards": sharded(5),
    "a shard with a note": sharded(1),
    "tensors in another order": with_weights(lambda it: it.update(reversed_keys(dict(it)))),
}
OTHER = {
    "one bit of one weight": with_weights(one_bit),
    "two weights swapped": with_weights(swapped),
    "two weights swapped, in shards": lambda it: (with_weights(swapped)(it), sharded(2)(it)),
    "another epsilon": fields(CONFIG, rms_norm_eps=0.01),
    "other rotations": other_rotations,
    "another activation": fields(CONFIG, hidden_act="relu"),
    "more heads": fields(CONFIG, num_attention_heads=4, num_key_value_heads=2, head_dim=8),
    "another context": fields(CONFIG, max_position_embeddings=100),
    "a layer less": fields(CONFIG, num_hidden_layers=1),
    "an end less": fields(GENERATION, eos_token_id=[0]),
    "another end": fields(GENERATION, eos_token_id=[0, 7, 9]),
    "an end by its text": fields(OF_TOKENIZER, eos_token="!"),
    "two ids swapped": lambda it: edit_tokenizer(it, other_ids),
    "a merge less": lambda it: edit_tokenizer(it, fewer_merges),
    "a normalizer": tokenizer_with(normalizer={"type": "Lowercase"}),
    "a decoder that strips": tokenizer_with(decoder=STRIPPING),
    "a tokenizer that adds an end": tokenizer_with(post_processor=ADDS_AN_END),
    "a space before the first word": tokenizer_with("pre_tokenizer", add_prefix_space=True),
    "another text of a token": tokenizer_with("added_tokens", 0, content="<|other|>"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_changes_nothing_that_a_model_does_leaves_its_fingerprint(folder, name):
    before = behaviour(folder), fingerprint(folder)
    SAME[name](folder)
    assert (behaviour(folder), fingerprint(folder)) == before


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_what_a_model_does_changes_its_fingerprint(folder, name):
    before, named_before = behaviour(folder), fingerprint(folder)
    OTHER[name](folder)
    assert behaviour(folder) != before
    assert fingerprint(folder) != named_before


def test_no_two_of_the_models_above_have_one_fingerprint(folder, tmp_path):
    found = {}
    for number, (name, change) in enumerate(OTHER.items()):
        copy = shutil.copytree(folder, tmp_path / str(number))
        change(copy)
        found.setdefault(fingerprint(copy), []).append(name)
    both = [names for names in found.values() if len(names) > 1]
    assert both == [["two weights swapped", "two weights swapped, in shards"]]


def test_an_unknown_key_of_a_configuration_makes_another_model(folder):
    before = fingerprint(folder)
    edit(folder, CONFIG, somebodys_scale=2)
    assert fingerprint(folder) != before


def test_what_counts_of_a_configuration_is_told_by_name_and_nothing_else(folder):
    before = json.loads(find_model_files(str(folder)).configuration)
    assert before["rms_norm_eps"] == 1e-6
    assert not before.keys() & {"transformers_version", "architectures", "dtype", "eos_token_id"}
    edit(folder, CONFIG, rms_norm_eps=0.01, transformers_version="9")
    after = json.loads(find_model_files(str(folder)).configuration)
    assert after == {**before, "rms_norm_eps": 0.01}


def test_a_configuration_that_no_server_may_send_is_not_told(folder):
    edit(folder, CONFIG, notes="x" * MOST_CONFIGURATION_CHARACTERS)
    assert find_model_files(str(folder)).configuration == ""


def test_the_dtype_is_in_a_fingerprint_and_not_in_what_an_adapter_is_for(folder):
    files = find_model_files(str(folder))
    assert files.fingerprint("float32") != files.fingerprint("bfloat16")
    before = model_fingerprint(files)
    edit(folder, GENERATION, eos_token_id=[3])
    assert model_fingerprint(find_model_files(str(folder))) == before
    edit(folder, CONFIG, rms_norm_eps=0.01)
    assert model_fingerprint(find_model_files(str(folder))) != before


def test_the_part_of_a_configuration_that_is_about_the_decoder_is_read_in_the_same_way(folder):
    edit(folder, CONFIG, text_config={"dtype": "float32", "rms_norm_eps": 1e-05})
    before = fingerprint(folder)
    edit(folder, CONFIG, text_config={"rms_norm_eps": 0.00001, "torch_dtype": "float16"})
    assert fingerprint(folder) == before
    edit(folder, CONFIG, text_config={"rms_norm_eps": 0.0001})
    assert fingerprint(folder) != before


def test_one_tokenizer_written_in_two_ways_is_one_for_a_pair_and_for_its_readers(folder, tmp_path):
    target = shutil.copytree(folder, tmp_path / "target")
    rewritten("tokenizer.json", indent=7)(folder)
    drafter, target = (TransformersBackend(str(each)) for each in (folder, target))
    assert drafter.tokenizer == target.tokenizer
    assert (
        drafter.description.tokenizer_fingerprint,
        drafter.description.fingerprint,
        drafter.chat_template,
    ) == (
        target.description.tokenizer_fingerprint,
        target.description.fingerprint,
        target.chat_template,
    )


@pytest.mark.parametrize("kind", TINY_TOKENIZERS)
def test_the_library_reads_what_is_sent_as_what_was_read(kind):
    original = TINY_TOKENIZERS[kind]()
    pretty = original.to_str(pretty=True).encode()
    other = json.dumps(reversed_keys(json.loads(pretty)), indent=1).encode()
    sent = TokenizerFile(pretty).content
    assert TokenizerFile(other).content == TokenizerFile(sent).content == sent
    again = Tokenizer.from_str(sent.decode())
    assert again.get_vocab() == original.get_vocab()
    assert again.get_added_tokens_decoder() == original.get_added_tokens_decoder()
    for text in ("hello world", " é<s>a b", "you's 🚴 <think>"):
        ids = original.encode(text).ids
        assert again.encode(text).ids == ids
        assert again.decode(ids) == original.decode(ids)
    assert json.loads(again.to_str()) == json.loads(original.to_str())
