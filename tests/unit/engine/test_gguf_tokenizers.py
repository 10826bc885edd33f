"""A GGUF file's tokenizer is that of the model that the file was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.tokenization_utils_base import generate_merges

from paceline_engine.model_files.files import find_model_files
from paceline_engine.terms.backend import ModelLoadError
from support.gguf_files import GgufParts, write_gguf

ROOT = Path(__file__).parents[3]
ODD = [
    "",
    " ",
    "  12",
    "a  1234567\n\n\n  b\t3",
    "½ ² ③ Ⅷ 1½",
    "don't DON'T we'LL I'm",
    "naïve café e\u0301 \ufb01",
    "日本語のテキスト、한국어 텍스트",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "CamelCaseWords andALLCAPS",
    "x = {'a': [1, 2], \"b\": 3.5e-10}\r\n\tif x:\n        pass",
    "\u200b\ufeff\u00a0 \u3000",
    "<s> </s> <unk> <0x41> <|end|>",
    "a\x00b\x7f",
    "<think>so</think><|end|>",
]
NFC = normalizers.NFC()
SMOLLM = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


def split_by(pattern):
    """Split as the library's own classes split."""
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), spelt])


# How the models of a name split texts, what they do before, and whether merges are ignored.
ORIGINALS = {
    "gpt-2": (GPT2, None, False),
    "phi-2": (GPT2, None, False),
    "smollm": (SMOLLM, None, False),
    "starcoder": (SMOLLM, None, False),
    "refact": (SMOLLM, None, False),
    "codeshell": (SMOLLM, None, False),
    **{
        name: (split_by(GGUF_PRE_TOKENIZER_SPLITS[name]), normalizer, ignores)
        for name, normalizer, ignores in (
            ("llama-bpe", None, True),
            ("llama3", None, True),
            ("llama-v3", None, True),
            ("falcon3", None, True),
            ("dbrx", None, False),
            ("smaug-bpe", None, False),
            ("tekken", None, True),
            ("qwen2", NFC, False),
            ("deepseek-r1-qwen", None, False),
            ("gpt-4o", None, False),
        )
    },
}


@pytest.fixture(scope="module")
def texts():
    """Give lines of all sorts: prose, code, tables, and what seldom stands in any of them."""
    files = [ROOT / "README.md", ROOT / "docs" / "protocol.md", Path(__file__)]
    lines = [line for path in files for line in path.read_text().split("\n")]
    return [*ODD, *lines, "\n".join(lines)]


def trained(texts, pre_tokenizer, normalizer, *, ignores_merges):
    """Learn a vocabulary as a model's author does, with tokens before and after the learnt ones."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens(["<|last|>"])
    return tokenizer


def tiny_model(size):
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def written(path, tokenizer, **options):
    model = tiny_model(tokenizer.get_vocab_size())
    return write_gguf(path / "model.gguf", model, tokenizer, GgufParts(**options))


def loaded(path):
    return Tokenizer.from_str(find_model_files(str(path)).tokenizer.decode())


@pytest.mark.parametrize("pre", ORIGINALS)
def test_each_known_name_makes_the_originals_tokens_of_many_texts(pre, texts, tmp_path):
    pre_tokenizer, normalizer, ignores = ORIGINALS[pre]
    original = trained(texts, pre_tokenizer, normalizer, ignores_merges=ignores)
    found = loaded(written(tmp_path, original, pre=pre))
    assert found.get_vocab() == original.get_vocab()
    for text in texts:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.decode(ids) == original.decode(ids)
        assert found.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )


def test_every_name_in_the_table_was_compared_with_an_original(tmp_path, texts):
    path = written(tmp_path, trained(texts[:20], GPT2, None, ignores_merges=False), pre="any")
    with pytest.raises(ModelLoadError) as refusal:
        find_model_files(str(path))
    assert str(refusal.value) == (
        f"{path}: how its tokenizer splits texts is unknown: tokenizer.ggml.pre is 'any'; known"
        f" are {', '.join(sorted(ORIGINALS))}"
    )


def test_a_file_that_names_no_splitting_is_refused(tmp_path, texts):
    original = trained(texts[:20], GPT2, None, ignores_merges=False)
    path = written(tmp_path, original, values={"tokenizer.ggml.pre": None})
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre is 'None'; known are"):
        find_model_files(str(path))


@pytest.mark.parametrize(
    ("pre", "values", "begins"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_a_text_begins_with_a_token_where_the_file_or_its_family_says_so(
    pre, values, begins, texts, tmp_path
):
    original = trained(texts[:20], GPT2, None, ignores_merges=False)
    ids = {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 5}
    found = loaded(written(tmp_path, original, pre=pre, values=values | ids))
    plain = found.encode("a b", add_special_tokens=False).ids
    assert found.encode("a b").ids == [*([0] if begins else []), *plain]


def sentence_piece(texts):
    """Learn a vocabulary as SentencePiece has it: each token with a score, and every byte."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    learner.train_from_iterator([text[:2000] for text in texts], trainer)
    pieces = sorted(learner.get_vocab(), key=learner.get_vocab().get)
    made = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*made, *(each for each in pieces if each not in made)]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - len(made))]
    return tokens, types, [0.0 if each < len(made) else -float(each) for each in range(len(tokens))]


def sentence_piece_original(tokens, scores, *, prefix):
    """Make what the library makes of it for Llama 2 and Mistral."""
    vocabulary = {text: each for each, text in enumerate(tokens)}
    named = {text: scores[each] for text, each in vocabulary.items() if each >= 259}
    original = Tokenizer(
        models.BPE(
            vocabulary,
            generate_merges(vocabulary, named),
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    original.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    original.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    original.add_special_tokens(["<unk>", "<s>", "</s>"])
    return original


@pytest.mark.parametrize("prefix", [None, True, False])
def test_a_sentence_piece_vocabulary_makes_the_originals_tokens(prefix, texts, tmp_path):
    tokens, types, scores = sentence_piece(texts)
    original = sentence_piece_original(tokens, scores, prefix=prefix is not False)
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    path = written(tmp_path, original, values=values)
    found = loaded(path)
    for text in texts:
        ids = original.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.decode(ids) == original.decode(ids)
        assert found.encode(text).ids == [1, *ids]
    assert json.loads(find_model_files(str(path)).tokenizer)["model"]["unk_token"] == "<unk>"
