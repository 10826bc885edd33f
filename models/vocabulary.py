"""The tokenizer: byte-level BPE, so that every text has ids and every id sequence has bytes."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from corpus import SourceFile

VOCABULARY_SIZE = 2048
END_OF_TEXT_ID = 0
PAD_ID = 1
_END_OF_TEXT = "<|endoftext|>"
_PAD = "<|pad|>"


def train_tokenizer(files: Sequence[SourceFile], *, context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the training files.

    No special token is added to a prompt: windows of the training text start anywhere in a file,
    so a prompt that starts with a definition is what the models have seen.

    Args:
        files: The training files.
        context: The longest sequence of the models, written as `model_max_length`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[_END_OF_TEXT, _PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files), trainer=trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=_END_OF_TEXT,
        eos_token=_END_OF_TEXT,
        pad_token=_PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def token_stream(
    files: Sequence[SourceFile], *, tokenizer: PreTrainedTokenizerBase
) -> torch.Tensor:
    """Encode files into one stream; `<|endoftext|>` stands before each file.

    Returns:
        (N,) int64 on the CPU.
    """
    if not files:
        return torch.empty(0, dtype=torch.int64)
    encoded = tokenizer([file.text for file in files], add_special_tokens=False, verbose=False)
    ids = chain.from_iterable([END_OF_TEXT_ID, *file_ids] for file_ids in encoded["input_ids"])
    return torch.tensor(list(ids), dtype=torch.int64)
