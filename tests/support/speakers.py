"""Tiny tokenizers of different kinds, trained on ten scripts, emoji and code; and models of them.

Each is filled up with special tokens of its own, and their ids mean something else in each.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from support.tiny_models import build_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = (
    "The quick brown fox does not jump over the lazy dog, does it? It does not.",
    "def draft(prefix):\n    if x != y:\n        return target(prefix)  # twice  the same\n",
    "Ein Bär läuft über die Straße. La biblioteca está cerrada.",
    "Быстрая лиса прыгает через собаку.",
    "Η γρήγορη αλεπού πηδάει πάνω από το σκυλί.",  # noqa: RUF001 - Greek
    "敏捷的棕色狐狸跳过了懒狗。\n敏捷的狐狸。",
    "素早い茶色の狐がのろまな犬を飛び越える。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘는다.",
    "الثعلب البني السريع يقفز فوق الكلب.",
    "השועל החום המהיר קופץ מעל הכלב.",
    "तेज़ भूरी लोमड़ी कुत्ते के ऊपर कूदती है।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัข",
    "🚴🏽‍♀️ 👩‍👩‍👧 naïve café ﬁne e\u0301\u00a0 \u3000 x\t\ty <|im_end|> </s> \r\n\r\n",
)
"""English, code, two more Latin ones, and ten further scripts; a special token's text, typed."""

END = {"byte level": "<|im_end|>", "pieces": "</s>", "unigram": "<eos>"}
"""The token that ends a text, by kind."""


def _byte_level(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _pieces(size: int) -> Tokenizer:
    """As Llama 2: the whole text is one word, spaces are letters, bytes stand for the rest."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=60,
        show_progress=False,
    )
    # Trained on single words: no piece goes across a space.
    words = (word for text in TEXTS for word in text.replace(" ", " ▁").split(" "))
    tokenizer.normalizer, normalizer = None, tokenizer.normalizer
    tokenizer.train_from_iterator(words, trainer)
    said = json.loads(tokenizer.to_str())
    said["added_tokens"] = [it for it in said["added_tokens"] if it["id"] < 3]
    said |= {"pre_tokenizer": None}
    tokenizer = Tokenizer.from_str(json.dumps(said))
    tokenizer.normalizer = normalizer
    return tokenizer


def _unigram(size: int) -> Tokenizer:
    """As many small models: NFKC, the likeliest pieces, and no bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=["<pad>", "<eos>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[int], Tokenizer]] = {
    "byte level": _byte_level,
    "pieces": _pieces,
    "unigram": _unigram,
}


def make_speaker(
    kind: str, folder: Path, *, size: int = 420, seed: int, sharpness: float = 1.0
) -> Path:
    """Write a tiny random model with a tokenizer of a kind; its head has 20 rows more."""
    tokenizer = KINDS[kind](size)
    build_model(folder, tokenizer, layer_count=2, seed=seed, sharpness=sharpness)
    end = tokenizer.token_to_id(END[kind])
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": end}))
    return folder
