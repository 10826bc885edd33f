"""Folders of tiny models in the shapes that people's models have, whose text is known.

A kind is a tokenizer with the files that usually come with it: where the ends of a text stand,
where the chat template is, whether head and embeddings are one. `make` writes a folder of a kind in
milliseconds, without a network.

The model is a Markov chain: what it says next depends on its last token alone, and is what `make`
was told. Attention adds nothing. A layer's MLP has one unit for each token: the unit of the last
token is by far the strongest, and adds the embedding of the one that follows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM

from support.tiny_tokenizers import TINY_TOKENIZERS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

_WIDTH = 128
_SHARPNESS = 2.5
_CONTEXT_LENGTH = 512
_SPECIAL = ["<s>", "</s>", "<|tool|>"]
_WORDS = ["a", "b", "é", "ß", "hello", "world", ".", "'s", "you", "🚴"]
_CHAT = (
    "{% for message in messages %}{{ '<s>' + message.content + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>' }}{% endif %}"
)


@dataclass(frozen=True)
class Kind:
    """A shape of a model's folder.

    Attributes:
        tokenizer: Makes its tokenizer.
        family: The transformers library's configuration of its model.
        is_tied: Whether head and embeddings are one.
        prompt: A text that its tokenizer encodes.
        says: Tokens that it says by default, each at most once.
        ends: The texts of the tokens that end what it says, wherever its files name them.
        config: What its config.json says besides sizes; a text beginning with "id of " stands for
            a token's id, here and in the other files.
        files: Its other files: objects, or the source of a template.
    """

    tokenizer: Callable[[], Tokenizer]
    family: str
    is_tied: bool
    prompt: str
    says: tuple[str, ...]
    ends: tuple[str, ...]
    config: Mapping[str, Any]
    files: Mapping[str, Any]


@dataclass(frozen=True)
class MadeModel:
    """A folder with a model.

    Attributes:
        folder: Where it is.
        token_ids: What it says after any other token; then an end, if it was told to end.
        end_ids: The tokens that end a text.
        prompt: A text that its tokenizer encodes.
        tokenizer: The library's.
    """

    folder: Path
    token_ids: tuple[int, ...]
    end_ids: frozenset[int]
    prompt: str
    tokenizer: Tokenizer


def make(
    kind: str,
    folder: Path,
    *,
    says: Sequence[str] | None = None,
    ends: bool = True,
    wrong_after: Collection[int] = (),
    layers: int = 1,
) -> MadeModel:
    """Write a model of a kind.

    Args:
        kind: One of KINDS.
        folder: Where to; it is made.
        says: The tokens of its text, as the vocabulary has them, each at most once; None: the
            kind's.
        ends: Whether an end follows; else the text begins again.
        wrong_after: Tokens of the text after which it says something else: for drafters.
        layers: How many it has; the first says everything.
    """
    shape = KINDS[kind]
    tokenizer = shape.tokenizer()
    ids = tuple(map(tokenizer.token_to_id, says or shape.says))
    assert None not in ids, "each is a token"
    assert len({*ids}) == len(ids), "what follows a token is one token"
    end_ids = [tokenizer.token_to_id(text) for text in shape.ends]
    following = dict.fromkeys(range(tokenizer.get_vocab_size()), ids[0])
    following |= dict(pairwise([*ids, end_ids[0] if ends else ids[0]]))
    following |= {each: ids[-1] if following[each] != ids[-1] else ids[0] for each in wrong_after}
    folder.mkdir(parents=True, exist_ok=True)
    model = _model(shape, tokenizer, following, layers=layers)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # the kind says whether there is one
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    for name, content in {"config.json": {**config, **shape.config}, **shape.files}.items():
        text = content if isinstance(content, str) else json.dumps(_with_ids(content, tokenizer))
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return MadeModel(folder, ids, frozenset(end_ids), shape.prompt, tokenizer)


@torch.no_grad()
def _model(shape: Kind, tokenizer: Tokenizer, following: Mapping[int, int], *, layers: int) -> Any:
    size = tokenizer.get_vocab_size()
    config = getattr(transformers, shape.family)(
        vocab_size=size,
        hidden_size=_WIDTH,
        intermediate_size=size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT_LENGTH,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(size)
    directions = torch.randn(size, _WIDTH, generator=generator)
    directions /= directions.norm(dim=1, keepdim=True)
    model.model.embed_tokens.weight.copy_(directions * _WIDTH**0.5)
    if not shape.is_tied:
        model.lm_head.weight.copy_(directions * 4)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    first = model.model.layers[0].mlp
    first.gate_proj.weight.copy_(directions * _SHARPNESS)
    first.up_proj.weight.copy_(directions * _SHARPNESS)
    next_ids = torch.tensor([following[each] for each in range(size)])
    # Many tokens have the same one after them: together their units would outvote any other.
    count = torch.bincount(next_ids, minlength=size)[next_ids]
    first.down_proj.weight.copy_((directions[next_ids] / count.sqrt()[:, None]).T)
    said = model(torch.arange(size)[:, None]).logits[:, -1].argmax(-1)
    assert said.equal(next_ids), "it says what it was told to"
    return model


def _with_ids(content: Any, tokenizer: Tokenizer) -> Any:
    if isinstance(content, dict):
        return {name: _with_ids(each, tokenizer) for name, each in content.items()}
    if isinstance(content, list):
        return [_with_ids(each, tokenizer) for each in content]
    if isinstance(content, str) and content.startswith("id of "):
        return tokenizer.token_to_id(content.removeprefix("id of "))
    return content


def _added(text: str) -> dict[str, Any]:
    """Return a token as an object of a configuration."""
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"__type": "AddedToken", "content": text, **flags}


def _byte_fallback() -> Tokenizer:
    tokenizer = TINY_TOKENIZERS["byte fallback, as of Llama 2 and Phi-3"]()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return tokenizer


def _unigram() -> Tokenizer:
    words = ["<unk>", "▁", *_WORDS, *(f"▁{word}" for word in _WORDS)]
    tokenizer = Tokenizer(models.Unigram([(word, -1.0 - at) for at, word in enumerate(words)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _with_special(tokenizer)


def _word_pieces() -> Tokenizer:
    words = ["[UNK]", *_WORDS, *(f"##{word}" for word in _WORDS)]
    vocabulary = {word: at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return _with_special(tokenizer)


def _with_special(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


KINDS: Mapping[str, Kind] = {
    # As many fine-tunes: the end of a document in one file, the end of a turn in the other.
    "byte level": Kind(
        tokenizer=TINY_TOKENIZERS["byte level, as of GPT-2, Llama 3 and Qwen"],
        family="Qwen2Config",
        is_tied=False,
        prompt="say:",
        says=("ab", "Ġa", "Ã±", "ðŁ", "ĺ", "Ģ", "c", "Ġ", "d"),
        ends=("</s>", "<|tool|>"),
        config={},
        files={
            "generation_config.json": {"eos_token_id": ["id of <|tool|>"], "temperature": 0.5},
            "tokenizer_config.json": {
                "eos_token": "</s>",
                "bos_token": "<s>",
                "chat_template": _CHAT,
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
        },
    ),
    # As Llama 2: one id in config.json, objects in the older file, a tied head, no template.
    "byte fallback": Kind(
        tokenizer=_byte_fallback,
        family="LlamaConfig",
        is_tied=True,
        prompt="a b",
        says=("▁hello", "▁world", "<0xF0>", "<0x9F>", "<0x98>", "<0x81>", "you", "<0x0A>"),
        ends=("</s>",),
        config={"eos_token_id": "id of </s>", "bos_token_id": "id of <s>"},
        files={
            "special_tokens_map.json": {
                "bos_token": _added("<s>"),
                "eos_token": _added("</s>"),
                "additional_special_tokens": ["<|tool|>"],
            },
            "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        },
    ),
    # As T5's descendants and many small models: a template in a file of its own.
    "unigram": Kind(
        tokenizer=_unigram,
        family="MistralConfig",
        is_tied=False,
        prompt="hello world",
        says=("▁you", "'s", "▁world", ".", "▁é", "ß", "▁🚴"),
        ends=("</s>",),
        config={"eos_token_id": ["id of </s>"]},
        files={
            "generation_config.json": {"eos_token_id": "id of </s>"},
            "tokenizer_config.json": {
                "eos_token": _added("</s>"),
                "unk_token": "<unk>",
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
            "chat_template.jinja": _CHAT,
        },
    ),
    # Only its tokenizer's configuration names an end; several templates by name.
    "word pieces": Kind(
        tokenizer=_word_pieces,
        family="MistralConfig",
        is_tied=True,
        prompt="hello b",
        says=("world", "##a", "##b", ".", "é", "##ß", "you"),
        ends=("</s>",),
        config={},
        files={
            "tokenizer_config.json": {
                "eos_token": "</s>",
                "pad_token": "<|tool|>",
                "chat_template": [
                    {"name": "default", "template": _CHAT},
                    {"name": "tool_use", "template": "{{ tools }}"},
                ],
                "tokenizer_class": "PreTrainedTokenizerFast",
            },
        },
    ),
}
